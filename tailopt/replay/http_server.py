"""One server: where it is, whether it may be spoken to, and what it can do besides completing prompts.

Nothing is assumed. The paths that a server has are those of its ``/openapi.json``; without one, those that
answer a GET that changes nothing, or an OPTIONS that says that a POST is allowed. What ``/v1/completions``
understands is found out with a request of two tokens. A pause that is refused, or after which the server says
that it is not paused, counts as none; so does a sleep. A KV cache cannot be sent from one server to another.

================  ======================================  ==================================================
ability           vLLM (``VLLM_SERVER_DEV_MODE=1``)       SGLang
================  ======================================  ==================================================
pause, resume     ``/pause?mode=keep``, ``/resume``       ``/pause_generation`` in place,
                                                          ``/continue_generation``
abort by id       ``/abort_requests``                     ``/abort_request``
forget prefixes   ``/reset_prefix_cache``                 ``/flush_cache``
sleep, wake       ``/sleep``, ``/wake_up``                ``/release_memory_occupation``,
                                                          ``/resume_memory_occupation``
count requests    ``/metrics``                            ``/metrics``
================  ======================================  ==================================================
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from tailopt.errors import InputError

KEY = "TAILOPT_API_KEY"
"""The environment variable with the API key, if servers want one. It is sent to them, and written nowhere."""


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server that is one engine.

    Attributes:
        url: ``http://127.0.0.1:8000``; what follows it is dropped if it is ``/v1``.
        tp: tensor-parallel degree it was started with.
        gpus: the numbers of its GPUs; None if nobody needs to know.

    >>> Server.of("127.0.0.1:8000/v1/"), Server.of("http://localhost:8001#tp=2").tp
    (Server(url='http://127.0.0.1:8000', tp=1, gpus=None), 2)
    """

    url: str
    tp: int = 1
    gpus: tuple[int, ...] | None = None

    @classmethod
    def of(cls, text: str) -> "Server":
        """A server from ``URL`` or ``URL#tp=N`` or ``URL#tp=N,gpus=0-1``.

        Raises:
            InputError: if it is no such text, or has a password in it.
        """
        address, _, facts = text.strip().partition("#")
        if "://" not in address:
            address = f"http://{address}"
        try:
            parts = urlsplit(address)
            port = parts.port
        except ValueError:
            raise InputError(f"server {_shown(text)}: expected a URL such as http://127.0.0.1:8000") from None
        if parts.username is not None or parts.password is not None:
            raise InputError(f"server {parts.hostname}: has a password in it; an API key goes into {KEY}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise InputError(f"server {_shown(text)}: expected a URL such as http://127.0.0.1:8000")
        path = re.sub(r"(/v1)?/*$", "", parts.path)
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        url = f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{path}"
        found = re.fullmatch(r"(?:tp=(\d{1,4}))?,?(?:gpus=(\d{1,5})(?:-(\d{1,5}))?)?", facts)
        if found is None or (found[1] and int(found[1]) < 1):
            raise InputError(f"server {_shown(text)}: expected tp=N or gpus=A-B behind #, got {facts!r:.40}")
        gpus = None if found[2] is None else tuple(range(int(found[2]), int(found[3] or found[2]) + 1))
        tp = int(found[1] or (1 if gpus is None else len(gpus)))
        if gpus is not None and len(gpus) != tp:
            raise InputError(f"server {url}: TP{tp} on {len(gpus)} GPUs, expected {tp}")
        return cls(url, tp, gpus)

    @property
    def loopback(self) -> bool:
        """Whether it is on this machine.

        >>> Server("http://[::1]:8000").loopback, Server("http://example.org").loopback
        (True, False)
        """
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"

    def __str__(self) -> str:
        return urlsplit(self.url).netloc


@dataclass(frozen=True)
class Abilities:
    """What a server was found to do.

    Attributes:
        name: ``vLLM``, ``SGLang`` or ``server``, and its version if it says so.
        model: the name to ask for.
        most_tokens: of prompt and output; None if it does not say.
        paths: those of :data:`PATHS` that it has.
        fields: more fields of a completion request that it understands.
        token_ids: whether it tells the token ids.
    """

    name: str = "server"
    model: str = ""
    most_tokens: int | None = None
    paths: frozenset[str] = frozenset()
    fields: Mapping[str, object] = field(default_factory=dict)
    token_ids: bool = False

    def without(self, *paths: str) -> "Abilities":
        """The same but for these paths."""
        return replace(self, paths=self.paths - set(paths))

    def first(self, *paths: str) -> str | None:
        """The first of these paths that it has."""
        return next((path for path in paths if path in self.paths), None)


PATHS = (
    "/version", "/server_info", "/get_server_info", "/metrics",
    "/pause", "/resume", "/is_paused", "/abort_requests", "/reset_prefix_cache", "/sleep", "/wake_up",
    "/is_sleeping", "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache",
    "/release_memory_occupation", "/resume_memory_occupation",
)  # fmt: skip
"""Worth looking for."""

READ_ONLY = frozenset(
    ("/version", "/server_info", "/get_server_info", "/metrics", "/is_paused", "/is_sleeping")
)
"""Those that a GET does not change anything with, wherever they are."""

RUNNING = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)|sglang:num_(?:running|queue)_reqs)(?:\{[^}]*\})?\s+([0-9.eE+]+)\s*$",
    re.MULTILINE,
)


def requests_there(metrics: str) -> int | None:
    """Requests that run and wait, according to a server's metrics; None if these do not say.

    >>> requests_there('vllm:num_requests_running{engine="0"} 3.0\\nvllm:num_requests_waiting{} 1.0')
    4
    """
    found = RUNNING.findall(metrics)
    return int(sum(map(float, found))) if found else None


def api_key() -> str | None:
    """The key for servers, from the environment."""
    return os.environ.get(KEY) or None


def check_servers(servers: tuple[Server, ...], *, remote: bool) -> None:
    """Raise InputError unless there are servers, each once, and on this machine unless ``remote``."""
    if not servers:
        raise InputError("servers: expected at least one")
    for number, server in enumerate(servers):
        if server.url in [one.url for one in servers[:number]]:
            raise InputError(f"server {server}: is given twice, expected each once")
        if not remote and not server.loopback:
            raise InputError(
                f"server {server}: is not on this machine; say so with --remote to send it prompts, and "
                f"the key in {KEY}"
            )


def _shown(text: str) -> str:
    """What a user wrote, without what may be a password."""
    return repr(re.sub(r"//[^/@]*@", "//***@", text))[:80]
