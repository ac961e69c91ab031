r"""Derive the bundled engine profiles from measured runs: ``python scripts/derive_profiles.py``.

**Serving benchmarks** (``scripts/curves/*.csv``). A client keeps n requests of ``isl`` prompt and ``osl``
output tokens in flight and reports the mean time to first token (TTFT) and the mean time per output token
(TPOT). This is a closed loop: whenever a request ends the next one starts, and its prefill delays
everybody's decoding. So TPOT is not the decode step time :math:`\tau`. But with s = osl TPOT / (osl TPOT +
TTFT), the share of its life that a request spends decoding, Little's law gives the number that decode
together, N = s n, and

.. math:: \mathrm{TPOT} = a + b N^p + c \kappa_t N (isl + osl/2) + d\, s (n - 1)\, isl/osl .

The first three terms are :math:`\tau(N, K)` at the mean context K = N (isl + osl/2); the last is the
prefill of the n - 1 others, d seconds a token, so 1/d is the prefill rate. Dense models have p = 1
(:class:`Affine`), mixtures of experts 0 < p < 1 (:class:`Power`). One fit a profile: a, b and d for every
tensor-parallel (TP) degree t, but one c for all, because the KV cache is split over the GPUs:
:math:`\kappa_t` is the share of it that one GPU holds, max(1/t, 1/KV heads). c is at least what reading
those bytes takes at peak memory bandwidth: short benchmarks barely show it where b N^p can stand in for it,
and rollouts are long. p is shared too where every GPU holds a slice of every expert, for then N requests
wake the same experts at any t; under expert parallelism it is not. A TTFT that is mostly queueing needs no
special care: it lowers s, hence N.

**A decode grid** (MuxServe, LLaMA on A100; ``--muxserve FILE``): the decode step itself, for batch x KV
length. An eager engine pays a floor of launch time and then, past a kink, for its work, so :math:`\tau` is
the larger of two affine functions (:class:`MaxAffine`). That table may not be passed on: without the option
those profiles stay as they are, with it they are derived again. FILE is ``examples/placement/llama.json``
of hao-ai-lab/MuxServe at the commit named in the profiles, or a CSV of it (model, tp, sm_pct, batch,
kv_len, prefill_ms, decode_ms).

All fits minimise the soft L1 norm of relative residuals (scale 2 %), so every row counts the same whether
it takes 4 ms or 100 ms, and a spoilt row does not bend the curve. Coefficients are rounded to four digits
*before* residuals are taken. ``--out`` writes elsewhere; ``--table`` rewrites the table of
``docs/engines.md`` from the profiles.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from scipy.optimize import least_squares

from tailopt.arrays import Floats
from tailopt.engine.catalogue import bundled_engines, load_engine, write_profile
from tailopt.engine.profile import Draft, EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine, MaxAffine, Power, StepTime
from tailopt.errors import InputError

ROOT = Path(__file__).resolve().parent.parent
CURVES = ROOT / "scripts" / "curves"
PROFILES = ROOT / "tailopt" / "engine" / "profiles"
DOCS = ROOT / "docs" / "engines.md"

MIN_DECODING_SHARE = 0.6
"""A run whose requests decode for less of their life than this is a queue before a full engine: left out."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU: memory as ``nvidia-smi`` reports it, and the peak memory bandwidth of its data sheet."""

    name: str
    memory_bytes: float
    bandwidth_bytes_per_s: float


H100 = Gpu("H100 SXM 80 GB", 81559 * 2**20, 3.35e12)
H200 = Gpu("H200 SXM 141 GB", 143771 * 2**20, 4.8e12)
A100 = Gpu("A100 80 GB", 81920 * 2**20, 2.039e12)


@dataclass(frozen=True)
class Recipe:
    """What a profile needs besides the rows: the model's public architecture, the engine's defaults.

    ``kv_heads``: into how many parts the KV cache of one layer can be split. ``length_scale``: mean request
    length over the nominal one. ``max_running``: the engine's default limit, None for the largest n measured.
    """

    name: str
    gpu: Gpu
    model: str
    precision: str
    engine: str
    engine_version: str
    date: str
    source: str
    weight_bytes: float
    kv_bytes_per_token: int
    kv_heads: int
    max_running: int | None
    notes: tuple[str, ...]
    mixture_of_experts: bool = False
    expert_parallel: bool = False
    length_scale: float = 1.0
    min_osl: int = 0
    drafts: tuple[Draft, ...] = ()

    def kv_share(self, tp: int) -> float:
        """Share of the KV cache that one of ``tp`` GPUs holds (and reads every step)."""
        return max(1 / tp, 1 / self.kv_heads)

    def kv_capacity_tokens(self, tp: int) -> int:
        """Context tokens that fit: 0.9 of the memory, less weights, less 2 GiB a GPU for activations."""
        free = 0.9 * self.gpu.memory_bytes - self.weight_bytes / tp - 2 * 2**30
        return int(free / (self.kv_bytes_per_token * self.kv_share(tp)))

    def kv_read_s_per_token(self) -> float:
        """Seconds to read one token of context, all of it, at one GPU's peak bandwidth: a floor for c."""
        return self.kv_bytes_per_token / self.gpu.bandwidth_bytes_per_s


AICONFIGURATOR = (
    "NVIDIA aiconfigurator, aic-core/src/aiconfigurator_core/systems/silicon_sample.csv, "
    "github.com/ai-dynamo/aiconfigurator commit 095f58a51c4ca8e61b66ec108d86f223f8d559ce (2026-08-21), "
    "Apache-2.0"
)
INFERENCEX = (
    AICONFIGURATOR + "; its rows of origin inferencex are SemiAnalysis InferenceX results, Apache-2.0"
)
MUXSERVE = (
    "MuxServe, examples/placement/llama.json, github.com/hao-ai-lab/MuxServe commit "
    "223148033454e4740f4b4617c72910c370a5604b (2024-06-04), Apache-2.0 by its setup.py"
)

CLOSED_LOOP = (
    "Closed loop: the time per output token mixes decoding with the prefill of the requests that replace "
    "finished ones. The fit separates the two (prefill_tokens_per_s is the reciprocal of the delay that one"
    " prefilled token causes) by their different dependence on isl/osl, not by a measurement of either "
    "alone.",
    "kv_capacity_tokens is computed, not measured: (0.9 memory - weights / TP - 2 GiB) / KV bytes, per GPU.",
    "max_running is the engine's default, but at most twice the largest n measured.",
)
KV_FP8 = (
    "The KV cache is FP8, as the benchmark's scripts set it; the TP1 runs agree, where 45 to 48 requests of"
    " about 8000 tokens decode together however many are in flight. The benchmark serves "
    "Llama-3.3-70B-Instruct-FP8, which has the same shape."
)
MTP_OF_DEEPSEEK = Draft(
    "mtp",
    acceptance=0.85,
    step_fraction=0.042,
    most_tokens=1,
    source=(
        "acceptance: 85 to 90 % for the second token of DeepSeek-V3, one token drafted (DeepSeek-V3 "
        "Technical Report, arXiv 2412.19437, section 5.4.3), not measured for R1; less for further tokens: "
        "3.1 to 3.2 tokens a step with seven drafted (model card of nebius/MTP-DeepSeek-V3-0324), as 0.70 "
        "for each would give. step_fraction: computed, share of the active parameters without embeddings, "
        "(2.4 - 0.9) / (36.7 - 0.9) billion (README_WEIGHTS.md, github.com/deepseek-ai/DeepSeek-V3 commit "
        "0b39205aed0d4b1f9a2798e8551e4059c8f94b0c)"
    ),
)
RANDOM_LENGTHS = ("Lengths were drawn between 80 and 100 % of the nominal isl and osl; the fit takes 90 %.",)

RECIPES = (
    Recipe(
        name="h100-llama-3.1-8b",
        gpu=H100,
        model="meta-llama/Llama-3.1-8B-Instruct",
        precision="BF16 (not stated in the source; the magnitudes match)",
        engine="TensorRT-LLM",
        engine_version="1.0.0rc3",
        date="2026-08-21",
        source=AICONFIGURATOR,
        weight_bytes=8.03e9 * 2,
        kv_bytes_per_token=32 * 8 * 128 * 2 * 2,
        kv_heads=8,
        max_running=2048,
        min_osl=256,
        notes=(
            *CLOSED_LOOP,
            "Date: publication; the source does not say when this was measured.",
            "Rows of osl = 128 are left out: at TP4 and TP8 the turnover of requests sets their pace (up to"
            " 40 % above the fit), not decoding.",
            "b = 0 at TP1: up to n = 128 the batch costs nothing but its context. From a few hundred "
            "requests on matrix products become compute-bound, which no row shows.",
            "At TP4 and TP8 b is larger than at TP1: presumably the host sets the pace of so small a model.",
        ),
    ),
    Recipe(
        name="h100-qwen3-32b-vllm",
        gpu=H100,
        model="Qwen/Qwen3-32B",
        precision="BF16 (not stated in the source; the magnitudes match)",
        engine="vLLM",
        engine_version="0.12.0",
        date="2026-08-21",
        source=AICONFIGURATOR,
        weight_bytes=32.76e9 * 2,
        kv_bytes_per_token=64 * 8 * 128 * 2 * 2,
        kv_heads=8,
        max_running=1024,
        notes=(
            *CLOSED_LOOP,
            "Date: publication; the source does not say when this was measured.",
            "Three TP2 runs (isl 4096, n = 128) are left out: their requests queue for half of their life, "
            "because the KV cache is full at 85 to 90 % of the capacity computed here.",
        ),
    ),
    Recipe(
        name="h200-llama-3.1-70b-fp8-vllm",
        gpu=H200,
        model="meta-llama/Llama-3.1-70B",
        precision="FP8 weights and KV cache",
        engine="vLLM",
        engine_version="not stated (0.10.2 in the benchmark's workflow of that time)",
        date="2025-10-29",
        source=INFERENCEX,
        weight_bytes=70.55e9 + 2.1e9,
        kv_bytes_per_token=80 * 8 * 128 * 2,
        kv_heads=8,
        max_running=1024,
        length_scale=0.9,
        notes=(
            *CLOSED_LOOP,
            *RANDOM_LENGTHS,
            KV_FP8,
            "TP1, TP2 and TP4 jump by 30 to 40 % between n = 16 and n = 32 and rise by 12 to 22 % to n = "
            "64: that step is smoothed over here, hence the worst residuals of 12 %.",
        ),
    ),
    Recipe(
        name="h200-llama-3.1-70b-fp8-trtllm",
        gpu=H200,
        model="meta-llama/Llama-3.1-70B",
        precision="FP8 weights and KV cache",
        engine="TensorRT-LLM",
        engine_version="not stated (1.1.0rc2.post2 in the benchmark's workflow of that time)",
        date="2025-10-29",
        source=INFERENCEX,
        weight_bytes=70.55e9 + 2.1e9,
        kv_bytes_per_token=80 * 8 * 128 * 2,
        kv_heads=8,
        max_running=2048,
        length_scale=0.9,
        notes=(
            *CLOSED_LOOP,
            *RANDOM_LENGTHS,
            KV_FP8,
            "Two TP1 runs (n = 128, lengths 1024/8192 and 8192/1024) are left out: their requests queue for"
            " more than half of their life.",
        ),
    ),
    Recipe(
        name="h100-gpt-oss-120b-vllm",
        gpu=H100,
        model="openai/gpt-oss-120b",
        precision="MXFP4 weights (fp4 in the source), BF16 KV cache",
        engine="vLLM",
        engine_version="0.18.0",
        date="2026-03-27",
        source=INFERENCEX,
        weight_bytes=65.3e9,
        kv_bytes_per_token=18 * 8 * 64 * 2 * 2,
        kv_heads=8,
        max_running=1024,
        mixture_of_experts=True,
        length_scale=0.9,
        notes=(
            *CLOSED_LOOP,
            *RANDOM_LENGTHS,
            "Experts are split by tensor parallelism (moe_tp = TP, moe_ep = 1).",
            "kv_bytes_per_token counts the 18 layers of full attention; the 18 layers of sliding window "
            "hold 128 tokens a request at most and are left out.",
            "c is at its floor, the time to read that KV cache at peak bandwidth.",
            "Four spoilt runs are kept and outvoted: TP4 n = 16 and 32 and TP8 n = 8 cost more than the "
            "same at twice the n, TP8 n = 64 (1024/1024) more than with eight times the output. They are "
            "the worst residuals.",
            "At TP8 the power and the affine fit have about the same median; what speaks for the power is "
            "the run at n = 64 (1024/8192), which it meets within 1 % and the affine fit misses by 10 %.",
            "The table's rows of other vLLM versions are not used (those at n = 512 show far fewer running).",
        ),
    ),
    Recipe(
        name="h200-deepseek-r1-sglang",
        gpu=H200,
        model="deepseek-ai/DeepSeek-R1",
        precision="FP8 weights, BF16 KV cache",
        engine="SGLang",
        engine_version="0.5.9",
        date="2026-03-25",
        source=INFERENCEX,
        weight_bytes=671e9,
        kv_bytes_per_token=61 * 576 * 2,
        kv_heads=1,
        max_running=256,
        mixture_of_experts=True,
        length_scale=0.9,
        notes=(
            *CLOSED_LOOP,
            *RANDOM_LENGTHS,
            "TP8 only: FP8 weights need eight GPUs. Experts are split by tensor parallelism (moe_tp 8, "
            "moe_ep 1).",
            "Latent attention keeps one KV head, so each of the eight GPUs holds a copy of the cache: "
            "kv_bytes_per_token is one copy and the capacity is what fits into one GPU. max_running is the "
            "benchmark's own setting.",
            "c is at its floor, the time to read the KV cache at peak bandwidth; unbounded, the fit would "
            "give 0 (residuals then 1.2 % median, 2.5 % worst), against physics.",
        ),
        drafts=(MTP_OF_DEEPSEEK,),
    ),
    Recipe(
        name="h100-qwen3-235b-fp8-trtllm",
        gpu=H100,
        model="Qwen/Qwen3-235B-A22B-FP8",
        precision="FP8 weights, BF16 KV cache",
        engine="TensorRT-LLM",
        engine_version="1.0.0rc3",
        date="2026-08-21",
        source=AICONFIGURATOR,
        weight_bytes=236e9,
        kv_bytes_per_token=94 * 4 * 128 * 2 * 2,
        kv_heads=4,
        max_running=2048,
        mixture_of_experts=True,
        expert_parallel=True,
        notes=(
            *CLOSED_LOOP,
            "Date: publication; the source does not say when this was measured.",
            "Experts are split by expert parallelism (moe_ep = TP, moe_tp = 1).",
            "Four KV heads: at TP8 two GPUs hold the same head. kv_bytes_per_token is one copy.",
            "c is at its floor, the time to read the KV cache at peak bandwidth; contexts end at 1536 "
            "tokens.",
        ),
    ),
)

LLAMA = Recipe(
    name="a100-llama-7b",
    gpu=A100,
    model="LLaMA-7B",
    precision="FP16",
    engine="MuxServe's (a vLLM of early 2024)",
    engine_version="not stated",
    date="2024-06-04",
    source=MUXSERVE,
    weight_bytes=6.74e9 * 2,
    kv_bytes_per_token=32 * 32 * 128 * 2 * 2,
    kv_heads=32,
    max_running=None,
    notes=(
        "Decode steps measured alone, no prefill mixed in; KV length 32 to 512, so longer contexts are "
        "extrapolated.",
        "No CUDA graphs, by the look of it: at TP4 and TP8 launching the kernels takes 13 to 16 ms whatever"
        " the batch, until the work outgrows it. An engine with graphs has a lower floor.",
        "The A100's form factor is not stated; the bandwidth of the SXM part enters, as a lower bound of c "
        "only.",
        "prefill_tokens_per_s is the slope of prefill time over tokens, 256 to 16384 tokens.",
        "kv_capacity_tokens is computed, not measured: (0.9 memory - weights / TP - 2 GiB) / KV bytes, per "
        "GPU.",
        "max_running is the largest n measured.",
        "The table is not bundled; scripts/derive_profiles.py --muxserve FILE derives this profile from it "
        "again.",
    ),
)
MUXSERVE_RECIPES = {
    "llama-7b": LLAMA,
    "llama-13b": replace(
        LLAMA,
        name="a100-llama-13b",
        model="LLaMA-13B",
        weight_bytes=13.02e9 * 2,
        kv_bytes_per_token=40 * 40 * 128 * 2 * 2,
        kv_heads=40,
    ),
}


# ----------------------------------------------------------------------------------------------------------
# Serving benchmarks
# ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """Closed-loop runs at one TP degree, one entry a run; lengths in mean tokens."""

    n: Floats
    isl: Floats
    osl: Floats
    nominal: tuple[tuple[int, int], ...]
    tpot_s: Floats
    ttft_s: Floats

    @property
    def decoding_share(self) -> Floats:
        """Share of its life that a request spends decoding."""
        return self.osl * self.tpot_s / (self.osl * self.tpot_s + self.ttft_s)

    def select(self, keep: Iterable[bool]) -> "Runs":
        """The runs where ``keep`` is true."""
        at = np.flatnonzero(list(keep))
        columns = {name: getattr(self, name)[at] for name in ("n", "isl", "osl", "tpot_s", "ttft_s")}
        return Runs(nominal=tuple(self.nominal[i] for i in at), **columns)


def read_runs(recipe: Recipe) -> dict[int, Runs]:
    """The bundled runs of a recipe by TP degree, without those it leaves out."""
    table = pl.read_csv(CURVES / f"{recipe.name}.csv", infer_schema_length=None)
    table = table.filter(pl.col("osl") >= recipe.min_osl).sort("tp_size", "isl", "osl", "concurrency")
    runs: dict[int, Runs] = {}
    for (tp,), rows in table.group_by("tp_size", maintain_order=True):
        isl, osl = rows["isl"].to_list(), rows["osl"].to_list()
        all_runs = Runs(
            n=rows["concurrency"].to_numpy().astype(float),
            isl=np.array(isl) * recipe.length_scale,
            osl=np.array(osl) * recipe.length_scale,
            nominal=tuple(zip(isl, osl, strict=True)),
            tpot_s=rows["silicon_tpot_ms"].to_numpy() / 1e3,
            ttft_s=rows["silicon_ttft_ms"].to_numpy() / 1e3,
        )
        runs[int(float(str(tp)))] = all_runs.select(all_runs.decoding_share >= MIN_DECODING_SHARE)
    return runs


@dataclass(frozen=True)
class ClosedLoop:
    """The coefficients of one TP degree; ``c_s`` includes the share of the cache that a GPU holds."""

    a_s: float
    b_s: float
    p: float
    c_s: float
    d_s: float

    def tpot_s(self, runs: Runs) -> Floats:
        """The time per output token that the model of the module's docstring predicts."""
        share = runs.decoding_share
        decoding = share * runs.n
        step_s = self.a_s + self.b_s * decoding**self.p + self.c_s * decoding * (runs.isl + runs.osl / 2)
        return step_s + self.d_s * share * (runs.n - 1) * runs.isl / runs.osl

    def residuals(self, runs: Runs) -> Floats:
        """Predicted over measured, less one."""
        return self.tpot_s(runs) / runs.tpot_s - 1

    def step_time(self) -> StepTime:
        """The decode part as a step time."""
        return (
            Affine(self.a_s, self.b_s, self.c_s)
            if self.p == 1
            else Power(self.a_s, self.b_s, self.p, self.c_s)
        )


def fit_closed_loop(recipe: Recipe, runs: Mapping[int, Runs], *, concave: bool) -> dict[int, ClosedLoop]:
    """Fit all TP degrees together (they share c, and p unless experts are parallel); four digits each."""
    tps, k = list(runs), len(runs)
    kv_share = np.array([recipe.kv_share(tp) for tp in tps])

    def unpack(x: Floats) -> list[ClosedLoop]:
        p = np.broadcast_to(x[3 * k + 1 :] if concave else 1.0, k)
        columns = (x[:k], x[k : 2 * k], p, x[3 * k] * kv_share, x[2 * k : 3 * k])
        return [ClosedLoop(*map(float, row)) for row in zip(*columns, strict=True)]

    def residuals(x: Floats) -> Floats:
        return np.concatenate([fit.residuals(runs[tp]) for tp, fit in zip(tps, unpack(x), strict=True)])

    fastest = np.array([runs[tp].tpot_s.min() for tp in tps])
    c_floor = recipe.kv_read_s_per_token()
    powers = 0 if not concave else k if recipe.expert_parallel else 1
    start = np.concatenate(
        [0.7 * fastest, 0.01 * fastest, np.full(k, 2e-5), [1.5 * c_floor], np.full(powers, 0.6)]
    )
    lowest = np.concatenate([np.zeros(3 * k), [c_floor], np.full(powers, 0.05)])
    highest = np.concatenate([np.full(3 * k + 1, np.inf), np.full(powers, 0.999)])
    x = soft_l1(residuals, start, lowest, highest)
    return {
        tp: ClosedLoop(_round(fit.a_s), _round(fit.b_s), _round(fit.p), _round(fit.c_s), _round(fit.d_s))
        for tp, fit in zip(tps, unpack(x), strict=True)
    }


def serving_profile(recipe: Recipe) -> EngineProfile:
    """The profile of one serving benchmark."""
    runs = read_runs(recipe)
    fits = fit_closed_loop(recipe, runs, concave=recipe.mixture_of_experts)
    held_out = _held_out(recipe, runs)
    affine = fit_closed_loop(recipe, runs, concave=False) if recipe.mixture_of_experts else None
    shapes = {}
    for tp, fit in fits.items():
        capacity = recipe.kv_capacity_tokens(tp)
        if capacity < 1:
            print(f"{recipe.name}: TP{tp} left out: the weights leave no room for a KV cache")
            continue
        of = runs[tp]
        n_min, n_max = int(of.n.min()), int(of.n.max())
        text = (
            f"soft L1 over {len(of.n)} closed-loop runs, n {n_min}-{n_max}, "
            f"isl {_range(of.nominal, 0)}, osl {_range(of.nominal, 1)}: "
            f"relative residual {_quality(fit.residuals(of), of.n)}; "
            f"(isl, osl) held out: median {_percent(np.median(np.abs(held_out[tp])))}"
        )
        if affine:
            rest = np.abs(affine[tp].residuals(of))
            text += f"; affine instead: median {_percent(np.median(rest))}, worst {_percent(rest.max())}"
        shapes[tp] = ShapeProfile(
            tp=tp,
            step_time=fit.step_time(),
            prefill_tokens_per_s=_round(1 / fit.d_s),
            kv_capacity_tokens=capacity,
            max_running=min(recipe.max_running or n_max, 2 * n_max),
            drafts=recipe.drafts,
            fit=f"{text}; prefill from the same fit; n < {n_min} and n > {n_max} extrapolated",
        )
    return _profile(recipe, shapes, (recipe.source,))


def _held_out(recipe: Recipe, runs: Mapping[int, Runs]) -> dict[int, Floats]:
    """Residuals of each (isl, osl) under a fit to all the others."""
    residuals: dict[int, list[Floats]] = {tp: [] for tp in runs}
    for pair in sorted({pair for of in runs.values() for pair in of.nominal}):
        rest = {tp: of.select(other != pair for other in of.nominal) for tp, of in runs.items()}
        fits = fit_closed_loop(recipe, rest, concave=recipe.mixture_of_experts)
        for tp, of in runs.items():
            residuals[tp].append(fits[tp].residuals(of.select(other == pair for other in of.nominal)))
    return {tp: np.concatenate(parts) for tp, parts in residuals.items()}


# ----------------------------------------------------------------------------------------------------------
# The decode grid of MuxServe
# ----------------------------------------------------------------------------------------------------------


def read_muxserve(path: Path) -> pl.DataFrame:
    """The grid on whole GPUs (100 % of the SMs): model, tp, batch, kv_len, prefill_ms, decode_ms, sorted."""
    columns = ["model", "tp", "batch", "kv_len", "prefill_ms", "decode_ms"]
    if path.suffix == ".csv":
        table = pl.read_csv(path).filter(pl.col("sm_pct") == 100).select(columns)
    else:
        rows = [
            (model, int(tp), int(batch), int(length), float(cost["prefill"]), float(cost["decoding"]))
            for model, by_tp in json.loads(path.read_text(encoding="utf-8")).items()
            for tp, by_sms in by_tp.items()
            for batch, by_length in by_sms.get("100", {}).items()
            for length, cost in by_length.items()
        ]
        table = pl.DataFrame(rows, schema=columns, orient="row")
    # -1 stands for "out of memory".
    return table.filter(pl.col("decode_ms") > 0).sort(columns)


def fit_decode_grid(recipe: Recipe, tp: int, n: Floats, kv: Floats, seconds: Floats) -> MaxAffine:
    """The larger of two affine functions; the second pays at least for reading the KV cache.

    Given which rows lie on which piece, the fit is convex: fit both, move the rows, until none moves. From
    several first kinks the best end point is taken, and polished with the rows free.
    """
    c_floor = recipe.kv_read_s_per_token() * recipe.kv_share(tp)

    def pieces(x: Floats) -> tuple[Floats, Floats]:
        return x[0] + x[1] * n + x[2] * kv, x[3] + x[4] * n + x[5] * kv

    def residuals(x: Floats) -> Floats:
        predicted: Floats = np.maximum(*pieces(x))
        return predicted / seconds - 1

    fits = []
    for kink in (16, 64, 256):
        floor, tried = n <= kink, set()
        while floor.tobytes() not in tried and 3 <= floor.sum() <= len(n) - 3:
            tried.add(floor.tobytes())
            low = fit_affine(n[floor], kv[floor], seconds[floor])
            high = fit_affine(n[~floor], kv[~floor], seconds[~floor], c_floor)
            fits.append(np.concatenate([low, high]))
            on_floor, beyond = pieces(fits[-1])
            floor = on_floor >= beyond
    best = min(fits, key=lambda x: _soft_l1_cost(residuals(x)))
    polished = soft_l1(residuals, best, np.array([0, 0, 0, 0, 0, c_floor]), np.full(6, np.inf))
    a, b, c, a_2, b_2, c_2 = (_round(x) for x in polished)
    return MaxAffine(((a, b, c), (a_2, b_2, c_2)))


def decode_profile(recipe: Recipe, table: pl.DataFrame) -> EngineProfile:
    """The profile of one model of the grid."""
    digest = hashlib.sha256(table.write_csv().encode()).hexdigest()
    shapes = {}
    for (tp_value,), rows in table.group_by("tp", maintain_order=True):
        tp = int(str(tp_value))
        n = rows["batch"].to_numpy().astype(float)
        kv = n * rows["kv_len"].to_numpy()
        seconds = rows["decode_ms"].to_numpy() / 1e3
        step_time = fit_decode_grid(recipe, tp, n, kv, seconds)
        residuals = step_time(n, kv) / seconds - 1
        x = fit_affine(n, kv, seconds)
        affine = np.abs((x[0] + x[1] * n + x[2] * kv) / seconds - 1)
        ran = rows.filter(pl.col("prefill_ms") > 0)
        tokens = (ran["batch"] * ran["kv_len"]).to_numpy().astype(float)
        measured = (tokens >= 256) & (tokens <= 16384)
        prefill = fit_affine(
            tokens[measured], 0 * tokens[measured], ran["prefill_ms"].to_numpy()[measured] / 1e3
        )
        n_max = int(n.max())
        lengths = rows["kv_len"].to_list()
        shapes[tp] = ShapeProfile(
            tp=tp,
            step_time=step_time,
            prefill_tokens_per_s=_round(1 / prefill[1]),
            kv_capacity_tokens=recipe.kv_capacity_tokens(tp),
            max_running=min(recipe.max_running or n_max, n_max),
            fit=(
                f"soft L1 over {len(n)} decode steps, n {int(n.min())}-{n_max}, KV length {min(lengths)}-"
                f"{max(lengths)}: relative residual {_quality(residuals, n)}; affine instead: median "
                f"{_percent(np.median(affine))}, worst {_percent(affine.max())}; prefill: slope over "
                f"{int(measured.sum())} prefills"
            ),
        )
    return _profile(recipe, shapes, (recipe.source, f"the rows used, as CSV: sha256 {digest}"))


def fit_affine(n: Floats, kv: Floats, seconds: Floats, c_floor: float = 0.0) -> Floats:
    """a, b >= 0 and c >= c_floor of ``seconds = a + b n + c kv``."""
    start = np.array([0.7 * seconds.min(), 0.5 * seconds.max() / n.max(), 2e-8 + c_floor])
    return soft_l1(
        lambda x: (x[0] + x[1] * n + x[2] * kv) / seconds - 1,
        start,
        np.array([0, 0, c_floor]),
        np.full(3, np.inf),
    )


# ----------------------------------------------------------------------------------------------------------
# Shared
# ----------------------------------------------------------------------------------------------------------


def soft_l1(residuals: Callable[[Floats], Floats], start: Floats, lowest: Floats, highest: Floats) -> Floats:
    """Minimise the soft L1 norm of ``residuals`` within bounds: quadratic to 2 %, linear beyond."""
    inside = np.clip(start, lowest, highest)
    fit = least_squares(
        residuals, inside, bounds=(lowest, highest), loss="soft_l1", f_scale=0.02, x_scale="jac",
        ftol=1e-12, xtol=1e-12, gtol=1e-12, max_nfev=10_000,
    )  # fmt: skip
    if not fit.success:
        raise RuntimeError(f"the fit did not converge: {fit.message}")
    return np.asarray(fit.x, dtype=np.float64)


def _soft_l1_cost(residuals: Floats) -> float:
    return float(np.sum(np.sqrt(1 + (residuals / 0.02) ** 2) - 1))


def _profile(recipe: Recipe, shapes: Mapping[int, ShapeProfile], sources: tuple[str, ...]) -> EngineProfile:
    return EngineProfile(
        name=recipe.name,
        hardware=recipe.gpu.name,
        model=recipe.model,
        precision=recipe.precision,
        engine=recipe.engine,
        engine_version=recipe.engine_version,
        date=recipe.date,
        sources=sources,
        licence="Apache-2.0",
        kv_bytes_per_token=recipe.kv_bytes_per_token,
        shapes=shapes,
        notes="\n".join(recipe.notes),
    )


def _round(value: float) -> float:
    """Four significant digits; what the solver leaves of a coefficient at its bound of zero is zero."""
    return float(f"{value:.4g}") if value > 1e-11 else 0.0


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _quality(residuals: Floats, n: Floats) -> str:
    few = residuals[n <= 8]
    return (
        f"median {_percent(np.median(np.abs(residuals)))}, worst {_percent(np.abs(residuals).max())}, "
        f"n <= 8: mean {100 * few.mean():+.1f} %, worst {_percent(np.abs(few).max())}"
    )


def _range(pairs: Iterable[tuple[int, int]], which: int) -> str:
    values = [pair[which] for pair in pairs]
    return f"{min(values)}-{max(values)}"


def table() -> str:
    """All bundled profiles as a Markdown table, from the profiles themselves."""
    lines = [
        "| engine | TP | step time τ(n, K) | prefill tokens/s | KV tokens | max running | fit |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in bundled_engines():
        for shape in load_engine(name).shapes.values():
            cells = (name, shape.tp, shape.step_time, f"{shape.prefill_tokens_per_s:.0f}",
                     shape.kv_capacity_tokens, shape.max_running, shape.fit)  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


BEGIN, END = "<!-- begin table -->\n", "<!-- end table -->\n"


def with_table(page: str) -> str:
    """``page`` with what stands between its table marks replaced."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + table() + END + rest.split(END)[1]


def main(arguments: list[str] | None = None) -> int:
    """Run the script; the exit code."""
    parser = argparse.ArgumentParser(description="Derive the bundled engine profiles from measured runs.")
    parser.add_argument(
        "--muxserve", type=Path, metavar="FILE", help="derive the A100 profiles too, from this table"
    )
    parser.add_argument("--out", type=Path, default=PROFILES, metavar="FOLDER", help="where the profiles go")
    parser.add_argument("--table", action="store_true", help="only rewrite the table of docs/engines.md")
    options = parser.parse_args(arguments)
    if options.table:
        DOCS.write_text(with_table(DOCS.read_text(encoding="utf-8")), encoding="utf-8")
        return 0
    profiles = [serving_profile(recipe) for recipe in RECIPES]
    if options.muxserve:
        grid = read_muxserve(options.muxserve)
        for model, recipe in MUXSERVE_RECIPES.items():
            profiles.append(decode_profile(recipe, grid.filter(pl.col("model") == model)))
    for profile in profiles:
        write_profile(profile, options.out / f"{profile.name}.toml")
        for tp, shape in profile.shapes.items():
            print(f"{profile.name} TP{tp}: {shape.step_time}\n    {shape.fit}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (InputError, OSError) as error:
        sys.exit(f"error: {error}")
