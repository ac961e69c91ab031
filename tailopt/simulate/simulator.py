"""``simulate``: carry out a plan, or a policy with its reviews, on a simulated fleet, fast."""

import numpy as np

from tailopt.arrays import Ints
from tailopt.drive import State, drive, follow
from tailopt.plan import Engine, Fleet, Plan, Policy, View
from tailopt.run import EngineLog, Run, Stays
from tailopt.simulate import kernel
from tailopt.simulate import records as r
from tailopt.simulate.instants import SLACK
from tailopt.simulate.kernel import PAGE
from tailopt.simulate.ledger import Ledger, Orders, Snapshot
from tailopt.simulate.line_table import lines_of
from tailopt.simulate.packed import PackedLog, PackedStays
from tailopt.trace import Trace


def simulate(trace: Trace, fleet: Fleet, plan: Plan) -> Run:
    """Carry out ``plan`` for the batch ``trace`` on ``fleet`` and say what happened to each request.

    The rules are those of :mod:`tailopt.simulate.reference`, which schedules each step as vLLM does. Times
    agree with it to 1e-9 relative, at a cost that grows with events and not with tokens.

    Raises:
        InputError: if the plan does not fit the trace or the fleet, a request can never fit an engine, or the
            plan has review points.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import Engine
    >>> fleet = Fleet(load_engine("h100-llama-3.1-8b"), (Engine(1), Engine(1)), gpus=2)
    >>> trace = Trace.of([[30, 50], [7, 9]], prompt_tokens=100)
    >>> run = simulate(trace, fleet, Plan.of_queues(fleet.engines, [[0, 1], [2, 3]]))
    >>> run.output_tokens.tolist(), bool(run.makespan_s == run.finish_s[1])
    ([30, 50, 7, 9], True)
    """
    return follow(SimulatedBackend(trace, fleet), plan)


def simulate_policy(trace: Trace, policy: Policy, view: View) -> Run:
    """Carry out ``policy`` for the batch ``trace``, of which ``view`` is what it may see at the start.

    Raises:
        InputError: if one of its plans does not answer what it was shown, or cannot be carried out.

    >>> from tailopt.engine.catalogue import load_engine
    >>> from tailopt.plan import ReviewPoint
    >>> def spread_out(view: View) -> Plan:  # when one is done, the other gets its engine
    ...     engine_of = [0, 0] if view.now_s == 0 else [1]
    ...     ask = (ReviewPoint("unfinished", 1),)
    ...     return Plan(view.fleet.engines, engine_of, np.arange(view.n_requests), review=ask)
    >>> trace = Trace.of([[30, 50]], prompt_tokens=100)
    >>> view = View.at_start(trace, Fleet.of(load_engine("h100-llama-3.1-8b"), "2xTP1"))
    >>> run = simulate_policy(trace, spread_out, view)
    >>> run.engine.tolist(), run.moves.tokens.tolist()
    ([0, 1], [130])
    """
    return drive(SimulatedBackend(trace, view.fleet), policy, view)


class SimulatedBackend:
    """A batch carried out from event to event; a :class:`tailopt.drive.Backend`."""

    def __init__(self, trace: Trace, fleet: Fleet) -> None:
        n = trace.n_requests
        self._ledger, self._n = Ledger(trace, fleet), n
        blank = np.zeros(1, dtype=r.REQUEST)
        for none in ("engine", "ran_on", "stay", "chain", "own", "odd_step"):
            blank[none] = r.NONE
        for time in ("start_s", "first_token_s", "finish_s"):
            blank[time] = np.nan
        self._requests = np.repeat(blank, n)
        self._requests["prompt_tokens"], self._requests["group"] = trace.context_tokens, trace.group
        self._runs = np.empty(2 * n + 64, dtype=r.RUN)
        self._chains = np.full(int(trace.group.max()) + 1, r.NONE)
        self._engines = np.zeros(0, dtype=r.ENGINE)
        self._widest, self._heaps = 0, np.zeros((0, 0), dtype=r.ENTRY)
        sizes = [shape.block_tokens for shape in fleet.profile.shapes.values()]
        self._phases = np.zeros((0, max(sizes)), dtype=np.int64)
        # much more than most batches need: memory that is never written to is never taken
        self._log = np.empty((16 * n // PAGE + 2 * len(fleet.engines) + 2) * PAGE, dtype=r.LOG)
        self._stays = np.empty(8 * n + 64, dtype=r.STAY)
        self._counters, self._clock = np.zeros(r.COUNTERS, dtype=np.int64), np.zeros(1)

    def start(self, plan: Plan) -> None:
        """Begin with this plan."""
        self._follow(self._ledger.begin(plan))

    def change(self, plan: Plan, request: Ints) -> None:
        """Go on with this plan for the unfinished requests."""
        orders = self._ledger.change(plan, request)
        for column in ("waiting", "waiting_blocks", "steady", "next_own", "end_own"):
            self._engines[column] = 0
        self._requests["engine"][self._requests["stay"] == r.NONE] = r.NONE
        self._follow(orders)

    def until_review(self) -> State | None:
        """Go on to the next review; None when all requests are over."""
        while (code := self._advance()) != r.DONE:
            if code == r.LOG_FULL:
                self._log = _longer(self._log)
            elif code == r.STAYS_FULL:
                self._stays = _longer(self._stays)
            elif code == r.RUNS_FULL:
                self._runs = _longer(self._runs)
            elif code == r.HEAP_FULL:
                self._heaps = _wider(self._heaps, min(2 * self._heaps.shape[1], self._widest))
            else:
                state = self._review()
                if state is not None:
                    return state
        return None

    def run(self) -> Run:
        """What happened."""
        while kernel.last_notes(self._engines, self._log, self._counters) != r.DONE:
            self._log = _longer(self._log)
        del self._runs, self._heaps  # their memory is for the columns below
        requests = self._requests
        log = PackedLog(
            self._log.reshape(-1, PAGE)[: self._counters[r.PAGES]],
            self._n + 1,
            self._engines["event"],
            self._engines["block_tokens"],
        )
        stays = PackedStays(self._stays[: self._counters[r.STAYS_LENGTH]], log)
        return self._ledger.run(
            "simulated",
            engine=requests["ran_on"].astype(np.int64),
            output_tokens=requests["generated"].copy(),
            preemptions=requests["preemptions"].astype(np.int64),
            log=EngineLog.made_by(log.column),
            stays=Stays.made_by(stays.column),
            **{name: requests[name].copy() for name in ("start_s", "first_token_s", "finish_s")},
        )

    def _follow(self, orders: Orders) -> None:
        ledger, requests = self._ledger, self._requests
        leaving = np.zeros(self._n, dtype=np.int64)
        leaving[orders.leaving] = 1
        kernel.take_off(requests, self._runs, self._engines, self._heaps, self._phases, self._stays, leaving)
        requests["finish_s"][orders.over] = orders.over_s
        self._open([ledger.engines[e] for e in orders.opened], orders.opened)
        own = [orders.queue[e] for e in ledger.current]
        self._own = np.concatenate([np.zeros(0, dtype=np.int64), *own])
        ends = np.cumsum([len(queue) for queue in own])
        self._units = orders.unit_start, orders.unit_member, orders.unit_s
        watch = ledger.watch
        self._watch = np.array([watch.unfinished, watch.idle, watch.time_s])
        self._marks, self._passed = watch.tokens, np.zeros(len(watch.tokens), dtype=np.int64)

        requests["limit"], requests["position"] = ledger.limit, ledger.position
        requests["kv_sent"] = (ledger.kv_sent_to != r.NONE) & (requests["stay"] == r.NONE)
        requests["mark"] = np.searchsorted(watch.tokens, requests["generated"], side="right")
        engines = self._engines
        engines["done"] = True
        now = engines[ledger.current]
        limits = [ledger.limits(e) for e in ledger.current]
        self._limits = np.array([pair for own in limits for pair in own[1:]], np.int64).reshape(-1, 2)
        now["max_running"], now["finished"] = [own[0][1] for own in limits], 0
        now["end_limit"] = np.cumsum([len(own) - 1 for own in limits])
        now["next_limit"] = now["end_limit"] - [len(own) - 1 for own in limits]
        now["hungry"] = True
        now["end_own"], now["next_own"] = ends, ends - [len(queue) for queue in own]
        has_work = (now["running"] > 0) | (now["end_own"] > now["next_own"])
        now["done"] = ~(has_work | (len(orders.unit_start) > 1))
        engines[ledger.current] = now
        kernel.rekey(requests, engines, self._heaps, self._marks)
        self._counters[[r.UNITS_PULLED, r.PASSED, r.IDLE]] = 0
        self._counters[r.UNFINISHED] = np.isnan(requests["finish_s"]).sum()

    def _open(self, opened: list[Engine], numbers: range) -> None:
        ledger = self._ledger
        widest = int(min(max(ledger.max_running(e) for e in ledger.current), self._n))
        self._widest = max(self._widest, widest, int(self._engines["running"].max(initial=0)))
        self._lines = lines_of(ledger.profile, ledger.engines, self._widest)
        new = np.zeros(len(opened), dtype=r.ENGINE)
        shapes = [ledger.profile.shape(engine.tp) for engine in opened]
        for column in ("token_budget", "block_tokens", "prefix_caching"):
            new[column] = [getattr(shape, column) for shape in shapes]
        new["prefill_s"] = [1 / shape.prefill_tokens_per_s for shape in shapes]
        new["priority"] = [engine.scheduling == "priority" for engine in opened]
        for blocks in ("blocks", "free", "blank"):
            new[blocks] = [shape.kv_capacity_tokens // shape.block_tokens for shape in shapes]
        for none in (
            "queue_head",
            "queue_tail",
            "wait_head",
            "wait_tail",
            "run_head",
            "run_tail",
            "prefilling",
        ):
            new[none] = r.NONE
        new["event"], new["log_width"] = self._first_events(numbers), self._n + 1
        new["time_s"] = new["ready_s"] = [ledger.open_s[e] for e in numbers]
        self._engines = np.concatenate([self._engines, new])
        self._engines["kind"] = self._lines.shape
        self._engines["lookahead"] = self._lines.lookahead[self._lines.shape]
        m, width = len(self._engines), self._heaps.shape[1]
        width = max(width, min(self._widest, 4 * self._n // m + 64))
        self._heaps = _wider(
            np.concatenate([self._heaps, np.zeros((len(new), self._heaps.shape[1]), r.ENTRY)]), width
        )
        self._phases = np.concatenate([self._phases, np.zeros((len(new), self._phases.shape[1]), np.int64)])

    def _first_events(self, numbers: range) -> Ints:
        """A page of the log for each new engine."""
        pages = self._counters[r.PAGES] + np.arange(len(numbers))
        self._counters[r.PAGES] += len(numbers)
        while self._counters[r.PAGES] * PAGE > len(self._log):
            self._log = _longer(self._log)
        self._log["step"][pages * PAGE] = numbers
        first: Ints = pages * PAGE + 1
        return first

    def _advance(self) -> int:
        ledger, lines = self._ledger, self._lines
        code = kernel.run(
            self._requests, ledger.available_s, ledger.shared_tokens, self._runs, self._engines, self._heaps,
            self._phases, self._chains, self._own, self._limits, *self._units, self._log, self._stays,
            self._counters, self._clock, self._marks, self._passed, self._watch, lines.base_s, lines.slope_s,
            lines.pieces, lines.tokens,
        )  # fmt: skip
        return int(code)

    def _review(self) -> State | None:
        ledger, lines, requests = self._ledger, self._lines, self._requests
        now_s, left = float(self._clock[0]), int(self._counters[r.UNFINISHED])
        reason = ledger.reason(now_s, left, self._passed > 0, bool(self._counters[r.IDLE]))
        assert reason is not None
        # beside an engine without work, all others have begun a step at that time
        cut_s = np.nextafter(now_s * SLACK * SLACK, np.inf) if self._counters[r.IDLE] else now_s
        kernel.settle(
            requests, self._runs, self._engines, self._heaps, self._phases, self._limits, self._stays,
            self._counters, now_s, cut_s, self._marks, self._passed, lines.base_s, lines.slope_s,
            lines.pieces, lines.tokens,
        )  # fmt: skip
        running = requests["stay"] != r.NONE
        ledger.kv_sent_to[running | (requests["engine"] != r.NONE) & ~requests["kv_sent"]] = r.NONE
        seen = Snapshot(
            clock_s=self._engines["time_s"].copy(),
            engine=requests["engine"].astype(np.int64),
            running=running,
            generated=requests["generated"].copy(),
            computed=requests["computed"].copy(),
            finished=~np.isnan(requests["finish_s"]),
        )
        return ledger.review(now_s, reason, seen) if self._counters[r.UNFINISHED] else None


def _longer(table: r.Records) -> r.Records:
    longer = np.empty(2 * len(table), dtype=table.dtype)
    longer[: len(table)] = table
    return longer


def _wider(heaps: r.Records, width: int) -> r.Records:
    wider = np.zeros((len(heaps), width), dtype=r.ENTRY)
    wider[:, : heaps.shape[1]] = heaps
    return wider
