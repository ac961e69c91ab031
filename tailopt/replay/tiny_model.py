"""A tiny language model that any machine can run: a configuration, and random weights made when it is loaded.

Nothing is downloaded. How long a step takes depends on shapes and not on weights, and lengths are forced, so
random weights replay a plan as well as trained ones; only the speed is that of a small model.
"""

import json
import os
from pathlib import Path

from tailopt.files import whole_file

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
"""Llama's shape with 3.7 million parameters beside half a million of embeddings."""

KV_BYTES_PER_TOKEN = 2 * 4 * 2 * 64 * 4
"""Keys and values of 4 layers with 2 heads of 64 numbers of 4 bytes."""

FIRST_TOKEN = 4
"""Tokens below it mean something to the model: begin, end, padding."""


def tiny_model(folder: str | Path | None = None) -> Path:
    """The folder of the tiny model, made if need be; by default in the user's cache.

    Raises:
        InputError: if it cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     sorted(file.name for file in tiny_model(f"{parent}/tiny").iterdir())
    ['config.json']
    """
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "tailopt" / "tiny-llama"
    folder = Path(folder)
    text = json.dumps(TINY, indent=1)
    config = folder / "config.json"
    if not config.is_file() or config.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(config) as temporary:
            temporary.write_text(text)
    return folder
