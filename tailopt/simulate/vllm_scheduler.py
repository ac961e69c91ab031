"""Whom one engine computes in a step, and how many tokens of each: the rules of vLLM's V1 scheduler.

Written to be read, and proven step by step against vLLM's own ``Scheduler`` (see
``docs/vllm_semantics.md``). A request is a row of tokens: its prompt and what it has generated so far.
``computed`` of them have their KV in the cache; the engine's work is to bring ``computed`` up to the number
of tokens, when the next token is **sampled** and the row grows by one. A prompt in prefill and a request in
decode differ only in how many tokens are missing. One step:

1. **Running requests first**, in running order, while the step's token budget lasts. Each gets all its
   missing tokens, or what is left of the budget (or ``long_prefill_tokens``, if set, and it is not the only
   request of the engine). It needs ``ceil((computed + chunk) / block_tokens)`` blocks of KV cache in all.
2. **Preemption** if so many are not free: first come first served, the *last* running request loses its
   blocks; under priorities, the one of the greatest ``(priority, arrival)``, in a tie the first in running
   order. This repeats until there is room or the request itself was the victim; in that case the step
   schedules no further running request. A victim has ``computed = 0``, keeps its tokens, and waits at the
   very front (first come first served) or at the place of its priority. If it was already scheduled in this
   step, which only happens under priorities, its part of the budget is given back.
3. **Then waiting requests**, from the front, but only if nothing was preempted in this step. Admission ends
   with the first one that cannot be admitted: nobody overtakes. It needs: a place among ``max_running``;
   some budget left (all of its missing tokens within the budget, if ``chunked_prefill`` is off); and free
   blocks for *all* tokens it has, not only for this chunk (unless ``reserve_full_prompt`` is off), plus
   ``watermark`` of all blocks if anything runs. Blocks found in the prefix cache count as computed; those
   among them that stand in the free queue use up free blocks too. Admitted requests run last.
4. **Prefix cache.** A lookup covers at most ``(tokens - 1) // block_tokens`` blocks: the last token is
   always computed, hence all of the last block if the tokens end with it. Full blocks become findable when
   they are scheduled, so a request admitted later in the same step finds them. The order in which blocks
   are reused is told in :mod:`tailopt.simulate.vllm_cache`.
5. **End of the step.** Each request of which nothing is missing samples a token: the first one at the end
   of the step that computes the end of its prompt. After a preemption its tokens are all computed anew,
   without sampling, and the next token comes with the end of that. A request is finished at the end of the
   step that samples its last token, and releases its blocks then, finished ones in running order. The KV of
   a last token is never computed: a request needs ``prompt + output - 1`` tokens of cache.

6. **Drafts** (speculative decoding; not compared with vLLM's own scheduler). A request that sampled in the
   step before, and was not preempted since, is scheduled with ``lookahead`` drafted tokens behind its missing
   one: they take their part of the budget and their blocks of cache. It then samples one token and as many
   more as were accepted; the driver says how many. What was rejected is computed anew; its blocks stay held,
   and of those only what ends within the request's tokens is findable.
7. **KV from elsewhere.** A request may come with the KV of all its tokens but the last, from another engine:
   its admission needs the same blocks, and computes one token.

Block 0 is never given out: of ``blocks``, requests share ``blocks - 1``. Aborts take effect between steps.
A request that is aborted and submitted again with its generated tokens as part of the prompt finds what
survives of its blocks if it names the same ``sequence``.

What follows, unless ``long_prefill_tokens`` is set: at most one running request is in the middle of its
prefill, it is the last in running order, and decodes never wait for budget; so nobody is admitted beside it
before its prefill is complete, and the only contents of which several copies exist are last blocks: that of a
shared prompt that ends with it, as each request with just this prompt computes its own; and, under
priorities, that of a request which fills it in the step in which the unfinished prefill preempts it, in vain,
as it has to go too. Then nobody takes that block, it stays findable though it was never computed, and the
request computes another one when it comes back.

Scope: one full-attention KV cache group, decoder-only, forced output lengths, asynchronous scheduling off,
no LoRA, no KV connector, pipeline degree 1, ``max_num_active_seqs`` and
``long_prefill_token_threshold_adaptive`` unset. Within it no difference to vLLM 0.32.0 is known, except
that a request which outgrows the whole cache is an :class:`InputError` here, where vLLM waits for ever (its
own start-up check of ``max_model_len`` keeps such requests away). Two things that vLLM does and that look
like mistakes are kept. Under priorities, a request preempted in the step in which it was already scheduled
leaves blocks findable that were never computed: its last one as told above, with ``long_prefill_tokens`` any
number. And with ``long_prefill_tokens`` but without ``reserve_full_prompt``, two requests in prefill can
preempt each other for ever.
"""

import bisect
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tailopt.errors import InputError
from tailopt.simulate.vllm_cache import BlockCache, Path


@dataclass(frozen=True)
class Limits:
    """What one engine was started with; vLLM's name of each in brackets.

    Attributes:
        blocks: KV blocks, block 0 included (``num_gpu_blocks``).
        block_tokens: tokens of a block (``block_size``).
        max_running: requests that run at once (``max_num_seqs``).
        token_budget: tokens of one step (``max_num_batched_tokens``), at least ``max_running``.
        policy: ``"fcfs"`` or ``"priority"`` (``scheduling_policy``).
        prefix_caching: (``enable_prefix_caching``).
        chunked_prefill: (``enable_chunked_prefill``). Without it, the budget must hold the longest context.
        long_prefill_tokens: longest chunk of one request, 0 for no limit (``long_prefill_token_threshold``).
        reserve_full_prompt: (``scheduler_reserve_full_isl``).
        watermark: share of the blocks kept free when a request is admitted (``watermark``).
        lookahead: tokens drafted for each request that decodes (``num_speculative_tokens``).
    """

    blocks: int
    block_tokens: int = 16
    max_running: int = 256
    token_budget: int = 8192
    policy: Literal["fcfs", "priority"] = "fcfs"
    prefix_caching: bool = True
    chunked_prefill: bool = True
    long_prefill_tokens: int = 0
    reserve_full_prompt: bool = True
    watermark: float = 0.0
    lookahead: int = 0

    def __post_init__(self) -> None:
        for what, least in (
            ("blocks", 2),
            ("block_tokens", 1),
            ("max_running", 1),
            ("long_prefill_tokens", 0),
            ("lookahead", 0),
        ):
            if getattr(self, what) < least:
                raise InputError(f"engine: {what}: expected at least {least}, got {getattr(self, what)}")
        most = self.max_running * (1 + self.lookahead)
        if self.token_budget < most:
            raise InputError(
                f"engine: token_budget: expected at least max_running * (1 + lookahead), {most}, "
                f"got {self.token_budget}"
            )
        if self.policy not in ("fcfs", "priority"):
            raise InputError(f"engine: policy: expected fcfs or priority, got {self.policy!r}")
        if not 0 <= self.watermark < 1:
            raise InputError(f"engine: watermark: expected a share from 0 to below 1, got {self.watermark}")

    def blocks_of(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True)
class Request:
    """What an engine is told of a request. Its output length is not part of it: only the driver knows.

    Attributes:
        number: distinct among the requests of an engine; breaks ties of priority and arrival.
        prompt_tokens: tokens at submission, those generated elsewhere before included.
        group, shared_tokens: requests of one group share their first ``shared_tokens`` tokens.
        sequence: who its other tokens belong to, ``number`` by default. A request that continues another one
            names that one's sequence.
        priority, arrival: under priorities lower ones are served first; then earlier ones.
        kv_tokens: of the prompt, how many come with their KV from elsewhere.
    """

    number: int
    prompt_tokens: int
    group: Hashable = None
    shared_tokens: int = 0
    sequence: Hashable = None
    priority: int = 0
    arrival: float = 0.0
    kv_tokens: int = 0

    @property
    def rank(self) -> tuple[int, float, int]:
        """Its place among waiting requests under priorities."""
        return (self.priority, self.arrival, self.number)


class Chunk(NamedTuple):
    """The tokens ``[start, start + tokens)`` of a request, computed in one step."""

    start: int
    tokens: int


@dataclass(frozen=True)
class Step:
    """What one step does.

    Attributes:
        chunks: what is computed, by request number, in running order.
        admitted: those of them that did not run before; ``chunks[r].start`` tokens were found in the cache.
        preempted: in the order of preemption; none of them is in ``chunks``.
        sampling: those of ``chunks`` that gain a token at the end of the step.
    """

    chunks: dict[int, Chunk]
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    sampling: tuple[int, ...]


@dataclass
class _State:
    request: Request
    path: Path
    tokens: int
    computed: int = 0
    kv_tokens: int = 0  # come with it at its first admission
    drafting: bool = False


class Scheduler:
    """One engine, step by step: :meth:`schedule`, then :meth:`update` with the requests that are finished.

    Args:
        limits: what the engine was started with.
        cache: its blocks; another one than the default is for tests.

    A prompt of 40 tokens in steps of at most 32, blocks of 16; the second request of the group finds the two
    full blocks in the step in which the first one completes them:

    >>> engine = Scheduler(Limits(blocks=9, max_running=4, token_budget=32))
    >>> for number in (0, 1):
    ...     engine.add(Request(number, 40, group="prompt", shared_tokens=40))
    >>> step = engine.schedule(); engine.update(); step.chunks, step.sampling
    ({0: Chunk(start=0, tokens=32)}, ())
    >>> step = engine.schedule(); engine.update(finished=[0]); step.chunks, step.sampling
    ({0: Chunk(start=32, tokens=8), 1: Chunk(start=32, tokens=8)}, (0, 1))
    >>> engine.running, engine.free_blocks, engine.generated(1)
    ([1], 5, 1)
    """

    def __init__(self, limits: Limits, cache: BlockCache | None = None) -> None:
        self.limits = limits
        self.cache = cache or BlockCache(limits.blocks - 1, limits.prefix_caching)
        self.running: list[int] = []
        self.waiting: list[int] = []
        self._states: dict[int, _State] = {}
        self._sampling: tuple[int, ...] = ()

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds."""
        return self.cache.free

    @property
    def unfinished(self) -> int:
        """Requests running or waiting."""
        return len(self._states)

    def generated(self, number: int) -> int:
        """Tokens that a request has generated here so far."""
        state = self._states[number]
        return state.tokens - state.request.prompt_tokens

    def computed(self, number: int) -> int:
        """Tokens of a running request whose KV is in the cache."""
        return self._states[number].computed

    def drafts(self, number: int) -> bool:
        """Whether tokens are drafted for a request in its next step."""
        return self._states[number].drafting

    def add(self, request: Request) -> None:
        """Let a request wait.

        Raises:
            InputError: if its number is taken, or its prompt can never be computed.
        """
        if request.number in self._states:
            raise InputError(f"request {request.number}: is here already")
        if not 0 <= request.shared_tokens <= request.prompt_tokens or request.prompt_tokens < 1:
            raise InputError(
                f"request {request.number}: expected a prompt of at least one token and no more shared ones, "
                f"got {request.prompt_tokens} and {request.shared_tokens}"
            )
        self._check_size(request, request.prompt_tokens)
        own = request.number if request.sequence is None else request.sequence
        path = Path(("group", request.group), request.shared_tokens // self.limits.block_tokens, ("own", own))
        self._states[request.number] = _State(request, path, request.prompt_tokens, 0, request.kv_tokens)
        self._wait(request, front=False)

    def abort(self, number: int) -> None:
        """Drop a request, between two steps. Its findable blocks stay so for now."""
        del self._states[number]
        if number in self.running:
            self.running.remove(number)
            self.cache.release(number)
        else:
            self.waiting.remove(number)

    def limit_running(self, most: int) -> None:
        """Run no more requests at once than this from now on; those that run already go on."""
        self.limits = replace(self.limits, max_running=most)

    def prioritize(self, number: int, priority: int) -> None:
        """Give a running request another priority, between two steps."""
        state = self._states[number]
        state.request = replace(state.request, priority=priority)

    def schedule(self) -> Step:
        """Decide the next step and let it compute its tokens.

        Raises:
            InputError: if a request needs more KV cache than the engine has.
        """
        limits, cache = self.limits, self.cache
        budget = limits.token_budget
        longest = (limits.long_prefill_tokens if self.unfinished > 1 else 0) or budget
        chunks: dict[int, Chunk] = {}
        admitted: list[int] = []
        preempted: list[int] = []

        position = 0
        while position < len(self.running) and budget > 0:
            number = self.running[position]
            state = self._states[number]
            missing = state.tokens - state.computed + (limits.lookahead if state.drafting else 0)
            chunk = Chunk(state.computed, min(missing, longest, budget))
            lacking = limits.blocks_of(sum(chunk)) - cache.held(number)
            while lacking > cache.free and number not in preempted:
                victim = self._victim()
                position -= self.running.index(victim) < position
                if victim in chunks:
                    budget += chunks.pop(victim).tokens
                self._preempt(victim)
                preempted.append(victim)
            if number in preempted:
                self._check_size(state.request, sum(chunk))
                break
            self._compute(number, chunk)
            chunks[number] = chunk
            budget -= chunk.tokens
            position += 1

        while not preempted and budget > 0 and self.waiting and len(self.running) < limits.max_running:
            number = self.waiting[0]
            state = self._states[number]
            hit = cache.lookup(state.path, (state.tokens - 1) // limits.block_tokens)
            start = max(hit.blocks * limits.block_tokens, state.kv_tokens)
            missing = min(state.tokens - start, longest)
            if missing > budget and not limits.chunked_prefill:
                break
            chunk = Chunk(start, min(missing, budget))
            must_fit = state.tokens if limits.reserve_full_prompt else sum(chunk)
            spare = int(limits.watermark * limits.blocks) if self.running else 0
            if limits.blocks_of(must_fit) - hit.blocks + hit.free_blocks + spare > cache.free:
                self._check_size(state.request, must_fit)
                break
            self.running.append(self.waiting.pop(0))
            state.kv_tokens = 0
            cache.admit(number, state.path, hit)
            self._compute(number, chunk)
            chunks[number] = chunk
            admitted.append(number)
            budget -= chunk.tokens

        for number, chunk in chunks.items():
            self._states[number].computed = min(sum(chunk), self._states[number].tokens)
        self._sampling = tuple(r for r in chunks if self._states[r].computed == self._states[r].tokens)
        return Step(chunks, tuple(admitted), tuple(preempted), self._sampling)

    def update(self, finished: Collection[int] = (), gained: Mapping[int, int] | None = None) -> None:
        """End the step: its ``sampling`` requests gain a token, those of them in ``finished`` leave.

        ``gained`` says how many tokens each gains if it is not one.
        """
        for number in self._sampling:
            state = self._states[number]
            state.tokens += 1 if gained is None else gained[number]
            state.computed, state.drafting = state.tokens - 1, True
            if number in finished:
                self.cache.release(number)
                self.running.remove(number)
                del self._states[number]
        self._sampling = ()

    def _compute(self, number: int, chunk: Chunk) -> None:
        self.cache.grow(number, self.limits.blocks_of(sum(chunk)))
        known = min(sum(chunk), self._states[number].tokens)
        self.cache.make_findable(number, known // self.limits.block_tokens)

    def _victim(self) -> int:
        if self.limits.policy == "fcfs":
            return self.running[-1]
        return max(self.running, key=lambda number: self._states[number].request.rank[:2])

    def _preempt(self, number: int) -> None:
        self.running.remove(number)
        self.cache.release(number)
        self._states[number].computed = 0
        self._states[number].drafting = False
        self._wait(self._states[number].request, front=True)

    def _wait(self, request: Request, *, front: bool) -> None:
        if self.limits.policy == "priority":
            bisect.insort(self.waiting, request.number, key=lambda number: self._states[number].request.rank)
        else:
            self.waiting.insert(0 if front else len(self.waiting), request.number)

    def _check_size(self, request: Request, tokens: int) -> None:
        need = self.limits.blocks_of(tokens)
        if need > self.cache.blocks:
            raise InputError(
                f"request {request.number}: {tokens} tokens need {need} KV blocks, "
                f"the engine has {self.cache.blocks}"
            )


def steps(limits: Limits, requests: Sequence[Request], output_tokens: Sequence[int]) -> Iterator[Step]:
    """The steps of an engine that gets all requests at once and generates ``output_tokens`` for each.

    >>> requests = [Request(0, 8), Request(1, 20)]
    >>> limits = Limits(blocks=9, max_running=4, token_budget=20)
    >>> [{r: c.tokens for r, c in step.chunks.items()} for step in steps(limits, requests, [3, 2])]
    [{0: 8, 1: 12}, {0: 1, 1: 8}, {0: 1, 1: 1}]
    """
    engine = Scheduler(limits)
    output = {request.number: tokens for request, tokens in zip(requests, output_tokens, strict=True)}
    for request in requests:
        engine.add(request)
    while engine.unfinished:
        step = engine.schedule()
        yield step
        engine.update([r for r in step.sampling if engine.generated(r) + 1 == output[r]])
