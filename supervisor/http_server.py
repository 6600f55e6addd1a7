"""The HTTP server in the supervisor's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from regrow.errors import ConfigurationError

_TICK_SECONDS = 1.0


class _Quiet(uvicorn.Server):
    """uvicorn without its own signal handlers: the process has one owner."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._over = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def main_loop(self) -> None:
        """As uvicorn's, which wakes ten times a second to see whether it shall end: once, for the date in its answers."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_SECONDS):
                    await self._over.wait()

    def end(self) -> None:
        """Leave the loop; open requests are finished."""
        self.should_exit = True
        self._over.set()


class ApiServer:
    """The HTTP server in this process's loop."""

    def __init__(self, app: ASGIApp, *, tls: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._tls = tls
        self._server: _Quiet | None = None
        self._task: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            ConfigurationError: the address is taken or not ours.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(512)
        except OSError as error:
            listener.close()
            raise ConfigurationError(
                f"cannot listen on {host}:{port}: {error.strerror or error}", where="--http", hint="is another supervisor running there?"
            ) from error
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            log_config=None,
            access_log=False,
            forwarded_allow_ips="127.0.0.1",
            lifespan="off",
            timeout_graceful_shutdown=1,
            ws="none",
            loop="none",
        )
        config.load()
        config.ssl = self._tls
        self._server = _Quiet(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="supervisor-http")
        while not self._server.started:  # uvicorn has no such event
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Finish open requests, then end."""
        if self._server is None or self._task is None:
            return
        self._server.end()
        await asyncio.gather(self._task, return_exceptions=True)
