"""What a server streams in answer to ``/v1/completions``: server-sent events, one JSON object each.

vLLM sends an event per step and request, ``{"id": ..., "choices": [{"text", "token_ids", "finish_reason",
...}], "usage": {...}}``, then one without choices that has the final usage, then ``[DONE]``. Others leave out
the token ids, or the running usage, or send several tokens at once. Whatever does not fit is one line that
says so.
"""

import json
from dataclasses import dataclass
from typing import Any

from tailopt.errors import one_line

MOST_BYTES = 64 << 20
"""Of one event: a prompt of some million token ids comes back in the first one."""

DONE = "[DONE]"


class Nonsense(Exception):
    """The server answered something that is no completion stream."""


class Refused(Exception):
    """The server refuses this request, and would refuse it again."""


@dataclass(frozen=True)
class Chunk:
    """One event.

    Attributes:
        id: the completion's id; empty if there is none.
        tokens: token ids gained; None if the server does not tell them.
        text: the text gained.
        finish: why the completion has ended; None if it has not.
        total: tokens of the completion so far; None if the server does not say.
        choice: whether there is a choice at all; the last event of vLLM has only the usage.
    """

    id: str
    tokens: tuple[int, ...] | None
    text: str
    finish: str | None
    total: int | None
    choice: bool


class EventReader:
    r"""Splits bytes, however they are cut, into the data of events.

    >>> reader = EventReader()
    >>> reader.feed(b'data: {"a"'), reader.feed(b': 1}\r\n\r\n: a comment\ndata:[DONE]\n\n')
    ([], ['{"a": 1}', '[DONE]'])
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The data of the events that are complete now.

        Raises:
            Nonsense: a line that never ends, or is no event.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_BYTES:
            raise Nonsense(f"a line of more than {MOST_BYTES} bytes")
        found = []
        for line in lines:
            text = line.strip().decode(errors="replace")
            if not text or text.startswith(":"):
                continue
            field, colon, value = text.partition(":")
            if field not in ("data", "event", "id", "retry") or not colon:
                raise Nonsense(f"{one_line(text)[:100]!r}, expected an event")
            if field == "data":
                found.append(value.strip())
        return found


def read_chunk(data: str) -> Chunk:
    """The event that this JSON text holds.

    Raises:
        Refused: an error that the client has made (400 to 499).
        Nonsense: any other error, or no completion.

    >>> read_chunk('{"id": "c", "choices": [{"text": " a", "token_ids": [7], "finish_reason": null}]}')
    Chunk(id='c', tokens=(7,), text=' a', finish=None, total=None, choice=True)
    """
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise Nonsense(f"{one_line(data)[:100]!r}, expected JSON") from None
    if not isinstance(event, dict):
        raise Nonsense(f"{one_line(data)[:100]!r}, expected an object")
    if event.get("error"):
        message, code = error_text(event["error"])
        raise (Refused if 400 <= code < 500 else Nonsense)(message)
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) > 1:
        raise Nonsense(f"{one_line(data)[:100]!r}, expected one choice at most")
    choice = choices[0] if choices else {}
    usage = event.get("usage") or {}
    if not isinstance(choice, dict) or not isinstance(usage, dict):
        raise Nonsense(f"{one_line(data)[:100]!r}, expected objects")
    tokens, finish = choice.get("token_ids"), choice.get("finish_reason")
    total = usage.get("completion_tokens")
    text, name = choice.get("text") or "", event.get("id") or ""
    right = (
        (tokens is None or (isinstance(tokens, list) and all(type(one) is int for one in tokens)))
        and (finish is None or isinstance(finish, str))
        and (total is None or type(total) is int)
        and isinstance(text, str)
        and isinstance(name, str)
    )
    if not right:
        raise Nonsense(f"{one_line(data)[:100]!r}, expected a completion")
    return Chunk(name, None if tokens is None else tuple(tokens), text, finish, total, bool(choices))


def error_text(error: Any) -> tuple[str, int]:
    """The message and the code of an error object, as OpenAI, vLLM and SGLang write it."""
    if isinstance(error, dict) and isinstance(error.get("error"), dict):
        error = error["error"]
    if not isinstance(error, dict):
        return one_line(str(error))[:200], 0
    message = error.get("message") or error.get("detail") or error.get("error") or error
    code = error.get("code")
    return one_line(str(message))[:200], code if isinstance(code, int) else 0
