r"""Invented traces, for tests and for asking what would happen. Always marked, by flag and by name.

Lengths follow a given distribution (with quantile function Q), and responses to one prompt are alike to a
given degree. Both at once come from a Gaussian copula: with independent standard normal u per prompt and e
per response, and the between-prompt share :math:`\rho`,

.. math:: z = \sqrt{\rho}\, u + \sqrt{1 - \rho}\, e \sim N(0, 1), \quad
          L = \max(1, \mathrm{round}\, Q(\Phi(z))) .

:math:`\rho` is the intraclass correlation of z; for the lognormal, of the log length (before rounding and
cap). A cap cuts longer responses and flags them.
"""

from collections.abc import Callable

import numpy as np

from tailopt.arrays import Floats
from tailopt.errors import InputError
from tailopt.trace.trace import Trace
from tailopt.trace.transforms import truncate

_LONGEST = 2**31 - 1


def synthetic_lognormal(
    *,
    prompts: int,
    samples: int,
    median: float = 2000.0,
    sigma: float = 1.0,
    between: float = 0.6,
    cap: int | None = None,
    prompt_tokens: int = 200,
    seed: int,
) -> Trace:
    """Lognormal lengths: ``log L ~ N(log median, sigma^2)``. P90 / P50 is ``exp(1.2816 sigma)``.

    Args:
        prompts: number of prompts.
        samples: responses to each.
        median: median length in tokens.
        sigma: standard deviation of the log length.
        between: between-prompt share, 0 to 1 (see the module).
        cap: longest response in tokens, None for no cap.
        prompt_tokens: length of every prompt.
        seed: of the draw.

    Raises:
        InputError: if an argument is out of range.

    >>> trace = synthetic_lognormal(prompts=3, samples=2, seed=0)
    >>> trace.name, trace.synthetic, trace.n_requests
    ('synthetic lognormal(median=2000, sigma=1)', True, 6)
    """
    _positive(median=median, sigma=sigma)
    return _draw(
        f"lognormal(median={median:g}, sigma={sigma:g})",
        lambda z: median * np.exp(sigma * z),
        prompts, samples, between, cap, prompt_tokens, seed,
    )  # fmt: skip


def synthetic_gamma(
    *,
    prompts: int,
    samples: int,
    mean: float = 2000.0,
    shape: float = 2.0,
    between: float = 0.6,
    cap: int | None = None,
    prompt_tokens: int = 200,
    seed: int,
) -> Trace:
    """Gamma lengths, a light tail: the coefficient of variation is ``1 / sqrt(shape)``. Arguments as above.

    >>> synthetic_gamma(prompts=3, samples=2, seed=0).name
    'synthetic gamma(mean=2000, shape=2)'
    """
    from scipy.special import gammaincinv, ndtr

    _positive(mean=mean, shape=shape)
    return _draw(
        f"gamma(mean={mean:g}, shape={shape:g})",
        lambda z: mean / shape * gammaincinv(shape, ndtr(z)),
        prompts, samples, between, cap, prompt_tokens, seed,
    )  # fmt: skip


def synthetic_pareto(
    *,
    prompts: int,
    samples: int,
    least: float = 500.0,
    alpha: float = 1.5,
    between: float = 0.6,
    cap: int | None = None,
    prompt_tokens: int = 200,
    seed: int,
) -> Trace:
    """Pareto lengths, a heavy tail: ``P(L > l) = (least / l)^alpha``. Arguments as above.

    >>> synthetic_pareto(prompts=3, samples=2, seed=0).name
    'synthetic pareto(least=500, alpha=1.5)'
    """
    from scipy.special import log_ndtr

    _positive(least=least, alpha=alpha)
    return _draw(
        f"pareto(least={least:g}, alpha={alpha:g})",
        lambda z: least * np.exp(-log_ndtr(-z) / alpha),
        prompts, samples, between, cap, prompt_tokens, seed,
    )  # fmt: skip


def synthetic_bimodal(
    *,
    prompts: int,
    samples: int,
    median: float = 600.0,
    sigma: float = 0.6,
    at_cap: float = 0.1,
    between: float = 0.6,
    cap: int = 8192,
    prompt_tokens: int = 200,
    seed: int,
) -> Trace:
    """Short lognormal answers, and a share ``at_cap`` that loops until the cap: what small models do.

    >>> synthetic_bimodal(prompts=3, samples=2, seed=0).name
    'synthetic bimodal(median=600, sigma=0.6, at_cap=0.1) (cap=8192)'
    """
    from scipy.special import ndtr, ndtri

    _positive(median=median, sigma=sigma)
    if not 0 <= at_cap < 1:
        raise InputError(f"at_cap: expected a share from 0 to below 1, got {at_cap:g}")

    def lengths(z: Floats) -> Floats:
        share = ndtr(z)
        short = median * np.exp(sigma * ndtri(np.minimum(share / (1 - at_cap), 1 - 1e-16)))
        return np.where(share > 1 - at_cap, _LONGEST, np.minimum(short, cap))

    return _draw(
        f"bimodal(median={median:g}, sigma={sigma:g}, at_cap={at_cap:g})",
        lengths, prompts, samples, between, cap, prompt_tokens, seed,
    )  # fmt: skip


def _draw(
    name: str,
    quantile_of_normal: Callable[[Floats], Floats],
    prompts: int,
    samples: int,
    between: float,
    cap: int | None,
    prompt_tokens: int,
    seed: int,
) -> Trace:
    for what, value, minimum in (("prompts", prompts, 1), ("samples", samples, 1), ("seed", seed, 0)):
        if value < minimum:
            raise InputError(f"{what}: expected at least {minimum}, got {value}")
    if not 0 <= between <= 1:
        raise InputError(f"between: expected a share from 0 to 1, got {between:g}")
    rng = np.random.default_rng(seed)
    per_prompt = rng.standard_normal((prompts, 1))
    per_response = rng.standard_normal((prompts, samples))
    z = np.sqrt(between) * per_prompt + np.sqrt(1 - between) * per_response
    lengths = np.clip(np.rint(quantile_of_normal(z)), 1, _LONGEST).astype(np.int64)
    trace = Trace.of(
        lengths.tolist(),
        prompt_tokens=prompt_tokens,
        name=f"synthetic {name}",
        source=f"synthetic: {name}, between-prompt share {between:g}, seed {seed}",
        synthetic=True,
    )
    return trace if cap is None else truncate(trace, cap)


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise InputError(f"{name}: expected a number above 0, got {value:g}")
