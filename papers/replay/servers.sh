#!/usr/bin/env bash
# A study of replays over HTTP: starts two vLLM servers of the tiny model, each pinned to a core, carries policies
# out on them with `tailopt replay --server URL --server URL`, and stops them.
#
#   TAILOPT_VLLM_PYTHON=.venv-vllm/bin/python papers/replay/servers.sh OUT [options of tailopt replay]
#
# Without options, --demo. OUT gets the study and the servers' logs; --go-on beside the options of the start takes
# up one that was interrupted. PYTHON names the interpreter that has tailopt (.venv/bin/python); DEV=0 starts the
# servers without developer mode: no pause, no abort by id, no sleep. Linux only (taskset, setsid).
set -euo pipefail

out=${1:?usage: papers/replay/servers.sh OUT [options of tailopt replay]}
shift
vllm=${TAILOPT_VLLM_PYTHON:?must name a Python that has vLLM; see scripts/install_vllm_cpu.sh}
python=${PYTHON:-$(dirname "$0")/../../.venv/bin/python}

# The limits of the profile that predicts, the model, two free ports and the cores, one line each.
mapfile -t facts < <("$python" - <<'PYTHON'
import os, socket
from tailopt.replay.tiny_model import tiny_model
from tailopt.replay.vllm import tiny_profile
shape = tiny_profile(1).shape(1)
print(f"--num-gpu-blocks-override {shape.kv_capacity_tokens // shape.block_tokens + 1} "
      f"--block-size {shape.block_tokens} --max-num-seqs {shape.max_running} "
      f"--max-num-batched-tokens {shape.token_budget} --max-model-len {shape.kv_capacity_tokens}")
print(tiny_model())
with socket.socket() as one, socket.socket() as two:
    one.bind(("127.0.0.1", 0)), two.bind(("127.0.0.1", 0))
    print(one.getsockname()[1], two.getsockname()[1])
print(*sorted(os.sched_getaffinity(0)))
PYTHON
)
read -ra limits <<<"${facts[0]}"
model=${facts[1]}
read -ra ports <<<"${facts[2]}"
read -ra cores <<<"${facts[3]}"

servers=()
stop() {
    for pid in "${servers[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in "${servers[@]}"; do # killed at once, a server would leave its engine behind
        for _ in {1..60}; do kill -0 "$pid" 2>/dev/null && sleep 0.5 || break; done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
}
trap stop EXIT

mkdir -p "$out"
urls=()
for i in 0 1; do
    VLLM_SERVER_DEV_MODE=${DEV:-1} OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 \
        HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_LOGGING_LEVEL=WARNING \
        setsid taskset -c "${cores[i % ${#cores[@]}]}" \
        "$vllm" -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port "${ports[i]}" \
        --model "$model" --load-format dummy --dtype float32 --enforce-eager --skip-tokenizer-init \
        --no-async-scheduling "${limits[@]}" >"$out/server-$i.log" 2>&1 &
    servers+=($!)
    urls+=("http://127.0.0.1:${ports[i]}")
done
for i in 0 1; do
    until "$python" -c "import urllib.request; urllib.request.urlopen('${urls[i]}/v1/models', timeout=5)" 2>/dev/null; do
        kill -0 "${servers[i]}" 2>/dev/null || { tail -n 5 "$out/server-$i.log" >&2; exit 1; }
        sleep 1
    done
    echo "server $i: ${urls[i]} on core ${cores[i % ${#cores[@]}]}"
done

(($#)) || set -- --demo
"$python" -m tailopt replay --server "${urls[0]}" --server "${urls[1]}" --out "$out/study" "$@"
