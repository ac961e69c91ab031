r"""What a trace looks like in a few numbers: how long the tail is, and whose it is.

**Percentiles** interpolate linearly between order statistics: with sorted lengths
:math:`x_0 \le \dots \le x_{n-1}`, the percentile p is read at position :math:`p (n-1)`.

**Whose tail it is**: the total sum of squares of the lengths splits into a part between the groups (the
samples of one prompt at one training step) and a part within them,

.. math:: SS = \underbrace{\sum_g n_g (\bar x_g - \bar x)^2}_{SS_B}
               + \underbrace{\sum_g \sum_{i \in g} (x_i - \bar x_g)^2}_{SS_W} .

:math:`\eta^2 = SS_B / SS` is the between-prompt share. It is biased upwards: with few samples a prompt, group
means differ by chance alone. The intraclass correlation of a one-way random-effects model corrects for this
(ICC(1), here for a groups of unequal size :math:`n_g`, N responses in all):

.. math:: ICC = \frac{MS_B - MS_W}{MS_B + (n_0 - 1) MS_W}, \quad
          MS_B = \frac{SS_B}{a - 1}, \; MS_W = \frac{SS_W}{N - a}, \;
          n_0 = \frac{1}{a - 1} \Bigl(N - \frac{\sum_g n_g^2}{N}\Bigr) .

(Shrout and Fleiss, Psychological Bulletin 86, 1979; the :math:`n_0` for unequal sizes is that of Snedecor and
Cochran, Statistical Methods.) High: a prompt's other samples predict a response. Near 0: they do not.

**Censoring**: a capped length is a lower bound of the length without the cap. A percentile that no capped
length reaches down to is exact; every other one, and the maximum, is a lower bound (named in
``lower_bounds``). Sums of squares of capped lengths describe the lengths as cut, not as they would have been.
"""

from dataclasses import dataclass

import numpy as np

from tailopt.arrays import Floats
from tailopt.trace.trace import Trace

DEFINITIONS = {
    "n_requests": "responses",
    "n_prompts": "distinct prompts",
    "n_groups": "groups: the samples of one prompt at one training step",
    "samples_min": "fewest samples of a group",
    "samples_median": "median samples of a group",
    "samples_max": "most samples of a group",
    "mean": "mean output tokens",
    "p50": "median output tokens, linear interpolation",
    "p90": "90th percentile of output tokens, linear interpolation",
    "p99": "99th percentile of output tokens, linear interpolation",
    "max": "longest response in output tokens",
    "p90_over_p50": "P90 / P50",
    "capped_share": "share of responses that the length cap cut off",
    "between_prompt_share": "eta squared: between-group share of the sum of squares of output tokens",
    "icc": "ICC(1): between-group share of variance, corrected for the number of samples; may be negative",
}
"""What each number of :class:`TraceStatistics` means."""


@dataclass(frozen=True)
class TraceStatistics:
    """Numbers that describe a trace; each is defined in ``DEFINITIONS``, lengths are output tokens.

    ``between_prompt_share`` and ``icc`` are None where they are undefined: a single group, one sample in
    every group, or no variance at all. ``lower_bounds`` names the numbers that censoring makes lower bounds;
    the ratio ``p90_over_p50`` is one only if P50 itself is exact, and else has no known direction.
    """

    n_requests: int
    n_prompts: int
    n_groups: int
    samples_min: int
    samples_median: float
    samples_max: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: int
    p90_over_p50: float
    capped_share: float
    between_prompt_share: float | None
    icc: float | None
    lower_bounds: tuple[str, ...] = ()


def statistics(trace: Trace) -> TraceStatistics:
    """Describe a trace.

    >>> from tailopt.trace import Trace
    >>> found = statistics(Trace.of([[100, 110], [100, 120], [900, 1000]]))
    >>> found.p50, found.p90, found.max, round(found.between_prompt_share, 3), round(found.icc, 3)
    (115.0, 950.0, 1000, 0.994, 0.993)
    """
    lengths = np.sort(trace.output_tokens)
    percentiles = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
    p50, p90, p99 = (float(np.quantile(lengths, share)) for share in percentiles.values())
    sizes = np.bincount(trace.group)
    share, icc = _between(trace, sizes)
    return TraceStatistics(
        n_requests=trace.n_requests,
        n_prompts=trace.n_prompts,
        n_groups=len(sizes),
        samples_min=int(sizes.min()),
        samples_median=float(np.median(sizes)),
        samples_max=int(sizes.max()),
        mean=float(lengths.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=int(lengths[-1]),
        p90_over_p50=p90 / p50,
        capped_share=float(trace.capped.mean()),
        between_prompt_share=share,
        icc=icc,
        lower_bounds=_lower_bounds(trace, lengths, percentiles),
    )


def _between(trace: Trace, sizes: np.ndarray) -> tuple[float | None, float | None]:
    """Between-group share of the sum of squares, and ICC(1)."""
    n, groups = trace.n_requests, len(sizes)
    if groups < 2 or groups == n:
        return None, None
    lengths: Floats = trace.output_tokens.astype(np.float64)
    means = np.bincount(trace.group, weights=lengths) / sizes
    between = float((sizes * (means - lengths.mean()) ** 2).sum())
    within = float(((lengths - means[trace.group]) ** 2).sum())
    if between + within == 0.0:
        return None, None
    ms_between, ms_within = between / (groups - 1), within / (n - groups)
    n0 = (n - float((sizes**2).sum()) / n) / (groups - 1)
    return between / (between + within), (ms_between - ms_within) / (ms_between + (n0 - 1) * ms_within)


def _lower_bounds(trace: Trace, lengths: np.ndarray, percentiles: dict[str, float]) -> tuple[str, ...]:
    """Names of the statistics that a longer true length of some capped response would raise, at most."""
    if not trace.capped.any():
        return ()
    shortest_capped = int(trace.output_tokens[trace.capped].min())
    names = [
        name
        for name, share in percentiles.items()
        if shortest_capped <= lengths[int(np.ceil(share * (len(lengths) - 1)))]
    ]
    if "p90" in names and "p50" not in names:
        names.append("p90_over_p50")
    return ("mean", *names, "max")
