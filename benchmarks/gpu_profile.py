"""An engine profile of this machine's GPU in under ten minutes, and three policies replayed on it.

    python benchmarks/gpu_profile.py --out mine.toml

Needs PyTorch, transformers and this repository with its dependencies, no engine and no download: a Llama of
8B shape with random bf16 weights decodes in a minimal engine, below. Its decode step is one CUDA graph per
batch size (padded to powers of two) and context (padded to multiples of ``PAGE``), so a step costs what the
*longest* context in the batch costs for every request; prompts are computed one at a time, whole. It
measures tau(n, K) and the prefill rate by the experiment of ``tailopt profile``, fits them, writes the
profile, and then carries out plans of three policies: the fleet's engines are run one after the other on
the one GPU, which is as good as side by side, as they share nothing. What comes out is the speed of *this*
engine on this machine: an upper bound of the times that vLLM would show, and a check that plans and
predictions hold on real hardware.

Without CUDA it runs a tiny shape on the CPU, to be tried out.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tailopt.engine.catalogue import write_profile
from tailopt.engine.profile import EngineProfile, ShapeProfile
from tailopt.engine.step_time import Affine
from tailopt.plan import Fleet, Plan, View
from tailopt.policies import resolve_policy
from tailopt.replay.fit import Steps
from tailopt.replay.profile import profile
from tailopt.simulate import simulate
from tailopt.trace import Trace

PAGE = 512
POLICIES = ("uniform", "lpt", "best_k")
SHAPES = {
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "tiny": (256, 1024, 4, 4, 2, 2048),
}
"""Hidden size, MLP size, layers, heads, KV heads, vocabulary: those of Llama-3.1-8B, and something to try."""


class Model:
    """Llama's decoder with random weights and one KV cache row per place in the batch."""

    def __init__(self, shape: str, device: torch.device, rows: int, most_tokens: int) -> None:
        from transformers import LlamaConfig

        hidden, mlp, layers, heads, kv_heads, vocabulary = SHAPES[shape]
        self.config = LlamaConfig(
            hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
            num_key_value_heads=kv_heads, vocab_size=vocabulary, max_position_embeddings=most_tokens,
        )  # fmt: skip
        self.device, self.rows = device, rows
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.kv_heads, self.group = kv_heads, heads // kv_heads
        self.size = hidden // heads
        generator = torch.Generator(device).manual_seed(0)

        def weight(*of: int) -> Tensor:
            made = torch.empty(*of, device=device, dtype=self.dtype)
            return made.normal_(0, of[-1] ** -0.5, generator=generator)

        width = (heads + 2 * kv_heads) * self.size
        self.embedding, self.head = weight(vocabulary, hidden), weight(vocabulary, hidden)
        self.layers = [
            (weight(width, hidden), weight(hidden, hidden), weight(2 * mlp, hidden), weight(hidden, mlp))
            for _ in range(layers)
        ]
        self.cache = torch.zeros(
            layers, 2, rows, kv_heads, most_tokens, self.size, device=device, dtype=self.dtype
        )
        half = torch.arange(0, self.size, 2, device=device, dtype=torch.float32) / self.size
        angle = torch.arange(most_tokens, device=device)[:, None] * 500_000.0**-half
        self.cos, self.sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotary embedding; ``x`` is ``[tokens, heads, size]``."""
        cos, sin = self.cos[position][:, None], self.sin[position][:, None]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def project(self, x: Tensor, weights: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each ``[tokens, heads, size]``."""
        all_heads = functional.linear(norm(x), weights).view(len(x), -1, self.size)
        q, k, v = all_heads.split([self.kv_heads * self.group, self.kv_heads, self.kv_heads], dim=1)
        return self.rotate(q, position), self.rotate(k, position), v

    def rest(self, x: Tensor, attended: Tensor, out: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """What follows attention in a layer."""
        x = x + functional.linear(attended.reshape(len(x), -1), out)
        gate, value = functional.linear(norm(x), up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * value, down)

    def decode(self, token: Tensor, position: Tensor, context: int) -> Tensor:
        """The next token of rows 0 .. n - 1, whose last token is ``token`` at ``position`` < ``context``."""
        n = len(token)
        row = torch.arange(n, device=self.device)
        x = self.embedding[token]
        seen = torch.arange(context, device=self.device)[None] <= position[:, None]
        hidden = torch.where(seen, 0.0, float("-inf"))[:, None, None]
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = self.project(x, qkv, position)
            keys, values = self.cache[layer]
            keys[row, :, position], values[row, :, position] = k, v
            grouped = q.view(n, self.kv_heads, self.group, self.size)
            score = grouped @ keys[:n, :, :context].transpose(-1, -2) * self.size**-0.5
            share = torch.softmax(score.float() + hidden, dim=-1).to(self.dtype)
            x = self.rest(x, share @ values[:n, :, :context], out, up, down)
        return functional.linear(norm(x), self.head).argmax(-1)

    def prefill(self, row: int, tokens: Tensor) -> Tensor:
        """Compute a prompt into a row; the token after it."""
        position = torch.arange(len(tokens), device=self.device)
        x = self.embedding[tokens]
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            q, k, v = self.project(x, qkv, position)
            q, k, v = (part.transpose(0, 1) for part in (q, k, v))
            self.cache[layer, 0, row, :, : len(tokens)] = k
            self.cache[layer, 1, row, :, : len(tokens)] = v
            k, v = (part.repeat_interleave(self.group, dim=0) for part in (k, v))
            attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)
            x = self.rest(x, attended[0].transpose(0, 1), out, up, down)
        return functional.linear(norm(x[-1:]), self.head).argmax(-1)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy a row of the cache, so that the batch stays without gaps."""
        self.cache[:, :, target, :, :tokens] = self.cache[:, :, source, :, :tokens]


def norm(x: Tensor) -> Tensor:
    """RMS norm without weights, which do not change the time."""
    return functional.rms_norm(x, x.shape[-1:], eps=1e-5)


@dataclass
class Running:
    """A request in the batch; its place in the list is its row."""

    request: int
    tokens: int  # in the cache, and one more that is to be computed
    left: int


class Engine:
    """Continuous batching, first come first served: a prompt if there is room, else a step of all."""

    def __init__(self, model: Model, seed: int = 0) -> None:
        self.model, self.rng = model, np.random.default_rng(seed)
        device, rows = model.device, model.rows
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def decode(self, n: int, context: int) -> None:
        """One step of rows 0 .. n - 1, padded in both; the tokens are where they were taken from."""
        n = min(1 << (n - 1).bit_length(), self.model.rows)
        context = min(-(-context // PAGE) * PAGE, self.model.cache.shape[4])
        if self.model.device.type != "cuda":
            self.token[:n] = self.model.decode(self.token[:n], self.position[:n], context)
            return
        if (n, context) not in self.graphs:
            self.graphs[n, context] = self.capture(n, context)
        graph, out = self.graphs[n, context]
        graph.replay()
        self.token[:n] = out

    def capture(self, n: int, context: int) -> "tuple[torch.cuda.CUDAGraph, Tensor]":
        """A CUDA graph of such a step."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.model.decode(self.token[:n], self.position[:n], context)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.model.decode(self.token[:n], self.position[:n], context)
        return graph, out

    def warm(self) -> None:
        """Make all graphs before anything is timed."""
        rows = sorted({min(1 << k, self.model.rows) for k in range(self.model.rows.bit_length() + 1)})
        for n in rows:
            for context in range(PAGE, self.model.cache.shape[4] + 1, PAGE):
                self.decode(n, context)

    def run(self, requests: Sequence[tuple[int, int]], most: int) -> tuple[Steps, np.ndarray]:
        """All steps, and when each request was done, for (prompt tokens, output tokens) in this order."""
        waiting, batch = list(range(len(requests))), list[Running]()
        rows: list[tuple[float, ...]] = []
        finish = np.zeros(len(requests))
        self.wait()
        began_s = last_s = time.perf_counter()
        while waiting or batch:
            if waiting and len(batch) < most:
                one = waiting.pop(0)
                prompt, want = requests[one]
                ids = torch.from_numpy(self.rng.integers(4, self.model.config.vocab_size, prompt))
                self.token[len(batch)] = self.model.prefill(len(batch), ids.to(self.model.device))[0]
                batch.append(Running(one, prompt, want - 1))
                facts = (1, prompt + 1, prompt - 1)
            else:
                self.position[: len(batch)] = torch.tensor(
                    [r.tokens for r in batch], device=self.model.device
                )
                self.decode(len(batch), max(r.tokens for r in batch) + 1)
                for r in batch:
                    r.tokens, r.left = r.tokens + 1, r.left - 1
                facts = (len(batch), sum(r.tokens for r in batch) + len(batch), 0)
            self.wait()
            now_s = time.perf_counter()
            rows.append((*facts, now_s - last_s))
            last_s = now_s
            for row in range(len(batch) - 1, -1, -1):
                if batch[row].left == 0:
                    finish[batch[row].request] = now_s - began_s
                    self.close(batch, row)
        n, kv, prefill, seconds = (np.array(column) for column in zip(*rows, strict=True))
        return Steps.of(n, kv, prefill, seconds), finish

    def close(self, batch: list[Running], row: int) -> None:
        """Fill the gap with the last row."""
        last = batch.pop()
        if row < len(batch):
            self.model.move(len(batch), row, last.tokens)
            self.token[row] = self.token[len(batch)].clone()
            batch[row] = last

    def wait(self) -> None:
        """Until the device is done."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()


class Bench:
    """The engine as :mod:`tailopt.replay.profile` measures it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def measure(self, requests: Sequence[tuple[int, int]]) -> Steps:
        return self.engine.run(requests, self.engine.model.rows)[0]

    def resubmit(self, context: int) -> float:
        steps = self.measure([(context, 1)])
        return float(steps.seconds.sum())

    def switch(self) -> tuple[float, float]:
        return 0.0, 0.0


def replay(
    engine: Engine, fleet: Fleet, trace: Trace, plan: Plan, most: int
) -> tuple[float, Sequence[float]]:
    """Measured makespan and the time of each engine, which are run one after the other."""
    ends = []
    for number in range(len(fleet.engines)):
        mine = [one for one in plan.order.tolist() if plan.engine_of[one] == number]
        requests = [(int(trace.context_tokens[one]), int(trace.output_tokens[one])) for one in mine]
        ends.append(float(engine.run(requests, most)[1].max()) if mine else 0.0)
    return max(ends), ends


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    cuda = torch.cuda.is_available()
    parser.add_argument("--out", type=Path, required=True, help="the engine profile, TOML")
    parser.add_argument("--json", type=Path, help="predicted and measured makespans")
    parser.add_argument("--shape", choices=SHAPES, default="8b" if cuda else "tiny")
    parser.add_argument("--rows", type=int, default=64 if cuda else 16, help="requests at once")
    parser.add_argument("--tokens", type=int, default=4096 if cuda else 512, help="of a request at most")
    parser.add_argument("--seconds", type=float, default=150.0 if cuda else 20.0, help="to measure steps")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--requests", type=int, default=96 if cuda else 24)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    name = torch.cuda.get_device_name() if cuda else f"CPU, {platform.processor() or platform.machine()}"
    with torch.inference_mode():
        model = Model(args.shape, device, args.rows, args.tokens)
        engine = Engine(model, args.seed)
        print(f"{name}: {args.shape} shape, {model.dtype}, torch {torch.__version__}", file=sys.stderr)
        engine.warm()
        limits = ShapeProfile(
            tp=1,
            step_time=Affine(1e-2, 1e-4),
            prefill_tokens_per_s=1e3,
            kv_capacity_tokens=args.rows * args.tokens,
            max_running=args.rows,
            token_budget=max(args.tokens, args.rows),
            block_tokens=1,
            prefix_caching=False,
        )
        found = profile(
            Bench(engine), limits, args.tokens, seconds=args.seconds, seed=args.seed, switch=False,
            progress=lambda what, share: print(f"\r{share:4.0%} {what:60}", end="", file=sys.stderr),
        )  # fmt: skip
        print(file=sys.stderr)
        measured = EngineProfile(
            name=args.out.stem,
            hardware=name,
            model=f"Llama of {args.shape} shape, random weights",
            precision=str(model.dtype).removeprefix("torch."),
            engine="benchmarks/gpu_profile.py",
            engine_version=f"torch {torch.__version__}",
            date=date.today().isoformat(),
            sources=(f"measured by benchmarks/gpu_profile.py on {name}",),
            licence="own measurement",
            kv_bytes_per_token=2 * model.config.num_hidden_layers * model.kv_heads * model.size
            * model.cache.element_size(),
            shapes={1: found.shape(limits)},
            notes="A minimal engine: batches padded to powers of two, contexts to the longest in the batch.",
        )  # fmt: skip
        write_profile(measured, args.out)
        print(found.fit)
        print(found.remark())

        rng = np.random.default_rng(args.seed)
        most = args.tokens // 2
        lengths = np.clip(rng.lognormal(np.log(most / 8), 1.0, args.requests), 2, most - 1).astype(int)
        trace = Trace.of([[int(one)] for one in lengths], prompt_tokens=min(64, most // 4))
        fleet = Fleet.of(measured, f"{args.engines}xTP1")
        view = View.at_start(trace, fleet, trace.output_tokens, seed=args.seed)
        rows = []
        for policy in POLICIES:
            plan = resolve_policy(policy)(replace(view))
            predicted = simulate(trace, fleet, plan).makespan_s
            seconds, ends = replay(engine, fleet, trace, plan, fleet.max_running(0))
            rows.append(
                {"policy": policy, "predicted_s": predicted, "measured_s": seconds, "engines_s": ends}
            )
            print(
                f"{policy:10} predicted {predicted:8.3f} s, measured {seconds:8.3f} s, "
                f"{seconds / predicted - 1:+.1%}"
            )
    if args.json is not None:
        facts = {"machine": name, "torch": torch.__version__, "shape": args.shape, "seed": args.seed}
        args.json.write_text(json.dumps({**facts, "policies": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
