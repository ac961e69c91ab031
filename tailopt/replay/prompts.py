"""Prompts for a replay: token ids of the traced lengths; the samples of a group share what they may."""

import numpy as np

from tailopt.replay.tiny_model import FIRST_TOKEN, TINY
from tailopt.trace import Trace


def prompts(trace: Trace, *, seed: int = 0, vocabulary: int | None = None) -> list[list[int]]:
    """Random token ids: one stream per group, cut to each prompt's length, its last token the sample's own.

    So the samples of a group share all full blocks before the last token, which is what the simulator takes
    them to share, and go different ways from there on even if the engine always takes the likeliest token.

    Args:
        trace: gives groups and lengths; a length of 0 (unknown) counts as 1.
        seed: of the tokens.
        vocabulary: token ids are below it; None for the tiny model's.

    >>> first, second = prompts(Trace.of([[30, 50]], prompt_tokens=6))
    >>> first[:-1] == second[:-1], first[-1] == second[-1]
    (True, False)
    """
    size = TINY["vocab_size"] if vocabulary is None else vocabulary
    assert isinstance(size, int)
    lengths = trace.context_tokens
    longest = np.zeros(int(trace.group.max()) + 1, dtype=np.int64)
    np.maximum.at(longest, trace.group, lengths)
    streams = [
        np.random.default_rng([seed, group]).integers(FIRST_TOKEN, size, int(length))
        for group, length in enumerate(longest.tolist())
    ]
    found = []
    rank = np.zeros(len(longest), dtype=np.int64)
    for group, length in zip(trace.group.tolist(), lengths.tolist(), strict=True):
        tokens = streams[group][:length].tolist()
        tokens[-1] = FIRST_TOKEN + (tokens[-1] - FIRST_TOKEN + int(rank[group])) % (size - FIRST_TOKEN)
        rank[group] += 1
        found.append(tokens)
    return found
