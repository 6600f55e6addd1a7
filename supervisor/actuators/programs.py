"""Running a program of the site: an argument list, no shell, no secrets in its environment, a deadline, its whole group killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import msgspec

from regrow.supervisor.actuators.port import ActuatorError

_MOST_OUTPUT = 64 * 1024
_KEPT_NAMES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "USER")
_KEPT_PREFIXES = ("SLURM_CONF", "KRB5")


class Finished(msgspec.Struct, frozen=True):
    """How a program ended."""

    status: int
    output: str
    """Standard output and error together, as text, at most 64 KiB of it."""


def environment() -> dict[str, str]:
    """What a program inherits: nothing of ours, so no token and no password of the store."""
    return {name: value for name, value in os.environ.items() if name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES)}


async def run(argv: tuple[str, ...], *, timeout_seconds: float, extra: dict[str, str] | None = None) -> Finished:
    """Run it to its end.

    Raises:
        ActuatorError: it cannot be started, or did not end in time (it was killed then).
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment() | (extra or {}),
            cwd="/",
            start_new_session=True,
        )
    except OSError as error:
        raise ActuatorError(
            f"{argv[0]} cannot be started: {error.strerror}", where=argv[0], hint="is it installed and executable?"
        ) from error
    assert process.stdout is not None
    try:
        async with asyncio.timeout(timeout_seconds):
            output = await _read(process.stdout)
            status = await process.wait()
    except TimeoutError as error:
        raise ActuatorError(f"{argv[0]} did not end within {timeout_seconds:g} s", where=argv[0], hint="it was killed") from error
    finally:
        await _end(process)
    return Finished(status, output)


async def _read(stream: asyncio.StreamReader) -> str:
    kept = bytearray()
    while chunk := await stream.read(8192):
        kept += chunk[: max(0, _MOST_OUTPUT - len(kept))]
    return kept.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Whatever it started in its session goes with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
