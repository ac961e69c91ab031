"""Scenarios for the scheduler: drawn at random, replayed by the reference, compared with what vLLM did.

A scenario is the JSON that ``scripts/vllm_trace.py`` reads, and :func:`replay` answers in the form in which
that script answers. To write scenarios for it:

    python tests/vllm_scenarios.py FIRST_SEED COUNT > scenarios.json
"""

import itertools
import json
import random
import sys
import zlib
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from tailopt.simulate.vllm_cache import BlockCache
from tailopt.simulate.vllm_scheduler import Limits, Request, Scheduler

Scenario = dict[str, Any]
StepRecord = dict[str, Any]
MAX_STEPS = 2000  # of scripts/vllm_trace.py
AGAIN = 1000  # added to the number of a request that is submitted again


def draw(rng: random.Random) -> Scenario:
    """A scenario small enough to run in milliseconds, with a cache small enough to matter.

    Groups share a prompt or a part of it; prompts and borders often end with a block; some requests arrive
    late, are aborted, or are aborted and submitted again with what they generated.
    """
    block = rng.choice([1, 2, 4, 4, 8, 16])
    longest_prompt, longest_output = rng.choice([(12, 40), (20, 80), (40, 40), (60, 60), (100, 10)])
    groups = [_length(rng, longest_prompt, block) for _ in range(rng.randint(1, 4))]
    late = rng.random() < 0.4
    aborts = rng.random() < 0.4
    priorities = rng.random() < 0.5
    ties = rng.random() < 0.3
    requests = []
    for number in range(rng.randint(2, 16)):
        group = rng.randrange(len(groups))
        shared = groups[group] if rng.random() < 0.8 else rng.randint(0, groups[group])
        own = 0 if shared and rng.random() < 0.8 else rng.randint(1, longest_prompt)
        start = 100_000 * (number + 1)
        at = rng.randrange(60) if late else 0
        abort = at + rng.randrange(1, 50) if aborts and rng.random() < 0.4 else None
        again = abort is not None and rng.random() < 0.7
        requests.append(
            {
                "number": number,
                "prompt": [[10_000_000 * (group + 1), shared], [start, own]],
                "output": rng.randint(1, longest_output),
                "next": start + own,
                "priority": rng.randrange(3) if priorities else 0,
                "arrival": 0.0 if ties else float(number if not priorities else rng.randrange(20)),
                "at": at,
                "abort": abort,
                "again": [abort + rng.randrange(10), AGAIN + number] if again else None,
            }
        )
    rows = [sum(count for _, count in r["prompt"]) + r["output"] for r in requests]
    chunked = rng.random() < 0.85
    max_running = rng.choice([1, 3, 6, 12, 16])
    budget = max_running + rng.choice([0, 3, 10, 40, 200])
    caching = rng.random() < 0.8
    least = max(-(-(row - 1) // block) for row in rows)  # the longest row alone must fit
    engine = {
        "blocks": 1 + max(1, int(least * rng.choice([1.0, 1.0, 1.3, 1.6, 2.0, 2.5, 4.0, 10.0]))),
        "block_tokens": block,
        "max_running": max_running,
        "token_budget": budget if chunked else max(budget, *rows, *[row + 1 for row in rows]),
        "policy": "priority" if priorities else "fcfs",
        "prefix_caching": caching,
        "chunked_prefill": chunked,
        "long_prefill_tokens": rng.choice([1, 5, 16]) if rng.random() < 0.15 else 0,
        "reserve_full_prompt": rng.random() < 0.85,
        "watermark": rng.choice([0.01, 0.1, 0.3]) if rng.random() < 0.2 else 0.0,
    }
    return {"engine": engine, "requests": requests}


def _length(rng: random.Random, longest: int, block: int) -> int:
    length = rng.randint(1, longest)
    return -(-length // block) * block if rng.random() < 0.4 else length


def limits(scenario: Scenario) -> Limits:
    return Limits(**scenario["engine"])


def submitted(request: dict[str, Any]) -> Request:
    """The reference's view of a request of a scenario."""
    (group, shared), (_, own) = request["prompt"]
    return Request(
        number=request["number"],
        prompt_tokens=shared + own,
        group=group,
        shared_tokens=shared,
        priority=request["priority"],
        arrival=request["arrival"],
    )


def replay(scenario: Scenario, cache: BlockCache | None = None) -> list[StepRecord]:
    """What the reference does, in the form of ``scripts/vllm_trace.py``, with ``sampling`` beside it."""
    engine = Scheduler(limits(scenario), cache)
    contents = _Contents(scenario)
    output = {r["number"]: r["output"] for r in scenario["requests"]}
    requests = {r["number"]: submitted(r) for r in scenario["requests"]}
    to_add = sorted(scenario["requests"], key=lambda r: r["at"])
    to_abort = sorted((r for r in scenario["requests"] if r["abort"] is not None), key=lambda r: r["abort"])
    again: list[tuple[int, Request]] = []
    steps: list[StepRecord] = []
    here: set[int] = set()
    while len(steps) < MAX_STEPS and (to_add or again or here):
        while to_abort and to_abort[0]["abort"] == len(steps):
            aborted = to_abort.pop(0)
            number = aborted["number"]
            if number not in here:
                continue
            if aborted["again"] is not None:
                step, new = aborted["again"]
                generated = engine.generated(number)
                old = requests[number]
                requests[new] = replace(
                    old, number=new, prompt_tokens=old.prompt_tokens + generated, sequence=number
                )
                output[new] = output[number] - generated
                again.append((step, requests[new]))
            engine.abort(number)
            here.remove(number)
        new_ones = [r["number"] for r in itertools.takewhile(lambda r: r["at"] == len(steps), to_add)]
        del to_add[: len(new_ones)]
        new_ones += [request.number for step, request in again if step == len(steps)]
        again = [entry for entry in again if entry[0] != len(steps)]
        for number in new_ones:
            engine.add(requests[number])
            here.add(number)

        step = engine.schedule()
        free = engine.free_blocks
        finished = [r for r in step.sampling if engine.generated(r) + 1 == output[r]]
        engine.update(finished)
        here.difference_update(finished)
        places = (0 if place is None else contents[place] for place in engine.cache.queue())
        steps.append(
            {
                "chunks": [[number, *chunk] for number, chunk in step.chunks.items()],
                "preempted": sorted(step.preempted),
                "finished": sorted(finished),
                "running": list(engine.running),
                "waiting": list(engine.waiting),
                "free": [free, engine.free_blocks],
                "queue": zlib.crc32(",".join(map(str, places)).encode()),
                "sampling": list(step.sampling),
                "hits": [[r, step.chunks[r].start] for r in step.admitted if step.chunks[r].start],
            }
        )
    return steps


class _Contents(dict[tuple[Hashable, int], int]):
    """The checksum of each block's contents: of its tokens and of all before them."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self._block = scenario["engine"]["block_tokens"]
        self._requests = {r["number"]: r["prompt"] for r in scenario["requests"]}

    def __missing__(self, place: tuple[Any, int]) -> int:
        (kind, name), index = place
        if kind == "group":
            (start, shared), own_start = (name, sys.maxsize), 0
        else:
            (start, shared), (own_start, _) = self._requests[name]
        positions = range(index * self._block, (index + 1) * self._block)
        tokens = [start + p if p < shared else own_start + p - shared for p in positions]
        before = self[((kind, name), index - 1)] if index else 0
        self[place] = zlib.crc32(",".join(map(str, tokens)).encode(), before)
        return self[place]


def difference(scenario: Scenario, theirs: list[StepRecord]) -> str | None:
    """Where the reference first does something else than vLLM did, or None."""
    try:
        ours = replay(scenario)
    except Exception as error:
        return f"the reference fails: {error!r}"
    for number, (mine, other) in enumerate(itertools.zip_longest(ours, theirs)):
        if mine is None or other is None:
            return f"step {number}: {'the reference' if mine is None else 'vLLM'} ends earlier"
        wrong = [
            f"{key}: vLLM {other[key]}, reference {mine[key]}" for key in other if mine[key] != other[key]
        ]
        if wrong:
            return f"step {number}: " + "; ".join(wrong)
    return None


def smaller(scenario: Scenario) -> list[Scenario]:
    """Simpler variants of a scenario, for shrinking one that fails."""
    requests = scenario["requests"]
    variants = [requests[:i] + requests[i + 1 :] for i in range(len(requests)) if len(requests) > 1]
    for i, request in enumerate(requests):
        for change in (
            {"output": request["output"] // 2},
            {"abort": None, "again": None},
            {"again": None},
            {"at": 0} if request["abort"] is None else {},
            {"priority": 0},
        ):
            changed = {**request, **change}
            if changed != request and changed["output"]:
                variants.append([*requests[:i], changed, *requests[i + 1 :]])
    return [{**scenario, "requests": variant} for variant in variants]


def tally(scenarios: list[Scenario]) -> Counter[str]:
    """How many scenarios show what."""
    counts: Counter[str] = Counter()
    for scenario in scenarios:
        steps = replay(scenario)
        preempted = any(step["preempted"] for step in steps)
        hits = [number for step in steps for number, _ in step["hits"]]
        finished = {number for step in steps for number in step["finished"]}
        shows = {
            "preemption": preempted,
            "prefix hit": bool(hits),
            "preemption and prefix hit": preempted and bool(hits),
            "prefix hit in the step that fills the blocks": _same_step_hit(scenario, steps),
            "prefix hit of a resubmitted request": any(number >= AGAIN for number in hits),
            "priorities": scenario["engine"]["policy"] == "priority",
            "abort": not finished >= {request["number"] for request in scenario["requests"]},
            "prompt in chunks": any(r not in step["sampling"] for step in steps for r, *_ in step["chunks"]),
        }
        counts.update({what: int(shown) for what, shown in shows.items()})
        counts.update({"scenarios": 1, "steps": len(steps)})
    return counts


def _same_step_hit(scenario: Scenario, steps: list[StepRecord]) -> bool:
    """Whether a request found blocks of its group in the step in which the group was first computed."""
    group = {request["number"]: request["prompt"][0][0] for request in scenario["requests"]}
    known: set[int] = set()
    for step in steps:
        new = {group[number % AGAIN] for number, *_ in step["chunks"]} - known
        if any(group[number % AGAIN] in new for number, _ in step["hits"]):
            return True
        known |= new
    return False


if __name__ == "__main__":
    first, count = int(sys.argv[1]), int(sys.argv[2])
    json.dump([draw(random.Random(seed)) for seed in range(first, first + count)], sys.stdout)
