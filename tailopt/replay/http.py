"""OpenAI-compatible servers as engines: any number of vLLM or SGLang servers carry out plans.

Each server is one engine of the fleet, set up by whoever started it; the profile says what it is taken to
be. A plan's engines are matched to servers by tensor-parallel degree and, where both are told, GPUs; a
switch puts the servers that the new plan lacks to sleep, where they can, and wakes those that it needs.

The API key is taken from the environment (:data:`tailopt.replay.http_server.KEY`), never from an argument,
and is written nowhere. Servers must be on this machine unless told otherwise; redirects and proxies are not
followed.
"""

import asyncio
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tailopt.engine.profile import EngineProfile
from tailopt.errors import InputError
from tailopt.plan import Engine
from tailopt.replay.errors import ReplayError
from tailopt.replay.http_server import Server, check_servers
from tailopt.replay.process import Link

if TYPE_CHECKING:
    from tailopt.replay.http_link import HttpLink


class HttpEngines:
    """Servers that stand for engines (:class:`tailopt.replay.backend.Engines`); a context manager.

    Args:
        profile: what the servers are taken to be: KV blocks, limits.
        servers: where they are (:meth:`tailopt.replay.http_server.Server.of`).
        model: which model to ask for; None for the only one that a server has.
        remote: allow servers on other machines.
        settings: more of :class:`tailopt.replay.http_client.Settings`.

    Raises:
        InputError: no server, one twice, one on another machine, a shape that the profile lacks.
        ReplayError: if a server cannot be reached, or cannot do what is needed.
    """

    def __init__(
        self,
        profile: EngineProfile,
        servers: Sequence[str | Server],
        *,
        model: str | None = None,
        remote: bool = False,
        **settings: Any,
    ) -> None:
        self.profile = profile
        self.servers = tuple(Server.of(one) if isinstance(one, str) else one for one in servers)
        check_servers(self.servers, remote=remote)
        for server in self.servers:
            profile.shape(server.tp)
        self._settings: dict[str, Any] = {"model": model, **settings}
        try:
            from tailopt.replay.http_client import Trouble
        except ModuleNotFoundError:
            raise InputError("servers: need aiohttp; pip install 'tailopt[http]'") from None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._links: dict[Server, HttpLink] = {}
        self._free: list[Server] = list(self.servers)
        self._fresh: set[Server] = set(self.servers)
        try:
            self._links = {server: self._link(server) for server in self.servers}
            for link in self._links.values():
                link.connected.result()
        except Trouble as error:
            self.close()
            raise ReplayError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def _link(self, server: Server, *, priority: bool = False) -> "HttpLink":
        from tailopt.replay.http_client import Settings
        from tailopt.replay.http_link import HttpLink

        shape = self.profile.shape(server.tp)
        blocks = shape.kv_capacity_tokens // shape.block_tokens
        settings = Settings(blocks, shape.block_tokens, priority=priority, **self._settings)
        return HttpLink(self._loop, server, settings)

    @property
    def name(self) -> str:
        """What the first server is."""
        return self._links[self.servers[0]].connected.result().name

    def most_tokens(self, engine: Engine) -> int:
        """The least of what the servers of this shape allow."""
        shape = self.profile.shape(engine.tp)
        links = [link for server, link in self._links.items() if server.tp == engine.tp]
        own = [link.connected.result().most_tokens for link in links]
        return min([shape.kv_capacity_tokens, *(one for one in own if one is not None)])

    def take(self, engine: Engine) -> Link:
        """The link to a server that nobody uses, woken if it was put to sleep."""
        if engine.speculation is not None:
            raise InputError(
                "engine: speculation: a server drafts as it was started, expected none in the plan"
            )
        fits = [server for server in self._available() if server.tp == engine.tp]
        exact = [server for server in fits if server.gpus is not None and server.gpus == engine.gpus]
        chosen = next(iter(exact or fits), None)
        if chosen is None:
            have = ", ".join(f"{server} TP{server.tp}" for server in self.servers)
            raise InputError(f"engine of TP{engine.tp}: no server is left for it; there are {have}")
        if chosen in self._free:
            self._free.remove(chosen)
        link = self._links[chosen]
        if not link.alive or engine.scheduling == "priority":
            link.kill()
            link = self._links[chosen] = self._link(chosen, priority=engine.scheduling == "priority")
        elif chosen in self._fresh:
            self._fresh.discard(chosen)
            return link  # it has said that it is ready
        else:
            link.send({"do": "wake"})
        self._fresh.discard(chosen)
        return link

    def _available(self) -> list[Server]:
        """Those that nobody uses, or whose link is dead."""
        return [server for server in self.servers if server in self._free or not self._links[server].alive]

    def keeps(self, engine: Engine) -> bool:
        """Always: a server is not stopped."""
        return True

    def give_back(self, engine: Engine, link: Link) -> None:
        """Nobody uses it now."""
        self._free += [server for server, its in self._links.items() if its is link]

    def close(self) -> None:
        """Let the servers go on as they were, and close all connections."""
        for link in self._links.values():
            link.kill()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
