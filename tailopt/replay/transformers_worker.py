"""An engine of transformers' own continuous batching: ``PYTHON -P transformers_worker.py CONFIG``.

As :mod:`tailopt.replay.worker`, with another engine; it needs torch and transformers, and nothing of tailopt.
Who runs, the paged KV cache, splitting of prompts, what gives way when the cache is full, shared prefixes and
sampling are transformers' (``transformers.generation.continuous_batching``; tried with 5.19). Its generation
loop runs in a thread and tells nothing of its steps; here the three calls that make up a step are made one by
one, so that commands are obeyed between steps and each step is told.

How it differs from vLLM: a request that is preempted loses its place and starts from the tokens it has when
there is room again; nobody new is admitted until somebody has finished; and without flash attention a step
attends to the contexts of all requests at once, masked, so that it costs the product of tokens and contexts.
"""

import importlib.util
import json
import queue
import sys
from collections import deque
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class Transformers:
    """One engine in this process."""

    def __init__(self, config: Message) -> None:
        import torch
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.generation.continuous_batching.requests import RequestState

        self.cuda = torch.cuda.is_available()
        if config.get("threads"):
            torch.set_num_threads(config["threads"])
        self.torch, self.seed = torch, int(config.get("seed", 0)) % (1 << 15)
        torch.manual_seed(self.seed)
        kind = {"dtype": getattr(torch, config.get("dtype", "float32")), "attn_implementation": "sdpa"}
        if config.get("load_format", "dummy") == "dummy":
            shape = AutoConfig.from_pretrained(config["model"])
            model = AutoModelForCausalLM.from_config(shape, **kind)
        else:
            model = AutoModelForCausalLM.from_pretrained(config["model"], **kind)
        self.model = model.to("cuda" if self.cuda else "cpu").eval()
        temperature = float(config.get("temperature", 0.0))
        self.sampled = temperature > 0
        sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if self.sampled else {}
        manager = self.model.init_continuous_batching(
            GenerationConfig(do_sample=self.sampled, eos_token_id=-1, **sampling),
            ContinuousBatchingConfig(
                page_size=config["block_tokens"],
                num_blocks=config["blocks"],
                max_batch_tokens=config["token_budget"],
                max_requests_per_batch=config["max_running"],
                allow_block_sharing=config["prefix_caching"],
                use_async_batching=False,
                safety_margin=0.0,  # admit as long as there are blocks, as the profile says
                seed=self.seed,
                auto_switch_to_flash=self.cuda,
            ),
        )
        self.processor = manager.batch_processor = manager._create_batch_processor()
        self.scheduler, self.cache = self.processor.scheduler, self.processor.cache
        self.state = RequestState
        self.blocks: int = config["blocks"]
        self.block_tokens: int = config["block_tokens"]
        self.longest: int = config["max_model_len"]
        self.most_running: int = config["max_running"]
        self.running = self.most_running
        self.by_priority = config.get("scheduling", "fcfs") == "priority"
        self.stop: list[int] | None = config.get("stop")
        self.want: dict[int, int] = {}
        self.made: dict[int, int] = {}
        self.priority: dict[int, int] = {}
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        self.batch: list[Any] = []
        self._schedule = self.scheduler.schedule_batch
        self.scheduler.schedule_batch = self._watched

    def about(self) -> Message:
        """Versions and limits."""
        return {
            "versions": self.versions,
            "device": "cuda" if self.cuda else "cpu",
            "blocks": self.blocks,
            "block_tokens": self.block_tokens,
            "max_running": self.most_running,
            "token_budget": self.processor.max_batch_tokens,
        }

    def submit(self, key: int, prompt: list[int], want: int, priority: int) -> None:
        """Queue a request of exactly so many tokens, or of at most so many if it may end by itself."""
        if not prompt or len(prompt) + want > self.longest:
            raise ValueError(f"{len(prompt)} + {want} tokens, expected 1 to {self.longest}")
        self.want[key], self.made[key], self.priority[key] = want, 0, priority
        self.scheduler.add_waiting_request(
            self.state(
                request_id=str(key),
                initial_tokens=list(prompt),
                max_new_tokens=want,
                eos_token_id=self.stop or -1,
            )
        )

    def abort(self, keys: list[int]) -> tuple[list[list[int]], list[int]]:
        """Gone from the engine, or RuntimeError."""
        scheduler = self.scheduler
        there = [key for key in keys if key in self.want]
        gone = [[key, int(str(key) in scheduler.active_requests)] for key in there]
        for key in there:
            scheduler.set_request_cancellation(str(key))
        scheduler.clear_cancelled_requests()
        if left := [key for key in there if self._find(key) is not None]:
            raise RuntimeError(f"the engine did not abort {left}")
        for key in there:
            self._forget(key)
        scheduler.block_new_requests = (
            False  # it waits for somebody to finish, who may just have been aborted
        )
        return gone, [key for key in keys if key not in there]

    def update(self, key: int, want: int, priority: int) -> None:
        """Nothing happens if it is gone."""
        if (state := self._find(key)) is not None:
            self.want[key], self.priority[key] = want, priority
            # a request that was preempted counts its tokens anew
            state.max_new_tokens = state._new_tokens_limit = state.generated_len() + want - self.made[key]

    def limit(self, running: int) -> None:
        """Whoever runs already goes on."""
        self.running = min(running, self.most_running)

    def busy(self) -> bool:
        """Whether a request is there."""
        return bool(self.scheduler.has_pending_requests())

    def step(self) -> Message:
        """Schedule, compute, and take the tokens: one step of the generation loop."""
        scheduler, before = self.scheduler, set(self.scheduler.active_requests)
        scheduler.max_requests_per_batch = max(self.running, len(before))
        if self.by_priority:
            waiting = sorted(scheduler.waiting_requests_order, key=lambda name: self.priority[int(name)])
            scheduler.waiting_requests_order = deque(waiting)
        if scheduler.waiting_requests and self._free() > self._in_pool():
            self._make_room()
        if not self.processor.prepare_next_batch():
            raise RuntimeError("the engine has requests and schedules none")
        ran, batch = set(scheduler.active_requests), self.batch
        gain = [future.state for future in batch if future.has_new_token]
        seen = {
            "run": len(ran),
            "wait": len(scheduler.waiting_requests),
            "n": len(gain),
            "P": sum(future.query_length for future in batch) - len(gain),
            "kv": (self.blocks - self._free()) * self.block_tokens,
            "in": [int(name) for name in sorted(ran - before, key=int)],
            "out": [int(name) for name in sorted(before - ran, key=int)],
        }
        if self.sampled and gain:  # a stream of its own, as keys are, else engines would draw the same
            first = int(gain[0].request_id)
            self.torch.manual_seed((self.seed << 48) + (first << 24) + self.made[first])
        self.processor._generation_step(self.model)
        self.processor.update_batch()
        self._drop_answers()
        new, done = [], []
        for state in gain:
            key = int(state.request_id)
            new.append([key, int(state.generated_tokens[-1])])
            self.made[key] += 1
            if state.request_id not in scheduler.active_requests:
                done.append(key)
                self._forget(key)
        held = sum(len(state.initial_tokens) + len(state.generated_tokens) for state in gain)
        return {**seen, "K": held, "free": self._free(), "new": new, "done": done}

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        """The scheduler's decision; asked again if the cache was full, the last one counts."""
        decision = self._schedule(*args, **kwargs)
        self.batch = decision[0] or []
        return decision

    def _find(self, key: int) -> Any:
        name = str(key)
        return self.scheduler.active_requests.get(name) or self.scheduler.waiting_requests.get(name)

    def _forget(self, key: int) -> None:
        del self.want[key], self.made[key], self.priority[key]

    def _in_pool(self) -> int:
        """Blocks that hold nothing."""
        return int(self.cache.compute_free_capacity(relative=False)) // self._block_bytes()

    def _free(self) -> int:
        """Blocks that no request holds, what is kept of shared prefixes included."""
        kept = sum(len(allocator.ledger.cached_blocks) for allocator in self.cache.cache_allocators.values())
        return self._in_pool() + kept

    def _block_bytes(self) -> int:
        return sum(allocator.bytes_per_block for allocator in self.cache.cache_allocators.values())

    def _make_room(self) -> None:
        """Give up kept prefixes if the first that waits has no room; otherwise this is done too late."""
        first = self.scheduler.waiting_requests[self.scheduler.waiting_requests_order[0]]
        if -(-len(first.initial_tokens) // self.block_tokens) > self._in_pool():
            self.cache.evict_cached_blocks()

    def _drop_answers(self) -> None:
        """Finished requests are put in a queue that nobody else reads."""
        try:
            while True:
                self.processor.output_router.output_queue.get_nowait()
        except queue.Empty:
            pass

    def sleep(self) -> bool:
        """It keeps its memory."""
        return False

    def wake(self) -> None:
        """It never slept."""

    def forget(self) -> None:
        """Empty the prefix cache."""
        if self.busy():
            raise RuntimeError("the prefix cache could not be emptied")
        self.cache.reset()


def main() -> None:
    """The worker, with this engine; it is found by its place, as nothing of tailopt can be imported."""
    spec = importlib.util.spec_from_file_location("tailopt_worker", Path(__file__).with_name("worker.py"))
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    worker.main(json.loads(sys.argv[1]), Transformers)


if __name__ == "__main__":
    main()
