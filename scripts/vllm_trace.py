"""What vLLM's own V1 scheduler does with given requests, step by step, without a model.

Runs in the environment that ``scripts/install_vllm_cpu.sh`` makes; needs nothing of tailopt. A file
may end in .gz; - is standard input or output.

    VENV/bin/python scripts/vllm_trace.py scenarios.json schedules.json

**In:** a list of scenarios, ``{"engine": {...}, "requests": [{...}]}``. The engine: ``blocks``
(``num_gpu_blocks``), ``block_tokens``, ``max_running`` (``max_num_seqs``), ``token_budget``
(``max_num_batched_tokens``), ``policy``, ``prefix_caching``, ``chunked_prefill``, ``long_prefill_tokens``,
``reserve_full_prompt``, ``watermark``. A request: ``number``; ``prompt``, its token ids as ranges
``[[start, count], ...]``; ``output``, how many tokens it generates, which are ``next``, ``next + 1``, ...;
``priority`` and ``arrival``; ``at``, the step before which it is added; ``abort``, the step before which it
is aborted, or null; and ``again``: null, or ``[step, number]``: if the abort found it unfinished, it is
submitted again before that step, under that number, with what it generated appended to its prompt and the
rest still to be generated. Before a step, aborts come first, then additions, each in the order given,
resubmissions last.

**Out:** ``{"vllm": version, "scenarios": [...]}``, and with each scenario its ``steps``: ``chunks``, the
scheduled requests as ``[number, computed before, tokens]`` in scheduling order; ``preempted`` and
``finished`` (sorted); ``running`` and ``waiting``, in order, at the end of the step; ``free``, the number
of free blocks after scheduling and at the end of the step; ``queue``, a checksum of the free block queue at
the end of the step, block by block. Of a block, its contents go into the checksum (:func:`content`), or 0
if they cannot be found by prefix caching. A scenario is cut off after ``MAX_STEPS`` steps.
"""

import gzip
import itertools
import json
import os
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

os.environ.update(
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 64,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "float32",
}
MAX_STEPS = 2000


def content(tokens: list[int], previous: int) -> int:
    """The checksum that stands for a full block: of its tokens and, through ``previous``, all before it."""
    return zlib.crc32(",".join(map(str, tokens)).encode(), previous)


def scheduler(engine: dict[str, Any], model: str) -> Scheduler:
    """A fresh scheduler of vLLM with these limits."""
    context = max(engine["token_budget"], engine["blocks"] * engine["block_tokens"])
    if not engine["chunked_prefill"]:
        context = engine["token_budget"]  # vLLM's own condition: without chunks, a context fits into one step
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, dtype="float32", seed=0, skip_tokenizer_init=True, max_model_len=context
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=engine["max_running"],
            max_num_batched_tokens=engine["token_budget"],
            max_model_len=context,
            enable_chunked_prefill=engine["chunked_prefill"],
            long_prefill_token_threshold=engine["long_prefill_tokens"],
            scheduler_reserve_full_isl=engine["reserve_full_prompt"],
            watermark=engine["watermark"],
            policy=engine["policy"],
            async_scheduling=False,
            is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(
            block_size=engine["block_tokens"],
            cache_dtype="auto",
            enable_prefix_caching=engine["prefix_caching"],
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = engine["blocks"]
    spec = FullAttentionSpec(
        block_size=engine["block_tokens"], num_kv_heads=1, head_size=16, dtype=torch.float32
    )
    blocks = KVCacheConfig(
        num_blocks=engine["blocks"],
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=blocks,
        structured_output_manager=StructuredOutputManager(config),
        block_size=engine["block_tokens"],
    )


class Drive:
    """One scenario: vLLM's scheduler in place of an engine, and the tokens that a model would sample."""

    def __init__(self, scenario: dict[str, Any], model: str) -> None:
        self.block_tokens: int = scenario["engine"]["block_tokens"]
        self.scheduler = scheduler(scenario["engine"], model)
        self.hasher = get_request_block_hasher(self.block_tokens, sha256)
        self.next_token: dict[str, int] = {}
        self.contents: dict[bytes, int] = {}  # of every block hash seen, its checksum
        self.checksums: dict[str, list[int]] = {}
        self.to_add = sorted(scenario["requests"], key=lambda request: request["at"])
        self.to_abort = sorted(
            (request for request in scenario["requests"] if request["abort"] is not None),
            key=lambda request: request["abort"],
        )
        self.again: list[tuple[int, dict[str, Any], list[int]]] = []

    def add(self, request: dict[str, Any], prompt: list[int], output: int, next_token: int) -> None:
        """Submit a request; numbers become names that sort alike."""
        name = f"{request['number']:08d}"
        self.next_token[name] = next_token
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=output, min_tokens=output, ignore_eos=True),
                pooling_params=None,
                arrival_time=request["arrival"],
                priority=request["priority"],
                block_hasher=self.hasher,
            )
        )
        self.checksums[name] = []
        self.note_contents(name)

    def abort(self, request: dict[str, Any]) -> None:
        """Abort a request if it is still there, and note it for resubmission."""
        name = f"{request['number']:08d}"
        here = self.scheduler.requests.get(name)
        if here is None:
            return
        if request["again"] is not None:
            step, number = request["again"]
            tokens = list(here.all_token_ids)
            output = request["output"] - here.num_output_tokens
            self.again.append((step, {**request, "number": number, "output": output}, tokens))
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def note_contents(self, name: str) -> None:
        """Extend the checksums of a request's full blocks, beside vLLM's hashes of them."""
        request, sums = self.scheduler.requests[name], self.checksums[name]
        for index in range(len(sums), len(request.block_hashes)):
            block = list(request.all_token_ids[index * self.block_tokens : (index + 1) * self.block_tokens])
            sums.append(content(block, sums[-1] if sums else 0))
            self.contents[request.block_hashes[index]] = sums[-1]

    def before(self, step: int) -> None:
        """Aborts, then additions, then resubmissions due before this step."""
        while self.to_abort and self.to_abort[0]["abort"] == step:
            self.abort(self.to_abort.pop(0))
        while self.to_add and self.to_add[0]["at"] == step:
            request = self.to_add.pop(0)
            prompt = [*itertools.chain(*(range(start, start + count) for start, count in request["prompt"]))]
            self.add(request, prompt, request["output"], request["next"])
        due = [entry for entry in self.again if entry[0] == step]
        self.again = [entry for entry in self.again if entry[0] != step]
        for _, request, tokens in due:
            generated = len(tokens) - sum(count for _, count in request["prompt"])
            self.add(request, tokens, request["output"], request["next"] + generated)

    def step(self) -> dict[str, Any]:
        """One step of the engine."""
        engine, pool = self.scheduler, self.scheduler.kv_cache_manager.block_pool
        planned = engine.schedule()
        free = pool.get_num_free_blocks()
        names = list(planned.num_scheduled_tokens)
        chunks, sampled = [], []
        for name in names:
            request, tokens = engine.requests[name], planned.num_scheduled_tokens[name]
            chunks.append([int(name), request.num_computed_tokens - tokens, tokens])
            complete = request.num_computed_tokens == request.num_tokens
            sampled.append([self.next_token[name]] if complete else [])
            self.next_token[name] += complete
        before = set(engine.requests)
        engine.update_from_output(
            planned,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        for name in names:
            if name in engine.requests:
                self.note_contents(name)
        queue = [
            0 if block.block_hash is None else self.contents[get_block_hash(block.block_hash)]
            for block in pool.free_block_queue.get_all_free_blocks()
        ]
        return {
            "chunks": chunks,
            "preempted": sorted(int(name) for name in planned.preempted_req_ids or ()),
            "finished": sorted(int(name) for name in before - set(engine.requests)),
            "running": [int(request.request_id) for request in engine.running],
            "waiting": [int(request.request_id) for request in engine.waiting],
            "free": [free, pool.get_num_free_blocks()],
            "queue": zlib.crc32(",".join(map(str, queue)).encode()),
        }

    def run(self) -> list[dict[str, Any]]:
        """All steps, ``MAX_STEPS`` at most: in a full cache two requests can preempt each other for ever."""
        steps: list[dict[str, Any]] = []
        while len(steps) < MAX_STEPS and (
            self.to_add or self.again or self.scheduler.has_unfinished_requests()
        ):
            self.before(len(steps))
            steps.append(self.step())
        return steps


def main(source: str, target: str) -> None:
    """Read scenarios, write what vLLM did."""
    data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    scenarios = json.loads(gzip.decompress(data) if source.endswith(".gz") else data)
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(MODEL))
        done = [{**scenario, "steps": Drive(scenario, model).run()} for scenario in scenarios]
    import vllm

    text = json.dumps({"vllm": vllm.__version__, "scenarios": done}, separators=(",", ":")).encode()
    if target == "-":
        sys.stdout.buffer.write(text)
        return
    partial = Path(f"{target}.partial")
    partial.write_bytes(gzip.compress(text, 9, mtime=0) if target.endswith(".gz") else text)
    partial.replace(target)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit("usage: vllm_trace.py SCENARIOS SCHEDULES")
    main(sys.argv[1], sys.argv[2])
