"""From checked settings to a running agent: the lock, the logs, the loop, the lifeline."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sys

from regrow import notify
from regrow.agent import driver
from regrow.agent.config import AgentSettings
from regrow.agent.interfaces import interface_of
from regrow.agent.watch import open_health
from regrow.errors import ConfigurationError
from regrow.processes import MARK, lifeline_fd, wake_at_lifeline_end
from regrow.store.base import Store
from regrow.store.open import open_store


def serve(settings: AgentSettings) -> int:
    """Run the agent to its end.

    Raises:
        ConfigurationError: another agent has the state folder, or a port is in use.
        OperationalError: this host needs recycling, or its fences are damaged.
    """
    os.umask(0o077)
    os.environ.setdefault(MARK, str(settings.state))
    if interface := interface_of(settings.address):  # else gloo asks for the host's name, which may mean loopback or another network
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    return asyncio.run(_main(settings))


def _lock(settings: AgentSettings) -> int:
    path = settings.state / "agent.lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(handle, 64).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise ConfigurationError(
            f"another agent runs in this folder (pid {holder})",
            where=f"--state {settings.state}",
            hint="give every agent a folder of its own",
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
    return handle


async def _main(settings: AgentSettings) -> int:
    store = open_store(settings.store)
    try:
        try:
            settings.state.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"cannot be made: {error.strerror}", where=f"--state {settings.state}", hint="give a folder that this user can write"
            ) from error
        lock = _lock(settings)
        try:
            return await _serve(settings, store)
        finally:
            os.close(lock)
    finally:
        await store.close()


async def _serve(settings: AgentSettings, store: Store) -> int:
    logging.getLogger("regrow.agent").info("agent node=%s pid=%d state=%s", settings.node, os.getpid(), settings.state)
    manager = notify.from_environment()
    agent = driver.build(settings, store, open_health(settings), on_serving=manager.ready, on_leaving=manager.stopping)
    lifeline = lifeline_fd()
    if lifeline is not None:
        wake_at_lifeline_end()
        asyncio.get_running_loop().add_reader(lifeline, agent.cut)
    try:
        return await agent.run()
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen: {error.strerror or error}", where=f"node {settings.node}", hint="check --address, --peer-port and --metrics"
        ) from error
