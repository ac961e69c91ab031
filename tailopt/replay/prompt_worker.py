"""Prompts as token ids, by the model's own tokenizer and chat template: ``PYTHON -P prompt_worker.py MODEL``.

Runs in the environment of the engine (:mod:`tailopt.replay.worker`), so it needs transformers, and these only
if there is a text, and nothing of tailopt. A JSON list comes on standard input, of which each item is a text,
a list of messages (``role``, ``content``), or token ids, which stay as they are. A text becomes the message
of a user if the model has a chat template, and is taken as it is if not. What goes to standard output is
``{"tokens": [[id, ...], ...], "stop": [id, ...]}``: the prompts, and what ends a response.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def tokens_of(tokenizer: Any, prompt: Any) -> list[int]:
    """The token ids of one prompt."""
    if are_tokens(prompt):
        return list(prompt)
    if isinstance(prompt, str):
        if tokenizer.chat_template is None:
            return [int(one) for one in tokenizer(prompt)["input_ids"]]
        prompt = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    return [int(one) for one in tokenizer(text, add_special_tokens=False)["input_ids"]]


def are_tokens(prompt: Any) -> bool:
    """Whether it consists of numbers."""
    return isinstance(prompt, list) and all(isinstance(one, int) for one in prompt)


def stops_of(folder: Path) -> list[int]:
    """The tokens that end a response, by the generation's configuration or else the model's."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        found = json.loads(file.read_text()).get("eos_token_id") if file.exists() else None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return []


def main(folder: Path) -> None:
    """Answer what is on standard input."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    sink = os.dup(1)
    os.dup2(2, 1)  # what is printed meanwhile is no answer
    prompts, tokenizer = json.load(sys.stdin), None
    if not all(map(are_tokens, prompts)):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder))
    tokens = [tokens_of(tokenizer, prompt) for prompt in prompts]
    with os.fdopen(sink, "w") as out:
        json.dump({"tokens": tokens, "stop": stops_of(folder)}, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
