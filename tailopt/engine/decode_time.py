r"""How long one engine decodes a set of requests, without simulating it.

If the requests of an engine all start together, request i takes part in steps k = 1 .. L_i and then reads
p_i + k context tokens, so the engine is done after

.. math:: T = \sum_{k \ge 1} \tau(n(k), K(k)), \quad n(k) = |\{i : L_i \ge k\}|, \quad
          K(k) = \sum_{i : L_i \ge k} (p_i + k).

With L_(1) >= L_(2) >= ... the set of running requests is constant on the steps L_(j+1) < k <= L_(j), and K
grows by n a step there: a step time that is one line in K sums in closed form, and a maximum of lines sums in
closed form on each stretch where one line is the largest. For tau = f(n) + c K this is

.. math:: T = \sum_j L_{(j)} (f(j) - f(j-1)) + c \sum_i (p_i L_i + L_i (L_i + 1) / 2).

:func:`decode_time_s` is this sum, exact. :func:`engine_time_s` is what a policy wants: the same where
everything fits into the engine at once, and an estimate where requests have to wait.
"""

import numpy as np

from tailopt.arrays import Bools, Floats, Ints
from tailopt.engine.profile import ShapeProfile
from tailopt.engine.step_time import Lines, StepTime


def decode_time_s(
    step_time: StepTime, prompt_tokens: Ints, output_tokens: Ints, chosen: Bools | None = None
) -> Floats:
    """Seconds until an engine that starts all its requests at once has decoded them.

    Args:
        step_time: tau of the engine.
        prompt_tokens: ``[n]`` context that each request holds at the start.
        output_tokens: ``[n]`` tokens that each generates, at least 1.
        chosen: ``[..., n]`` which of the n requests the engine decodes, one set a row; None for all of them.

    Returns:
        ``[...]`` seconds, one per set of requests; 0 for an empty set.

    >>> from tailopt.engine.step_time import Affine
    >>> affine = Affine(10e-3, 1e-3, 0.0)  # 20 steps of two requests, then 10 of one
    >>> float(decode_time_s(affine, np.array([0, 0]), np.array([30, 20])))
    0.35
    >>> decode_time_s(affine, np.array([0, 0]), np.array([30, 20]), np.array([[True, False], [False, False]]))
    array([0.33, 0.  ])
    """
    if chosen is None:
        chosen = np.ones(len(output_tokens), dtype=np.bool_)
    longest_first = np.argsort(-output_tokens, kind="stable")
    chosen = chosen[..., longest_first]
    last_step = output_tokens[longest_first]
    before = np.append(last_step[1:], 0)  # the stretch of each rank j: steps before < k <= last_step
    running = np.cumsum(chosen, axis=-1, dtype=np.int64)
    lines = _distinct_slopes(step_time.lines(len(output_tokens)))
    if lines.separable:
        read = context_read(prompt_tokens, output_tokens)[longest_first].astype(np.float64)
        return np.asarray(
            lines.base_s[0][running] @ (last_step - before) + lines.slope_s[0] * (chosen @ read)
        )

    prompts = np.cumsum(chosen * prompt_tokens[longest_first], axis=-1)
    seconds = np.zeros(running.shape)
    start = np.broadcast_to(before, running.shape)
    for piece, slope_s in enumerate(lines.slope_s):
        end = _last_step_of(lines, piece, running, prompts, start, last_step)
        steps = end - start
        step_sum = (end * (end + 1) - start * (start + 1)) // 2
        seconds += steps * lines.base_s[piece][running] + slope_s * (prompts * steps + running * step_sum)
        start = end
    return np.asarray(seconds.sum(axis=-1))


def engine_time_s(
    shape: ShapeProfile,
    max_running: int,
    prompt_tokens: Ints,
    output_tokens: Ints,
    chosen: Bools,
    step_time: StepTime | None = None,
) -> Floats:
    r"""Predicted seconds until an engine has decoded its requests, longest first, within its capacity.

    Exact (:func:`decode_time_s`) for sets that the engine can start at once: at most ``max_running``
    requests, whose context never exceeds the KV cache. Otherwise requests wait, and the time is estimated:
    with A_i the context that request i reads over its life, about :math:`M \sum L_i / \sum A_i` requests fit
    into a cache of M tokens, so C = min(``max_running``, that) run together; started longest first they fill
    C slots up to a level :math:`\lambda` with :math:`\sum_{j \le C} \max(L_{(j)}, \lambda) = \sum_i L_i`,
    and the slots decode as C requests of those lengths would, each holding the average context.

    Args:
        shape: the engine's shape.
        max_running: requests that it decodes together at most.
        prompt_tokens, output_tokens, chosen: as in :func:`decode_time_s`; ``chosen`` is required.
        step_time: in place of the shape's own, as of an engine that speculates
            (:func:`tailopt.engine.speculation.token_time`).

    >>> from tailopt.engine.step_time import Affine
    >>> shape = ShapeProfile(1, Affine(10e-3, 1e-3), 1e4, kv_capacity_tokens=10**6, max_running=2)
    >>> four = np.full(4, 50)  # two slots of 100 tokens each
    >>> round(float(engine_time_s(shape, 2, four, four, np.ones(4, bool))), 6)
    1.2
    """
    step_time = shape.step_time if step_time is None else step_time
    seconds = decode_time_s(step_time, prompt_tokens, output_tokens, chosen)
    waits = np.asarray(np.count_nonzero(chosen, axis=-1) > max_running)
    large = chosen @ (prompt_tokens + output_tokens).astype(np.float64) > shape.kv_capacity_tokens
    if large.any():
        peak = _peak_context(prompt_tokens, output_tokens, chosen[large])
        waits[large] |= peak > shape.kv_capacity_tokens
    for place in np.argwhere(waits):
        members = chosen[tuple(place)]
        seconds[tuple(place)] = _crowded_time_s(
            shape, step_time, max_running, prompt_tokens[members], output_tokens[members]
        )
    return seconds


def context_read(prompt_tokens: Ints, output_tokens: Ints) -> Ints:
    """``[n]`` context tokens that each request reads in all its steps together: p L + L (L + 1) / 2.

    >>> context_read(np.array([10]), np.array([2]))  # 11, then 12
    array([23])
    """
    return prompt_tokens * output_tokens + output_tokens * (output_tokens + 1) // 2


def _distinct_slopes(lines: Lines) -> Lines:
    """The same maximum of lines, by rising slope and no slope twice."""
    slopes = np.unique(lines.slope_s)
    if len(slopes) == len(lines.slope_s) == 1:
        return lines
    bases = [lines.base_s[lines.slope_s == slope].max(axis=0) for slope in slopes]
    return Lines(np.stack(bases), slopes)


def _last_step_of(lines: Lines, piece: int, running: Ints, prompts: Ints, start: Ints, stop: Ints) -> Ints:
    """The last step in ``start .. stop`` at which no steeper line than ``piece`` is the largest.

    Some steeper line overtakes all lines up to ``piece`` at the context K* = min over steeper q of the max
    over r <= piece of (base_r - base_q) / (slope_q - slope_r); until then prompts + running * k <= K*.
    """
    stop = np.broadcast_to(stop, running.shape)
    if piece == len(lines.slope_s) - 1:
        return stop
    base, slope = lines.base_s[:, running], lines.slope_s
    crossing = np.full(running.shape, np.inf)
    for steeper in range(piece + 1, len(slope)):
        with np.errstate(over="ignore"):  # slopes that hardly differ: overtakes at infinity
            overtakes = [
                (base[flatter] - base[steeper]) / (slope[steeper] - slope[flatter])
                for flatter in range(piece + 1)
            ]
        crossing = np.minimum(crossing, np.max(overtakes, axis=0))
    last = np.floor((crossing - prompts) / np.maximum(running, 1))
    return np.asarray(np.clip(last, start, stop).astype(np.int64))


def _peak_context(prompt_tokens: Ints, output_tokens: Ints, chosen: Bools) -> Ints:
    """``[...]`` most KV tokens that each set holds at any step, if it starts all at once."""
    longest_first = np.argsort(-output_tokens, kind="stable")
    chosen = chosen[..., longest_first]
    held = np.cumsum(chosen * prompt_tokens[longest_first], axis=-1)
    held += np.cumsum(chosen, axis=-1) * output_tokens[longest_first]
    return np.asarray(np.max(np.where(chosen, held, 0), axis=-1, initial=0))


def _crowded_time_s(
    shape: ShapeProfile, step_time: StepTime, max_running: int, prompt_tokens: Ints, output_tokens: Ints
) -> float:
    """The estimate of :func:`engine_time_s` for one set of requests that does not fit at once."""
    tokens, context = int(output_tokens.sum()), int(context_read(prompt_tokens, output_tokens).sum())
    slots = max(1, min(max_running, shape.kv_capacity_tokens * tokens // context, len(output_tokens)))
    longest = np.sort(output_tokens)[::-1][:slots].astype(np.float64)
    # level after filling up the slots from rank j on, if ranks before j stay above it: the first that holds
    rest = tokens - np.concatenate([[0.0], np.cumsum(longest)[:-1]])
    levels = rest / np.arange(slots, 0, -1)
    level = levels[int(np.argmax(levels >= longest))]  # holds at the last rank at the latest
    slot_steps = np.maximum(longest, level)
    stretch = slot_steps - np.append(slot_steps[1:], 0.0)
    running = np.arange(1, slots + 1)
    return float(np.sum(stretch * step_time(running, running * (context / tokens))))
