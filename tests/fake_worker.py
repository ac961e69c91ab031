"""An engine that speaks the worker's protocol and is none: python fake_worker.py CONFIG.

It schedules by the simulator's rules (:mod:`tailopt.simulate.vllm_scheduler`), sleeps through its steps,
and its next token is a function of all tokens before it, as of a model that always takes the likeliest. On
demand it goes wrong.
"""

import json
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from tailopt.replay.worker import Lines, serve
from tailopt.simulate.vllm_scheduler import Limits, Request, Scheduler

VOCABULARY = 2048


def next_token(tokens: list[int]) -> int:
    return 4 + zlib.crc32(",".join(map(str, tokens)).encode()) % (VOCABULARY - 4)


class FakeEngine:
    def __init__(self, config: dict[str, Any], lines: Lines) -> None:
        self.config, self.lines = config, lines
        self.scheduler = Scheduler(
            Limits(
                blocks=config["blocks"] + 1,
                block_tokens=config["block_tokens"],
                max_running=config["max_running"],
                token_budget=config["token_budget"],
                policy=config.get("scheduling", "fcfs"),
                prefix_caching=False,
            )
        )
        self.tokens: dict[int, list[int]] = {}
        self.prompt: dict[int, int] = {}
        self.want: dict[int, int] = {}
        self.steps = 0

    def about(self) -> dict[str, Any]:
        return {"versions": {"fake": "1"}}

    def submit(self, key: int, prompt: list[int], want: int, priority: int) -> None:
        if len(prompt) + want > self.config["max_model_len"]:
            raise ValueError(f"{len(prompt)} + {want} tokens are more than {self.config['max_model_len']}")
        self.scheduler.add(Request(key, len(prompt), priority=priority, arrival=key))
        self.tokens[key], self.prompt[key], self.want[key] = list(prompt), len(prompt), want

    def abort(self, keys: list[int]) -> tuple[list[list[int]], list[int]]:
        if not keys:
            raise SystemExit("an empty list of aborts was sent")
        gone = []
        for key in keys:
            if key in self.tokens:
                gone.append([key, int(key in self.scheduler.running)])
                self.scheduler.abort(key)
                del self.tokens[key]
        return gone, [key for key in keys if key not in dict(gone)]

    def update(self, key: int, want: int, priority: int) -> None:
        self.want[key] = want
        self.scheduler.prioritize(key, priority)

    def limit(self, running: int) -> None:
        self.scheduler.limit_running(running)

    def busy(self) -> bool:
        return bool(self.tokens)

    def step(self) -> dict[str, Any]:
        self.steps += 1
        self.go_wrong()
        scheduler, limits = self.scheduler, self.scheduler.limits
        decision = scheduler.schedule()
        kv = (limits.blocks - 1 - scheduler.free_blocks) * limits.block_tokens
        n, computed = len(decision.sampling), sum(chunk.tokens for chunk in decision.chunks.values())
        facts = {
            "run": len(scheduler.running),
            "wait": len(scheduler.waiting),
            "n": n,
            "K": sum(len(self.tokens[key]) + 1 for key in decision.sampling),
            "P": computed - n,
            "kv": kv,
            "in": list(decision.admitted),
            "out": list(decision.preempted),
        }
        costs = self.config
        time.sleep(costs["step_s"] + costs["request_s"] * n + costs.get("token_s", 0.0) * (computed - n))
        new, done = [], []
        for key in decision.sampling:
            token = next_token(self.tokens[key])
            self.tokens[key].append(token)
            new.append([key, token])
            short = self.config.get("fault") == "short" and self.steps > self.config["after"]
            stops = token in (self.config.get("stop") or ())
            if stops or len(self.tokens[key]) - self.prompt[key] >= self.want[key] - short:
                done.append(key)
        scheduler.update(done)
        for key in done:
            del self.tokens[key]
        return {**facts, "free": scheduler.free_blocks, "new": new, "done": done}

    def go_wrong(self) -> None:
        fault, once = self.config.get("fault"), self.config.get("once")
        if fault in (None, "short") or self.steps <= self.config["after"]:
            return
        if once is not None:
            try:
                os.close(os.open(once, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return
        if fault == "die":
            os.kill(os.getpid(), 9)
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "nonsense":
            os.write(self.lines.sink, b'{"event": "step", "t": \n')
        elif fault == "stranger":
            self.lines.write({"event": "aborted", "t": time.monotonic(), "keys": [[999, 1]], "absent": []})

    def sleep(self) -> bool:
        return False

    def wake(self) -> None:
        pass

    def forget(self) -> None:
        pass


if __name__ == "__main__":
    config = json.loads(sys.argv[1])
    sink = os.dup(1)
    os.dup2(2, 1)
    lines = Lines(0, sink)
    if config.get("fault") == "stillborn":
        sys.exit("no memory for the model")
    lines.write({"event": "ready", "t": time.monotonic(), "s": 0.0})
    if log := config.get("pids"):
        Path(log, str(os.getpid())).touch()
    serve(FakeEngine(config, lines), lines)
