"""One case under a peer's simulator: ``python peers.py PEER CASE.json SECONDS``; prints JSON.

PEER is ``vidur``, ``vidur-metrics``, ``chunked`` or ``fcfs`` (two schedulers of sched-sim). Runs in their
own environment, which knows nothing of tailopt. CASE.json, from ``run.py``, says what to simulate. Every step
lasts ``step_s``, whatever it computes: the peers' own models of time are replaced, so only their event loops
and schedulers are compared. What is timed is their ``run()``, all requests made.
"""

import json
import logging
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


class OutOfTime(Exception):
    """The CPU time of a case is used up."""


def vidur(case: dict[str, Any], *, metrics: bool) -> tuple[Any, Any]:
    """Vidur's simulator with its chunked-prefill scheduler (Sarathi), round robin over the replicas.

    ``metrics``: whether it keeps and writes its metrics, as it does by default; its plots need a browser.
    """
    from vidur.config import (
        CacheConfig,
        ClusterConfig,
        MetricsConfig,
        ReplicaConfig,
        SarathiSchedulerConfig,
        SimulationConfig,
        TraceRequestGeneratorConfig,
    )
    from vidur.execution_time_predictor import BaseExecutionTimePredictor, ExecutionTimePredictorRegistry
    from vidur.simulator import Simulator
    from vidur.types import ExecutionTimePredictorType

    logging.disable(logging.CRITICAL)
    # The time of a step is a sum of operations over the layers. All are free but one, which takes the step.
    operations = [name for name in vars(BaseExecutionTimePredictor) if name.startswith("_get_")]
    free = {name: lambda self, batch: 0.0 for name in operations}
    step_ms = 1e3 * case["step_s"]

    class Constant(BaseExecutionTimePredictor):
        def _get_attention_decode_execution_time(self, batch: Any) -> float:
            return float(step_ms / self._num_layers_per_pipeline_stage)

    for name in set(operations) - {"_get_attention_decode_execution_time"}:
        setattr(Constant, name, free[name])
    Constant.__abstractmethods__ = frozenset()
    kind = ExecutionTimePredictorType.RANDOM_FORREST  # the default kind: what the configuration asks for
    ExecutionTimePredictorRegistry.unregister(kind)
    ExecutionTimePredictorRegistry.register(kind, Constant)

    folder = Path(tempfile.mkdtemp())
    rows = [f"2023-08-21,0,{case['prompt_tokens']},{length}" for length in case["output_tokens"]]
    trace = folder / "trace.csv"
    trace.write_text("\n".join(["Date,Time,PromptTokenCount,CompletionTokenCount", *rows]))
    config = SimulationConfig(
        cluster_config=ClusterConfig(
            num_replicas=case["engines"],
            replica_config=ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1),
            cache_config=CacheConfig(
                block_size=case["block_tokens"], num_blocks=case["blocks"], watermark_blocks_fraction=0
            ),
            replica_scheduler_config=SarathiSchedulerConfig(
                batch_size_cap=case["max_running"], chunk_size=case["token_budget"]
            ),
        ),
        request_generator_config=TraceRequestGeneratorConfig(
            trace_file=str(trace), prefill_scale_factor=1, time_scale_factor=1, max_tokens=2**20
        ),
        metrics_config=MetricsConfig(
            write_metrics=metrics, store_plots=False, enable_chrome_trace=False, output_dir=str(folder)
        ),
    )
    simulator = Simulator(config)
    requests = [event._request for _, event in simulator._event_queue]

    def outcome() -> tuple[list[float], int]:
        finish_s = [request.completed_at for request in requests if request.completed]
        return finish_s, sum(request.num_restarts for request in requests)

    return simulator.run, outcome


def sched_sim(case: dict[str, Any], policy: str) -> tuple[Any, Any]:
    """sched-sim, one simulator an engine (it knows one engine only), the requests dealt round robin."""
    from sched_sim.core.event_engine import Simulator
    from sched_sim.core.request import Request
    from sched_sim.hardware.latency_model import RooflineLatencyModel
    from sched_sim.hardware.presets import get_hardware_profile
    from sched_sim.schedulers.factory import create_scheduler

    class Constant(RooflineLatencyModel):
        def compute_prefill_step_time(self, num_prefill_tokens: int) -> float:
            return float(case["step_s"])

        def compute_decode_step_time(self, batch_size: int, total_context_tokens: int) -> float:
            return float(case["step_s"])

        def compute_mixed_step_time(self, *counts: int) -> float:
            return float(case["step_s"])

    hardware = get_hardware_profile("h100")
    simulators = []
    for engine in range(case["engines"]):
        scheduler = create_scheduler(
            policy, hardware, token_budget=case["token_budget"], max_batch_size=case["max_running"]
        )
        blocks = scheduler.block_manager
        blocks.block_size, blocks.total_gpu_blocks = case["block_tokens"], case["blocks"]
        blocks.free_gpu_blocks = list(range(case["blocks"]))
        scheduler.latency_model = Constant(hardware)
        simulator = Simulator(hardware, scheduler, block_size=case["block_tokens"])
        lengths = case["output_tokens"][engine :: case["engines"]]
        simulator.submit_workload(
            [
                Request(
                    request_id=str(i),
                    arrived_at=0.0,
                    prompt_tokens=case["prompt_tokens"],
                    output_tokens=length,
                )
                for i, length in enumerate(lengths)
            ]
        )
        simulators.append(simulator)

    def run() -> None:
        for simulator in simulators:
            simulator.run()

    def outcome() -> tuple[list[float], int]:
        requests = [request for simulator in simulators for request in simulator.all_requests]
        finish_s = [r.completed_at for r in requests if r.completed_at is not None]
        return finish_s, sum(r.preemptions_count for r in requests)

    return run, outcome


def main() -> None:
    """Simulate until done or out of time, and say what came of it."""
    peer, case_file, limit_s = sys.argv[1:]
    case = json.loads(Path(case_file).read_text())
    if peer.startswith("vidur"):
        run, outcome = vidur(case, metrics=peer == "vidur-metrics")
    else:
        run, outcome = sched_sim(case, peer)

    def stop(*_: object) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, float(limit_s))
    started = time.process_time()
    error = ""
    try:
        run()
    except OutOfTime:
        error = "out of time"
    except Exception as raised:  # a peer's own failure is a result
        error = f"{type(raised).__name__}: {raised}".splitlines()[0]
    signal.setitimer(signal.ITIMER_PROF, 0)
    cpu_s = time.process_time() - started
    finish_s, preemptions = outcome()
    found = {"cpu_s": cpu_s, "finish_s": finish_s, "preemptions": preemptions, "error": error}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
