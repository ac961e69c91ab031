"""Replays over HTTP, on servers that pretend (fake_server.py); the last test is on two real ones."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_worker import next_token
from hypothesis import given, settings
from hypothesis import strategies as st

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


LATE_TOKENS = pytest.mark.xfail(
    reason="on a busy machine a server was seen to give a token more than a limit lowered at a review",
    strict=False,
)


@pytest.mark.parametrize("lowered", [False, pytest.param(True, marks=LATE_TOKENS)])
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


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_silence_is_noticed(fault: str, tmp_path: Path) -> None:
    """A server that says nothing is dead; it is tried again, and in the end given up."""
    with fakes(fault=lambda body: fault) as servers, pytest.raises(ReplayError) as error:
        play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, silence_s=0.3)
    assert "has said nothing for 0.3 s" in str(error.value)
    with fakes(fault=only(fault, times=1)) as servers:  # one request of several: noticed later
        run, record = play(servers, queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, silence_s=0.3, trace=BATCH)
        check(run, record)


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
    """Two vLLM servers, the first in developer mode and the second not."""
    python = os.environ[PYTHON]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    }  # fmt: skip
    ports, processes = [], []
    for dev in ("1", "0"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
        command = [
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


@pytest.mark.skipif(PYTHON not in os.environ, reason=f"needs vLLM: {PYTHON} must name a Python that has it")
def test_two_vllm_servers(vllm_servers: list[str], tmp_path: Path) -> None:
    """Exact lengths, and a move in the middle that changes no token; with and without developer mode.

    Responses are long, as on a busy machine a server tells of hundreds of steps at once.
    """
    long = replace(BATCH, output_tokens=10 * BATCH.output_tokens)
    undisturbed, first = play(
        [], queues([0, 1, 2, 3], [4, 5, 6, 7]), tmp_path, trace=long, urls=vllm_servers, connect_s=240
    )
    assert undisturbed.backend.startswith("vLLM ")
    tokens = first.ledger().tokens
    moved, second = play([], swap_at(ReviewPoint("tokens", 10)), tmp_path, trace=long, urls=vllm_servers)
    for run, record in ((undisturbed, first), (moved, second)):
        check(run, record, long, ids=False)
        assert record.ledger().tokens == tokens
    assert len(moved.moves.request) >= 3
    assert {0, 1} >= set(moved.moves.source.tolist())
    json.dumps(second.head)
