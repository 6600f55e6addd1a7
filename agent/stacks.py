"""Stacks of workers that do not move: from their own signal handler, else from py-spy, always with the kernel's view."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from regrow.agent import logs

_HANDLER_SECONDS = 1.5
"""A handler that runs answers in milliseconds; a stopped process never does."""
_PY_SPY_SECONDS = 10.0
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in the kernel, not interruptible",
    "T": "stopped by a signal",
    "t": "stopped by a tracer",
    "Z": "zombie",
}


async def collect(pid: int, stacks_file: Path) -> str:
    """Text for people: state, what it waits for in the kernel, Python stacks of all threads where they can be had."""
    head = kernel_view(pid)
    if not head:
        return f"pid {pid} is gone"
    state = head.split("State: ", 1)[-1][:1]
    text = ""
    if state not in "TZ" and _catches(pid, signal.SIGUSR2):
        text = await _ask_handler(pid, stacks_file)
    if not text and state not in "TZ":
        text = await _ask_py_spy(pid)
    return logs.cut(f"{head}\n{text or 'no Python stacks: the process does not answer'}", 60_000)


def kernel_view(pid: int) -> str:
    """State and wait channel of a process; empty when there is none."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    letter = next((line.split()[1] for line in status.splitlines() if line.startswith("State:")), "?")
    lines = [f"pid {pid} State: {letter} ({_STATES.get(letter, 'other')})"]
    for name in ("wchan", "syscall"):
        try:
            value = Path(f"/proc/{pid}/{name}").read_text(encoding="ascii", errors="replace").strip()
        except OSError:
            continue
        if value and value != "0":
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _catches(pid: int, number: int) -> bool:
    """Whether the process has a handler: the signal would kill it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    mask = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:")), 0)
    return bool(mask & (1 << (number - 1)))


async def _ask_handler(pid: int, stacks_file: Path) -> str:
    before = _size(stacks_file)
    try:
        os.kill(pid, signal.SIGUSR2)
    except ProcessLookupError:
        return ""
    deadline = time.monotonic() + _HANDLER_SECONDS
    size, settled = before, False
    while time.monotonic() < deadline and not settled:
        await asyncio.sleep(0.03)
        now = _size(stacks_file)
        settled = now == size and now > before
        size = now
    if size == before:
        return ""
    return _read_from(stacks_file, before)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> str:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")


def py_spy() -> str | None:
    """The program: on the path, else beside this interpreter; None: not installed."""
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if beside.exists() else None)


async def py_spy_threads(pid: int, *, stopped: bool = False) -> tuple[list[dict[str, Any]], str]:
    """All Python threads of a process, as `py-spy dump --json` has them, and why there are none.

    Args:
        pid: any process of this user.
        stopped: it does not run: read its memory as it is instead of pausing it.
    """
    output, problem = await _run_py_spy("--json", *(("--nonblocking",) if stopped else ()), "--pid", str(pid))
    try:
        return (json.loads(output), "") if output else ([], problem)
    except ValueError as error:
        return [], f"py-spy answers no JSON: {error}"


async def _ask_py_spy(pid: int) -> str:
    return (await _run_py_spy("--pid", str(pid)))[0]


async def _run_py_spy(*arguments: str) -> tuple[str, str]:
    program = py_spy()
    if program is None:
        return "", "py-spy is not installed"
    process = await asyncio.create_subprocess_exec(
        program, "dump", *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(_PY_SPY_SECONDS):
            output, errors = await process.communicate()
    except TimeoutError:
        return "", f"py-spy did not answer within {_PY_SPY_SECONDS:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    lines = errors.decode(errors="replace").strip().splitlines()
    return output.decode(errors="replace"), lines[0] if lines else f"py-spy ended with {process.returncode}"
