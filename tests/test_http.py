"""Replays over HTTP, on servers that pretend (fake_server.py); the last ones are on two real ones."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_worker import next_token
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tailopt.engine.catalogue import write_profile
from tailopt.engine.profile import Draft, EngineProfile, ShapeProfile
from tailopt.engine.speculation import Speculation
from tailopt.engine.step_time import Affine
from tailopt.errors import InputError
from tailopt.plan import SHARED_QUEUE, Engine, Fleet, Plan, Policy, ReviewPoint, View
from tailopt.replay.errors import ReplayError
from tailopt.replay.execute import execute
from tailopt.replay.fit_file import read_measured
from tailopt.replay.http import HttpEngines
from tailopt.replay.http_server import KEY, Server, requests_there
from tailopt.replay.http_stream import Chunk, EventReader, Nonsense, Refused, read_chunk
from tailopt.replay.prompts import prompts
from tailopt.replay.recorder import Record, read_record
from tailopt.replay.tiny_model import KV_BYTES_PER_TOKEN, tiny_model
from tailopt.replay.vllm import PYTHON
from tailopt.run import Run
from tailopt.trace import Trace

pytest.importorskip("aiohttp", reason="servers need aiohttp")
from fake_server import FakeServer

SHAPES = {
    tp: ShapeProfile(tp, Affine(4e-3, 1e-4, 1e-7), 2e4, kv_capacity_tokens=8192, max_running=16)
    for tp in (1, 2)
}
PROFILE = EngineProfile(
    "tiny", "none", "tiny", "none", "none", "1", "2026-01-31", ("guessed for tests",), "CC0-1.0",
    KV_BYTES_PER_TOKEN, SHAPES,
)  # fmt: skip
BATCH = Trace.of([[30, 50], [7, 9], [90, 20], [40, 45]], prompt_tokens=[20, 3, 1, 40])
QUICK: dict[str, Any] = {"back_off_s": 0.02, "connect_s": 1.0}


def greedy(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def play(
    servers: Sequence[FakeServer],
    policy: Policy,
    folder: Path,
    *,
    trace: Trace = BATCH,
    shape: str = "2xTP1",
    urls: Sequence[str] | None = None,
    **options: Any,
) -> tuple[Run, Record]:
    fleet = Fleet.of(PROFILE, shape)
    path = folder / "record.jsonl"
    path.unlink(missing_ok=True)
    addresses = urls or [server.url for server in servers]
    with HttpEngines(PROFILE, addresses, **(QUICK | options)) as engines:
        run = execute(trace, fleet, policy, View.at_start(trace, fleet), engines, record=path)
    return run, read_record(path)


def check(run: Run, record: Record, trace: Trace = BATCH, *, ids: bool = True) -> None:
    """Every request got its tokens, each once, and they are those of an undisturbed engine."""
    assert run.completed.all()
    assert (run.output_tokens == trace.output_tokens).all()
    if ids:
        expected = [greedy(p, int(n)) for p, n in zip(prompts(trace), trace.output_tokens, strict=True)]
        assert record.ledger().tokens == expected
    assert record.last is not None
    assert record.last["complete"]
    assert (run.start_s <= run.first_token_s).all()
    assert (run.first_token_s <= run.finish_s).all()
    for engine in range(len(run.engines)):
        assert (np.diff(run.log.time_s[run.log.engine == engine]) >= 0).all()


def queues(*parts: Any, **more: Any) -> Policy:
    return lambda view: replace(Plan.of_queues(view.fleet.engines, parts), **more)


def swap_at(point: ReviewPoint) -> Policy:
    """Everybody to the other engine when the point is reached."""

    def policy(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(point,))(view)
        return Plan(view.fleet.engines, 1 - view.engine, np.arange(view.n_requests))

    return policy


@contextlib.contextmanager
def fakes(count: int = 2, **options: Any) -> Iterator[list[FakeServer]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FakeServer(**options)) for _ in range(count)]


def aborts(server: FakeServer) -> list[Any]:
    return [body for how, path, body in server.calls if how == "POST" and path.startswith("/abort")]


# ---- plans ----------------------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm without developer mode": {"dev": False},
    "vllm without documentation": {"openapi": False},
    "vllm without metrics": {"dev": False, "metrics": False},
    "sglang": {"kind": "sglang"},
    "sglang without documentation": {"kind": "sglang", "openapi": False},
    "plain": {"kind": "plain", "dev": False, "openapi": False, "metrics": False},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_move_loses_no_token_on_any_kind_of_server(kind: str, tmp_path: Path) -> None:
    options = KINDS[kind]
    with fakes(**options) as servers:
        run, record = play(servers, swap_at(ReviewPoint("unfinished", 4)), tmp_path)
        check(run, record, ids=options.get("kind", "vllm") == "vllm")
        assert len(run.reviews) == 1
        assert len(run.moves.request) == 4
        for server in servers:
            assert not server.paused
            assert not server.asleep
            assert not server.running
            assert not server.waiting
            for body in aborts(server):
                assert body.get("request_ids") or body.get("rid")
        has_abort = options.get("dev", True) and options.get("kind") != "plain"
        assert any(aborts(server) for server in servers) == has_abort


def test_what_the_server_is_asked_for(tmp_path: Path) -> None:
    """Token ids, exact lengths, and after a move the tokens so far as prompt."""
    with fakes() as servers:
        run, _ = play(servers, swap_at(ReviewPoint("unfinished", 4)), tmp_path)
    bodies = [body for server in servers for body in server.completions]
    assert len(bodies) == 8 + len(run.moves.request)
    start = [tuple(prompt) for prompt in prompts(BATCH)]
    for body in bodies:
        assert body["ignore_eos"]
        assert body["min_tokens"] == body["max_tokens"]
        assert body["temperature"] == 0
        matching = [i for i, p in enumerate(start) if tuple(body["prompt"][: len(p)]) == p]
        have = {len(start[i]) + int(BATCH.output_tokens[i]) for i in matching}
        assert len(body["prompt"]) + body["max_tokens"] in have
    assert run.backend == "vLLM 0.0.1 over HTTP"
    assert len({body["request_id"] for body in bodies}) == len(bodies)


@pytest.mark.parametrize("lowered", [False, True])
@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), dev=st.booleans())
def test_any_policy_conserves_tokens(
    lowered: bool, seed: int, dev: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = np.random.default_rng(seed)
    left = [3]

    def whims(view: View) -> Plan:
        n, later = view.n_requests, view.now_s > 0
        left[0] -= 1
        points = [
            ReviewPoint("unfinished", int(rng.integers(1, 8))),
            ReviewPoint("tokens", int(rng.integers(1, 41))),
            ReviewPoint("idle"),
            ReviewPoint("time", float(rng.uniform(0, 0.1))),
        ]
        return Plan(
            view.fleet.engines,
            rng.integers(SHARED_QUEUE, 2, size=n),
            rng.permutation(n),
            review=tuple(points[i] for i in rng.integers(4, size=2)) if left[0] > 0 else (),
            max_tokens=rng.integers(1, 41, size=n) if lowered and later and rng.random() < 0.4 else None,
        )

    with fakes(dev=dev) as servers:
        run, record = play(servers, whims, tmp_path_factory.getbasetemp())
    ledger = record.ledger()
    assert (run.completed == (run.output_tokens == BATCH.output_tokens)).all()
    for prompt, tokens, asked, most in zip(
        prompts(BATCH), ledger.tokens, ledger.asked, BATCH.output_tokens, strict=True
    ):
        assert tokens == greedy(prompt, len(tokens))
        assert min(asked, most) <= len(tokens) <= most  # less only if it was told to want less
    assert (run.output_tokens == [len(tokens) for tokens in ledger.tokens]).all()


@pytest.mark.parametrize(
    "options", [{"dev": False}, {"burst_s": 0.08}, {"kind": "sglang", "burst_s": 0.08}], ids=str
)
@pytest.mark.parametrize("more", [1, 2, 12])
def test_a_lowered_limit_cuts_what_came_meanwhile(options: dict[str, Any], more: int, tmp_path: Path) -> None:
    """A server goes on while a policy thinks, or tells late; of this only what is still wanted counts."""
    limits = np.zeros(8, dtype=np.int64)

    def lower(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("tokens", 5),))(view)
        time.sleep(0.1)  # long enough for some dozen tokens
        true = BATCH.output_tokens[view.request]
        limits[view.request] = np.minimum(view.generated_tokens + more, true)
        limit = view.generated_tokens + more
        return Plan(view.fleet.engines, view.engine, np.arange(view.n_requests), max_tokens=limit)

    with fakes(**options) as servers:
        run, record = play(servers, lower, tmp_path)
        assert not any(server.running or server.waiting for server in servers)
    assert len(run.reviews) == 1
    cut = np.where(limits > 0, limits, BATCH.output_tokens)
    assert run.output_tokens.tolist() == cut.tolist()
    assert (run.completed == (cut == BATCH.output_tokens)).all()
    if options.get("kind", "vllm") == "vllm":
        for prompt, tokens in zip(prompts(BATCH), record.ledger().tokens, strict=True):
            assert tokens == greedy(prompt, len(tokens))


COMMANDS = st.lists(
    st.tuples(st.integers(0, 25), st.lists(st.integers(1, 40), min_size=3, max_size=3)), max_size=4
)


@pytest.mark.parametrize("options", [{"dev": False}, {}, {"burst_s": 0.08}], ids=str)
@settings(max_examples=10)
@given(rounds=COMMANDS)
@example(rounds=[(40, [25, 25, 25])])  # what has ended when nobody hears of it yet is to go on
def test_limits_up_and_down_lose_and_gain_no_token(
    options: dict[str, Any], rounds: list[tuple[int, list[int]]]
) -> None:
    """One link, told at each stand that more or less is wanted than before, and more than it told of."""
    start = [prompts(BATCH)[one] for one in (0, 3, 6)]
    want, told, done = [30, 20, 3], [list[int]() for _ in start], [0, 0, 0]

    def hear(until: str, patience_s: float = 60.0) -> None:
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            for event in link.read():
                assert event["event"] not in ("died", "rejected"), event
                for key, *new in event.get("new", []):
                    told[key] += new
                for key in event.get("done", []):
                    done[key] += 1
                if event["event"] == until:
                    return
            if until == "done" and all(done):
                return
            time.sleep(1e-3)
        assert until == "nothing", f"{until} not heard"

    with FakeServer(**options) as server, HttpEngines(PROFILE, [server.url], **QUICK) as engines:
        link = engines.take(Engine(1))
        link.send(
            {
                "do": "submit",
                "requests": [[k, p, w, 0] for k, (p, w) in enumerate(zip(start, want, strict=True))],
            }
        )
        link.send({"do": "go"})
        for milliseconds, more in rounds:
            hear("nothing", milliseconds / 1e3)
            link.send({"do": "pause"})
            hear("paused")
            time.sleep(0.01 + 1.5 * options.get("burst_s", 0.0))
            there = [key for key in range(3) if not done[key]]
            for key in there:
                want[key] = len(told[key]) + more[key]
            link.send({"do": "update", "requests": [[key, want[key], 0] for key in there]})
            link.send({"do": "go"})
        hear("done")
        time.sleep(0.05)
        hear("nothing", 0.01)
        assert not server.running
        assert not server.waiting
    assert done == [1, 1, 1]
    assert [len(tokens) for tokens in told] == want
    assert told == [greedy(prompt, count) for prompt, count in zip(start, want, strict=True)]


def test_a_limit_is_kept_and_the_order_too(tmp_path: Path) -> None:
    with fakes() as servers:
        one, two = (replace(engine, max_running=2) for engine in Fleet.of(PROFILE, "2xTP1").engines)
        plan = Plan((one, two), np.array([0, 0, 0, 0, 1, 1, 1, 1]), np.array([3, 2, 1, 0, 7, 6, 5, 4]))
        run, record = play(servers, lambda _: plan, tmp_path)
        assert all(server.most_there <= 2 for server in servers)
        firsts = [[len(body["prompt"]) for body in server.completions] for server in servers]
    check(run, record)
    context = BATCH.context_tokens
    assert firsts == [context[[3, 2, 1, 0]].tolist(), context[[7, 6, 5, 4]].tolist()]


def test_a_limit_follows_the_finished_requests(tmp_path: Path) -> None:
    limits = ((1, 1), (3, 2))
    with fakes() as servers:
        engine = replace(Fleet.of(PROFILE, "2xTP1").engines[0], max_running=2, limits=limits)
        plan = Plan((engine, Engine(1)), np.zeros(8, dtype=int), np.arange(8))
        run, record = play(servers, lambda _: plan, tmp_path)
        assert servers[0].most_there == 2
    check(run, record)
    finished = 0
    for step in record.steps():
        if step["in"]:
            assert step["run"] <= [2, *(running for f, running in limits if f <= finished)][-1]
        finished += len(step["done"])
    assert finished == 8


def test_shared_queue_and_arrivals(tmp_path: Path) -> None:
    trace = replace(BATCH, arrival_s=np.array([0, 0, 0.01, 0.01, 0.02, 0.02, 0.2, 0.2]))
    with fakes() as servers:
        engines = tuple(replace(engine, max_running=2) for engine in Fleet.of(PROFILE, "2xTP1").engines)
        plan = Plan(engines, np.full(8, SHARED_QUEUE), np.arange(8))
        run, record = play(servers, lambda _: plan, tmp_path, trace=trace)
        assert all(server.most_there <= 2 for server in servers)
    check(run, record, trace)
    assert (run.start_s >= trace.arrival_s - 1e-3).all()


@pytest.mark.parametrize("options", [{}, {"kind": "sglang"}, {"dev": False}], ids=str)
def test_a_switch_puts_servers_to_sleep_where_they_can(options: dict[str, Any], tmp_path: Path) -> None:
    def merge(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("unfinished", 4),))(view)
        return Plan((Engine(2),), np.zeros(view.n_requests, dtype=int), np.arange(view.n_requests))

    with fakes(3, **options) as servers:
        urls = [servers[0].url, f"{servers[1].url}#tp=2,gpus=0-1", servers[2].url]
        run, record = play(servers, merge, tmp_path, urls=urls)
        check(run, record, ids=options.get("kind", "vllm") == "vllm")
        beds = {("POST", "/sleep"), ("POST", "/release_memory_occupation")}
        slept = [any(call[:2] in beds for call in server.calls) for server in servers]
        can = options.get("dev", True)
        assert slept == [can, False, can]
        assert not any(server.asleep or server.paused for server in servers)  # left as they were
    assert [engine.tp for engine in run.engines] == [1, 1, 2]
    assert (run.engine[run.reviews[0].request] == 2).all()


def shrink(view: View) -> Plan:
    """Two engines, then one: the other sleeps; and both again, so it wakes."""
    engines = Fleet.of(PROFILE, "2xTP1").engines
    first = queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("unfinished", 5),))
    if view.now_s == 0:
        return first(view)
    order = np.arange(view.n_requests)
    if len(view.fleet.engines) == 2 and view.n_requests > 3:
        review = (ReviewPoint("unfinished", 3),)
        return Plan(engines[:1], np.zeros(view.n_requests, dtype=int), order, review=review)
    return Plan(engines, order % 2, order)


@pytest.mark.parametrize(
    ("options", "asleep"),
    [
        ({}, True),
        ({"refuses": frozenset({"/sleep"})}, False),
        ({"pretends": frozenset({"/sleep"})}, False),
        ({"refuses": frozenset({"/pause"})}, True),
        ({"pretends": frozenset({"/pause"})}, True),
        ({"refuses": frozenset({"/abort_requests"})}, True),
        ({"pretends": frozenset({"/abort_requests"})}, True),
        (
            {"kind": "sglang", "refuses": frozenset({"/pause_generation", "/release_memory_occupation"})},
            False,
        ),
    ],
    ids=[
        "as it says",
        "refuses sleep",
        "pretends sleep",
        "refuses pause",
        "pretends pause",
        "refuses aborts",
        "pretends aborts",
        "sglang refuses",
    ],  # a set's own name depends on the hash seed
)
def test_what_a_server_lists_and_does_not_do(options: dict[str, Any], asleep: bool, tmp_path: Path) -> None:
    """Its paths are tried, and where one does not work the replay does without."""
    with fakes(**options) as servers:
        run, record = play(servers, shrink, tmp_path, abort_s=0.4)
        check(run, record, ids=options.get("kind", "vllm") == "vllm")
        assert len(run.reviews) == 2
        assert servers[0].slept == 0
        assert servers[1].slept == int(asleep)
        assert not any(server.asleep or server.paused for server in servers)
        lost = [line for line in record.lines if line["kind"] == "lost"]
    assert not lost
    woken = [line for line in record.lines if line["kind"] == "open"]
    assert len(woken) == 3


def test_a_server_that_sleeps_on_is_given_up(tmp_path: Path) -> None:
    with fakes(pretends=frozenset({"/wake_up"})) as servers, pytest.raises(ReplayError, match="sleeps on"):
        play(servers, shrink, tmp_path)


def test_no_kv_cache_is_sent_between_servers(tmp_path: Path) -> None:
    """A plan that insists on it is refused; one that does not has it computed anew."""
    with fakes() as servers:
        with pytest.raises(InputError, match="cannot send their KV cache, expected recompute"):
            play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7], move="migrate"), tmp_path)
        run, record = play(servers, swap_at(ReviewPoint("unfinished", 4)), tmp_path)
        check(run, record)
    assert len(run.moves.request)
    assert not run.moves.migrated.any()


def test_servers_left_paused_or_asleep_are_woken(tmp_path: Path) -> None:
    with fakes() as servers:
        servers[0].paused = True
        servers[1].asleep = True
        run, record = play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path)
        check(run, record)


def test_a_record_can_be_fitted(tmp_path: Path) -> None:
    with fakes(step_s=0.004) as servers:
        play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path)
    measured = read_measured([tmp_path / "record.jsonl"])
    steps = measured.steps[1]
    assert measured.engine == "vLLM"
    assert measured.engine_version.startswith("0.0.1")
    assert len(steps) > 20
    assert set(steps.engine.tolist()) == {0, 1}
    assert (steps.kv_tokens >= steps.running).all()


# ---- aborts ---------------------------------------------------------------------------------------------


def test_an_abort_that_is_not_obeyed_is_followed_by_closing(tmp_path: Path) -> None:
    with fakes(deaf=frozenset({"abort"})) as servers:
        run, record = play(servers, swap_at(ReviewPoint("unfinished", 4)), tmp_path, abort_s=0.4)
        check(run, record)
        assert any(aborts(server) for server in servers)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_an_empty_list_of_aborts_is_never_sent(kind: Any) -> None:
    """It stands for all: nobody to abort, somebody who is unknown, or who has not been sent yet."""
    with FakeServer(kind=kind) as server, HttpEngines(PROFILE, [server.url], **QUICK) as engines:
        link = engines.take(Engine(1))

        def abort(*keys: int) -> Any:
            link.send({"do": "abort", "keys": list(keys)})
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s:
                for event in link.read():
                    if event["event"] == "aborted":
                        return event
                time.sleep(1e-3)
            raise AssertionError

        assert (abort()["keys"], abort(7)["absent"]) == ([], [7])
        link.send({"do": "limit", "running": 1})
        link.send({"do": "submit", "requests": [[1, [9, 8, 7], 500, 0], [2, [5, 6], 500, 0]]})
        link.send({"do": "go"})
        while not server.running:
            time.sleep(1e-3)
        assert abort(2)["keys"] == [[2, 0]]  # the limit kept it from being sent
        assert abort()["keys"] == []
        assert not aborts(server)
        assert len(server.running) == 1
        assert [key for key, _ in abort(1)["keys"]] == [1]
        assert len(aborts(server)) == 1
        assert not server.running


def test_an_abort_hits_nobody_else(tmp_path: Path) -> None:
    """SGLang aborts every request whose id begins with the one that it is told: 1 is not 10."""
    many = Trace.of([[60] * 12], prompt_tokens=5)

    def move_first(view: View) -> Plan:
        if view.now_s == 0:
            return queues(range(12), [], review=(ReviewPoint("tokens", 5),))(view)
        return Plan(view.fleet.engines, (view.request == 1).astype(int), np.arange(view.n_requests))

    with fakes(kind="sglang", max_running=16) as servers:
        run, record = play(servers, move_first, tmp_path, trace=many)
        check(run, record, many, ids=False)
        assert [server.aborted for server in servers] == [1, 0]
        assert [len(server.completions) for server in servers] == [12, 1]


def test_a_server_that_goes_on_after_all_is_found_out(tmp_path: Path) -> None:
    """It keeps generating for a client that is gone; the metrics tell."""
    with (
        fakes(dev=False, deaf=frozenset({"close"}), step_s=0.05) as servers,
        pytest.raises(ReplayError, match=r"still has .* requests"),
    ):
        play(servers, swap_at(ReviewPoint("tokens", 5)), tmp_path, abort_s=0.4)
    last = read_record(tmp_path / "record.jsonl").last
    assert last is not None
    assert not last["complete"]
    assert "still has" in last["why"]


# ---- faults ---------------------------------------------------------------------------------------------


def only(what: str, *, times: int = 1 << 30, of: int = 2) -> Callable[[dict[str, Any]], str | None]:
    """This fault for this request, the first so many times."""
    start, seen = prompts(BATCH)[of], [0]

    def fault(body: dict[str, Any]) -> str | None:
        if body["prompt"][: len(start)] != start:
            return None
        seen[0] += 1
        return what if seen[0] <= times else None

    return fault


def fault_of(fault: str, tmp_path: Path, *words: str, of: int = 2, **options: Any) -> tuple[str, Record]:
    with fakes(fault=only(fault, of=of)) as servers:
        with pytest.raises(ReplayError) as error:
            play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, **options)
        assert not any(server.paused for server in servers)
    text = str(error.value)
    assert "\n" not in text
    assert all(word in text for word in words), text
    record = read_record(tmp_path / "record.jsonl")
    assert record.last is not None
    assert not record.last["complete"]
    assert record.last["why"]
    return text, record


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuse", ("request 2", "400", "cannot do")),
        ("error", ("request 2", "out of vocabulary")),
        ("garbage", ("request 2", "nonsense", "not json")),
        ("shape", ("request 2", "nonsense", "expected a completion")),
        ("page", ("request 2", "nonsense", "text/html")),
        ("lie", ("request 2", "nonsense", "8 tokens, when 7 were asked for")),
        ("short", ("request 2", "after 3 tokens", "expected 7")),
        ("short_stop", ("request 2", "after 3 tokens", "expected 7")),
        ("elsewhere", ("request 2", "307")),
    ],
)
def test_a_fault_that_stays_is_an_error_and_an_incomplete_record(
    fault: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    fault_of(fault, tmp_path, "engine 0", *words)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", "closed the stream"),
        ("end", "closed the stream"),
        ("busy", "429"),
        ("broken", "500"),
        ("drop", ""),
    ],
)
def test_a_fault_that_stays_is_given_up(fault: str, words: str, tmp_path: Path) -> None:
    started_s = time.monotonic()
    fault_of(fault, tmp_path, "died", words, retries=0, of=4)
    assert time.monotonic() - started_s < 30


@pytest.mark.parametrize("fault", ["cut", "end", "busy", "broken", "drop"])
def test_a_fault_that_passes_is_survived(fault: str, tmp_path: Path) -> None:
    """The tokens that came are kept, and none counts twice."""
    for dev in (True, False):
        with fakes(fault=only(fault, times=2, of=4), dev=dev) as servers:
            run, record = play(servers, swap_at(ReviewPoint("unfinished", 3)), tmp_path)
            tries = [b for s in servers for b in s.completions if b["prompt"][:1] == prompts(BATCH)[4]]
        check(run, record)
        assert len(tries) >= 3


def test_a_stream_cut_behind_its_last_token_is_whole(tmp_path: Path) -> None:
    """There is nothing left to ask for."""
    with fakes(fault=lambda body: "headless") as servers:
        run, record = play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path)
        check(run, record)
        assert [len(server.completions) for server in servers] == [4, 4]


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_silence_is_noticed(fault: str, tmp_path: Path) -> None:
    """A server that says nothing is dead; it is tried again, and in the end given up."""
    patient = {"silence_s": 0.3, "connect_s": 60.0}
    with fakes(fault=lambda body: fault) as servers, pytest.raises(ReplayError) as error:
        play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, **patient)
    assert "has said nothing for 0.3 s" in str(error.value)
    patient["silence_s"] = 1.0  # it must not be taken for silence that the machine is busy
    with fakes(fault=only(fault, times=1)) as servers:  # one request of several: noticed later
        run, record = play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, **patient)
        check(run, record)
        assert any(line["kind"] == "lost" for line in record.lines)


def test_who_does_not_listen_hears_no_silence(tmp_path: Path) -> None:
    """A machine that was stopped, or too busy to hear a server, does not take it for dead."""

    times = [0]

    def deaf(now_s: float, left: Any) -> None:
        times[0] += now_s > 0
        if now_s > 0 and times[0] == 1:
            engines._loop.call_soon_threadsafe(time.sleep, 2.0)
            for server in servers:
                server._loop.call_soon_threadsafe(time.sleep, 2.1)  # wakes up after who listens

    fleet, path = Fleet.of(PROFILE, "2xTP1"), tmp_path / "record.jsonl"
    with fakes(step_s=0.01) as servers:
        with HttpEngines(PROFILE, [s.url for s in servers], **QUICK, silence_s=1.0) as engines:
            policy, view = queues([0, 1, 2, 3], [4, 5, 6, 7]), View.at_start(BATCH, fleet)
            run = execute(BATCH, fleet, policy, view, engines, record=path, progress=deaf)
        check(run, read_record(path))
        assert [len(server.completions) for server in servers] == [4, 4]
    assert times[0] > 0


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for_lines(path: Path, lines: int, *, patience_s: float = 120.0) -> None:
    """Until the record has so many."""
    end_s = time.monotonic() + patience_s
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert time.monotonic() < end_s, f"{path} has not got {lines} lines"
        time.sleep(2e-3)


def serve(port: int, step_s: float = 0.01) -> "subprocess.Popen[str]":
    """A server in a process of its own, to be killed."""
    command = [sys.executable, str(Path(__file__).with_name("fake_server.py")), str(port), str(step_s)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http")
    return process


@pytest.mark.parametrize("signalled", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hangs"])
def test_a_server_is_killed_or_hangs_in_the_middle_and_is_started_anew(
    signalled: signal.Signals, tmp_path: Path
) -> None:
    """kill -9; or it stands still with open connections. Its requests go on with their tokens."""
    path, port, fleet = tmp_path / "record.jsonl", free_port(), Fleet.of(PROFILE, "2xTP1")
    processes = [serve(port)]
    died_s: list[float] = []

    def start_anew() -> None:
        wait_for_lines(path, 25)
        processes[0].send_signal(signalled)
        if signalled == signal.SIGSTOP:
            time.sleep(1.5)
            processes[0].kill()
        processes[0].wait()
        died_s.append(time.monotonic())
        processes.append(serve(port))

    thread = threading.Thread(target=start_anew)
    try:
        with FakeServer(step_s=0.01) as stays:
            quick = {"silence_s": 0.5, "connect_s": 60.0, "back_off_s": 0.02, "retries": 1}
            thread.start()
            with HttpEngines(PROFILE, [stays.url, f"http://127.0.0.1:{port}"], **quick) as engines:
                policy, view = queues([0, 1, 2, 3], [4, 5, 6, 7]), View.at_start(BATCH, fleet)
                run = execute(BATCH, fleet, policy, view, engines, record=path)
            assert len(stays.completions) == 4  # the other one went on
    finally:
        thread.join(120)
        for process in processes:
            process.kill()
            process.communicate()
    record = read_record(path)
    check(run, record)
    assert died_s
    assert run.preemptions[4:].sum() > 0
    (lost, *_) = [line for line in record.lines if line["kind"] == "lost"]
    assert lost["engine"] == 1
    submitted = [line for line in record.lines if line["kind"] == "submit" and line["engine"] == 1]
    assert len(submitted) >= 2


# ---- the command, interrupted ---------------------------------------------------------------------------


def tailopt(*arguments: str | Path, most_bytes: int | None = None) -> "subprocess.Popen[str]":
    """The real command, in a process of its own, which may write files of so many bytes."""

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    return subprocess.Popen(
        [sys.executable, "-m", "tailopt", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={key: value for key, value in os.environ.items() if key != KEY},
        preexec_fn=None if most_bytes is None else limit,
    )  # fmt: skip


def study_options(servers: Sequence[FakeServer], folder: Path, *more: str | Path) -> list[str | Path]:
    """A trace from a file, and an engine that is known, so that nothing is calibrated."""
    write_profile(PROFILE, folder / "engine.toml")
    lines = [f"{one // 2},{length},9" for one, length in enumerate(BATCH.output_tokens)]
    (folder / "lengths.csv").write_text("\n".join(["prompt,output_tokens,prompt_tokens", *lines]) + "\n")
    return [
        "replay", "--trace", folder / "lengths.csv", "--engine", folder / "engine.toml", "--policy", "lpt",
        "--prompts", "4", "--samples", "2", "--repeats", "2", "--out", folder / "study", "--quiet",
        *(part for server in servers for part in ("--server", server.url)), *more,
    ]  # fmt: skip


def check_study(folder: Path, begun: Record | None) -> None:
    """Every record is complete and right, and what was begun was kept."""
    found = [read_record(path) for path in sorted(folder.glob("*lpt*.jsonl"))]
    assert len(found) == 2
    for record in found:
        start = prompts(record.trace, seed=record.head["seed"], vocabulary=record.head["vocabulary"])
        lengths = record.trace.output_tokens
        assert record.last is not None
        assert record.last["complete"]
        assert record.run().completed.all()
        expected = [greedy(p, int(n)) for p, n in zip(start, lengths, strict=True)]
        assert record.ledger().tokens == expected
        told = sum(len(new) - 1 for step in record.steps() for new in step["new"])
        assert told == lengths.sum()  # none is there twice
    if begun is not None:
        assert list(found[0].lines[: len(begun.lines)]) == list(begun.lines)


def test_ctrl_c_and_go_on(tmp_path: Path) -> None:
    """SIGINT to the real command in the middle, twice; no token is lost or counted twice."""
    with fakes(step_s=0.01, max_running=64) as servers:
        options = study_options(servers, tmp_path)
        path = tmp_path / "study" / "0_lpt_truth-0.jsonl"
        begun = None
        for lines in (12, 30):
            with tailopt(*options, *(["--go-on"] if begun else [])) as process:
                wait_for_lines(path, lines)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=120)
            assert process.returncode == 130, err
            assert "Traceback" not in err
            assert out == ""
            now = read_record(path)
            assert now.last is not None
            assert not now.last["complete"]
            assert not now.ledger().all_finished
            if begun is not None:
                assert now.lines[: len(begun.lines)] == begun.lines
            begun = now
            assert not any(server.paused for server in servers)
            for server in servers:  # its requests are gone from there
                end_s = time.monotonic() + 20
                while (server.running or server.waiting) and time.monotonic() < end_s:
                    time.sleep(0.01)
                assert not server.running
        with tailopt(*options, "--go-on", "--json") as process:
            out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["outcomes"][0]["repeats"] == 2
    check_study(tmp_path / "study", begun)


@pytest.mark.parametrize("most_bytes", [100, 12000])
def test_disk_full_and_go_on(most_bytes: int, tmp_path: Path) -> None:
    """In the header or in a line behind it: one line of error, and with room it goes on from there."""
    pytest.importorskip("resource", reason="not on Windows")
    with fakes(max_running=64) as servers:
        options = study_options(servers, tmp_path)
        with tailopt(*options, most_bytes=most_bytes) as process:
            out, err = process.communicate(timeout=120)
        assert process.returncode not in (0, None)
        assert out == ""
        assert err.count("\n") == 1, err
        assert "File too large" in err
        path = tmp_path / "study" / "0_lpt_truth-0.jsonl"
        sizes = [one.stat().st_size for one in (tmp_path / "study").rglob("*") if one.is_file()]
        assert max(sizes, default=0) <= most_bytes
        begun = None
        if path.exists() and path.read_bytes().count(b"\n") > 1:
            assert path.stat().st_size == most_bytes
            begun = read_record(path)
            assert begun.last is None
        assert (begun is not None) == (most_bytes > 10000)
        assert not any(server.paused for server in servers)
        with tailopt(*options, "--go-on", "--json") as process:
            out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    check_study(tmp_path / "study", begun)


def test_a_server_that_goes_away(tmp_path: Path) -> None:
    with FakeServer() as stays:
        gone = FakeServer(step_s=0.01)
        with gone:
            addresses = [stays.url, gone.url]

            def leave(view: View) -> Plan:
                if view.now_s > 0:
                    gone.__exit__(None, None, None)
                    return Plan(view.fleet.engines, view.engine, np.arange(view.n_requests))
                return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("tokens", 5),))(view)

            with pytest.raises(ReplayError, match="engine 1: died"):
                play([], leave, tmp_path, urls=addresses, retries=1, connect_s=0.3)
    record = read_record(tmp_path / "record.jsonl")
    assert record.last is not None
    assert not record.last["complete"]
    assert record.ledger().generated.sum() > 0  # what came is kept


# ---- connecting -----------------------------------------------------------------------------------------


def connect(*addresses: str, **options: Any) -> str:
    """The error."""
    with pytest.raises(InputError) as error:
        HttpEngines(PROFILE, addresses, **(QUICK | {"connect_s": 0.2} | options)).close()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_servers_must_be_on_this_machine_unless_told_otherwise() -> None:
    for address in (
        "http://192.0.2.7:8000",
        "https://example.org",
        "10.0.0.1:8000",
        "http://127.0.0.1.nip.io",
    ):
        assert "not on this machine" in connect(address)
    for address in ("http://localhost:8000", "127.0.0.2:1", "http://[::1]:8000/v1"):
        assert Server.of(address).loopback


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("ftp://127.0.0.1", "expected a URL"),
        ("http://127.0.0.1:99999", "expected a URL"),
        ("", "expected a URL"),
        ("http://127.0.0.1:1?x=1", "expected a URL"),
        ("http://127.0.0.1:1#tp=0", "expected tp="),
        ("http://127.0.0.1:1#tp=two", "expected tp="),
        ("http://127.0.0.1:1#tp=2,gpus=0-2", "TP2 on 3 GPUs"),
        ("http://127.0.0.1:1#tp=4", "no TP4"),
        ("http://me:secret@127.0.0.1:1", "password"),
        ("ftp://me:secret@127.0.0.1:1", "password"),
    ],
)
def test_bad_addresses(address: str, words: str) -> None:
    error = connect(address)
    assert words in error
    assert "secret" not in error


def test_addresses() -> None:
    assert Server.of("http://127.0.0.1:8000/v1/") == Server("http://127.0.0.1:8000")
    assert Server.of("[::1]:8000").url == "http://[::1]:8000"
    assert Server.of("127.0.0.1:1/prefix#gpus=2-3") == Server("http://127.0.0.1:1/prefix", 2, (2, 3))
    assert "given twice" in connect("127.0.0.1:1", "http://127.0.0.1:1/v1")
    assert "at least one" in connect()


def test_who_is_not_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    assert "cannot be reached" in connect(f"127.0.0.1:{port}")


def test_models() -> None:
    with FakeServer() as server:
        assert "has no model 'huge'; it has tiny" in connect(server.url, model="huge")
        with HttpEngines(PROFILE, [server.url], model="tiny") as engines:
            assert engines.most_tokens(Engine(1)) == 2048
    with FakeServer(kind="plain") as server, HttpEngines(PROFILE, [server.url]) as engines:
        assert engines.most_tokens(Engine(1)) == 8192
        assert engines.name == "server over HTTP"


def test_plans_that_servers_cannot_carry_out(tmp_path: Path) -> None:
    with fakes() as servers:
        speculating = tuple(
            replace(e, speculation=Speculation("ngram", 2)) for e in Fleet.of(PROFILE, "2xTP1").engines
        )
        drafts = replace(
            PROFILE,
            shapes={1: replace(SHAPES[1], drafts=(Draft("ngram", 0.5),))},
        )
        fleet = Fleet(drafts, speculating, 2)
        with HttpEngines(drafts, [s.url for s in servers]) as engines:
            policy = lambda view: Plan(speculating, np.zeros(8, dtype=int), np.arange(8))  # noqa: E731
            with pytest.raises(InputError, match="drafts as it was started"):
                execute(BATCH, fleet, policy, View.at_start(BATCH, fleet), engines)
        with pytest.raises(InputError, match="no server is left"):
            play(servers, queues([0], [1], [2, 3, 4, 5, 6, 7]), tmp_path, shape="3xTP1")
    with FakeServer(most_tokens=80) as server, pytest.raises(InputError, match="holds 80"):
        play([server], queues(range(8)), tmp_path, shape="1xTP1")


# ---- the API key ----------------------------------------------------------------------------------------

SECRET = "sk-very-secret-0123456789"


def test_the_key_is_sent_and_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fakes(key=SECRET) as servers:
        monkeypatch.delenv(KEY, raising=False)
        error = connect(servers[0].url)
        assert KEY in error
        assert "401" in error
        monkeypatch.setenv(KEY, "sk-wrong-0123456789")
        error = connect(servers[0].url)
        assert "sk-wrong" not in error
        monkeypatch.setenv(KEY, SECRET)
        run, record = play(servers, swap_at(ReviewPoint("unfinished", 4)), tmp_path)
        check(run, record)
        assert all(h.get("Authorization") == f"Bearer {SECRET}" for s in servers for h in s.headers[-5:])
    with (
        fakes(key=SECRET, fault=only("echo")) as servers,
        pytest.raises(ReplayError) as echoed,
    ):
        play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path)
    assert "***" in str(echoed.value)
    for text in (str(echoed.value), (tmp_path / "record.jsonl").read_text(), repr(echoed.value)):
        assert SECRET not in text


# ---- the stream -----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 60), max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_events_are_the_same_however_they_are_cut(cuts: list[int], end: bytes) -> None:
    lines = [b"data: {}", b"", b": ping", b'data:{"a": "\xc3\xa9"}', b"event: x", b"", b"data: [DONE]", b""]
    data = end.join(lines)
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    reader, found = EventReader(), list[str]()
    for begin, stop in pairwise(places):
        found += reader.feed(data[begin:stop])
    assert found == ["{}", '{"a": "é"}', "[DONE]"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ("{", Nonsense),
        ("[]", Nonsense),
        ("{}", Nonsense),
        ('{"choices": [{}, {}]}', Nonsense),
        ('{"choices": [3]}', Nonsense),
        ('{"choices": [], "usage": 3}', Nonsense),
        ('{"choices": [{"token_ids": [true]}]}', Nonsense),
        ('{"choices": [{"text": 3}]}', Nonsense),
        ('{"error": {"message": "no", "code": 400}}', Refused),
        ('{"error": {"message": "no", "code": 500}}', Nonsense),
        ('{"error": "no"}', Nonsense),
        ("[" * 5000, Nonsense),
    ],
)
def test_nonsense_is_called_so(data: str, error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        read_chunk(data)
    assert len(str(raised.value)) < 300


def test_chunks() -> None:
    assert read_chunk('{"choices": [], "usage": {"completion_tokens": 9}}') == Chunk(
        "", None, "", None, 9, False
    )
    with pytest.raises(Nonsense, match="expected an event"):
        EventReader().feed(b"<html>\n")


@given(st.integers(0, 99), st.integers(0, 99))
def test_metrics(running: int, waiting: int) -> None:
    for names in (
        ("vllm:num_requests_running", "vllm:num_requests_waiting"),
        ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
    ):
        lines = [f'{n}{{engine="0"}} {float(c)}' for n, c in zip(names, (running, waiting), strict=True)]
        text = "\n".join(["# HELP x", *lines, 'vllm:num_requests_waiting_by_reason{reason="x"} 7.0'])
        assert requests_there(text) == running + waiting
    assert requests_there("process_cpu_seconds_total 3.0") is None


# ---- real servers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm_servers() -> Iterator[list[str]]:
    """Two vLLM servers, the first not in developer mode and the second in it, on a core each."""
    python = os.environ[PYTHON]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    cores, ports, processes = sorted(os.sched_getaffinity(0)), [], []
    for number, dev in enumerate("01"):
        ports.append(free_port())
        command = [
            "taskset", "-c", str(cores[number % len(cores)]),
            python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model()),
            "--load-format", "dummy", "--dtype", "float32", "--enforce-eager", "--skip-tokenizer-init",
            "--max-model-len", "1024", "--max-num-seqs", "16", "--host", "127.0.0.1",
            "--port", str(ports[-1]),
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(
                command,
                env=environment | {"VLLM_SERVER_DEV_MODE": dev},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
    try:
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)  # killing would leave its workers behind
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


NEEDS_VLLM = pytest.mark.skipif(
    PYTHON not in os.environ, reason=f"needs vLLM: {PYTHON} must name a Python that has it"
)
LONG = replace(BATCH, output_tokens=10 * BATCH.output_tokens)
"""Responses are long, as on a busy machine a server tells of hundreds of steps at once."""


@pytest.fixture(scope="module")
def undisturbed(vllm_servers: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """The tokens of each request."""
    policy, folder = queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path_factory.mktemp("undisturbed")
    run, record = play([], policy, folder, trace=LONG, urls=vllm_servers, connect_s=240)
    assert run.backend.startswith("vLLM ")
    check(run, record, LONG, ids=False)
    return record.ledger().tokens


@NEEDS_VLLM
def test_two_vllm_servers_move(vllm_servers: list[str], undisturbed: list[list[int]], tmp_path: Path) -> None:
    """Exact lengths, and a move in the middle that changes no token; with and without developer mode."""
    run, record = play([], swap_at(ReviewPoint("tokens", 10)), tmp_path, trace=LONG, urls=vllm_servers)
    check(run, record, LONG, ids=False)
    assert record.ledger().tokens == undisturbed
    assert len(run.moves.request) >= 3
    assert {0, 1} >= set(run.moves.source.tolist())


@NEEDS_VLLM
def test_two_vllm_servers_sleep_and_wake(
    vllm_servers: list[str], undisturbed: list[list[int]], tmp_path: Path
) -> None:
    """What the server offers is used: the second one sleeps while the first does all, then both go on.

    vLLM's CPU build says that it sleeps, and takes no step meanwhile, but keeps its memory.
    """
    found: list[bool] = []

    def watched(view: View) -> Plan:
        plan = shrink(view)
        if len(view.fleet.engines) == 1:
            with urllib.request.urlopen(f"{vllm_servers[1]}/is_sleeping", timeout=60) as answer:
                found.append(json.load(answer)["is_sleeping"])
        return plan

    with HttpEngines(PROFILE, vllm_servers) as engines:
        plain, dev = (engines._links[server].connected.result().paths for server in engines.servers)
        assert {"/pause", "/resume", "/abort_requests", "/sleep", "/wake_up", "/is_sleeping"} <= dev
        assert not {"/pause", "/abort_requests", "/sleep"} & plain
    run, record = play([], watched, tmp_path, trace=LONG, urls=vllm_servers)
    check(run, record, LONG, ids=False)
    assert record.ledger().tokens == undisturbed
    assert found == [True]
    assert len(run.engines) == 3
    assert run.spans.sleep_s[1] > 0
    assert run.spans.wake_s[2] > 0
    with urllib.request.urlopen(f"{vllm_servers[1]}/is_sleeping", timeout=60) as answer:
        assert not json.load(answer)["is_sleeping"]


@NEEDS_VLLM
def test_two_vllm_servers_lower_limits(
    vllm_servers: list[str], undisturbed: list[list[int]], tmp_path: Path
) -> None:
    """What comes while a policy thinks is cut to what is wanted then."""
    limits = LONG.output_tokens.copy()

    def lower(view: View) -> Plan:
        if view.now_s == 0:
            return queues([0, 1, 2, 3], [4, 5, 6, 7], review=(ReviewPoint("tokens", 10),))(view)
        time.sleep(0.5)
        limit = view.generated_tokens + 5
        limits[view.request] = np.minimum(limit, limits[view.request])
        return Plan(view.fleet.engines, view.engine, np.arange(view.n_requests), max_tokens=limit)

    run, record = play([], lower, tmp_path, trace=LONG, urls=vllm_servers)
    assert (limits < LONG.output_tokens).any()
    assert run.output_tokens.tolist() == limits.tolist()
    whole = zip(undisturbed, limits.tolist(), strict=True)
    assert record.ledger().tokens == [tokens[:limit] for tokens, limit in whole]
