"""The runs without faults that a demo is compared with, as child processes: the twin, its controls, and a second mesh."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

from regrow.errors import OperationalError
from regrow.ids import MeshShape

SECOND_MESH = MeshShape(dp=2, tp=1, pp=1)
"""The second fresh run: what differs between it and the twin is rounding, and sets the tolerance of the final state."""


async def run_twins(root: Path, steps: int, seed: int, *, controls_after: int, script_flags: tuple[str, ...]) -> tuple[Path, Path]:
    """Run twin (one process, with controls) and second run (two processes) side by side.

    Returns:
        Folders of their step logs.

    Raises:
        OperationalError: one of them failed; its log is named.
    """
    twin, second = root / "twin", root / "second"
    flags = ("--steps", str(steps), "--seed", str(seed), *script_flags)
    port = _free_port()
    commands = [_start(root / "twin.log", twin, MeshShape(), flags, {}, ("--controls", str(controls_after)))]
    for rank in range(SECOND_MESH.world_size):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(SECOND_MESH.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        commands.append(_start(root / f"second-{rank}.log", second, SECOND_MESH, flags, environment, ()))
    await asyncio.gather(*commands)
    return twin, second


async def _start(log: Path, folder: Path, mesh: MeshShape, flags: tuple[str, ...], more: dict[str, str], extra: tuple[str, ...]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("REGROW_", "TORCHELASTIC_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}
    argv = (sys.executable, "-m", "regrow.demo.reference", "--folder", str(folder), "--mesh", str(mesh), *extra, *flags)
    with log.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=stream, stderr=stream, env=environment
        )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    if code != 0:
        raise OperationalError(f"the run without faults ended with status {code}: {_tail(log)}", where=str(log))


def _tail(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-800:]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
