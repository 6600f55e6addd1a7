"""One sitting of `regrow observe`: a stack, perhaps a run of its own, and the story at the end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.observe import grafana, story
from regrow.observe.stack import Plan, Stack

_STOP_SECONDS = 30.0
_LOOK_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Options:
    """What was asked for."""

    root: Path
    started: tuple[str, ...]
    """Command line of a run that is started here; empty: none."""
    once: bool
    factor: float
    ports: tuple[int, int]
    """Prometheus, Alertmanager."""
    find: Callable[[], str | None]
    https: bool = False


def command(chaos: str, *, demo: bool, root: Path, stay: bool) -> tuple[str, ...]:
    """The run to start: its folder is `root`/run. With `stay` a chaos run keeps its cluster, and so the page, until it is stopped.

    Raises:
        ConfigurationError: the folder holds a run already.
    """
    if not chaos and not demo:
        return ()
    folder = (root / "run").absolute()
    if folder.exists() and any(folder.iterdir()):
        raise ConfigurationError("holds an earlier run", where=str(folder), hint="remove it, or give another --run-dir")
    words = ("demo", "--keep") if demo else ("chaos", "run", chaos, *(("--stay",) if stay else ()))
    return (sys.executable, "-m", "regrow", *words, "--run-dir", str(folder), "--json")


def of_run(root: Path) -> Callable[[], str | None]:
    """Where the supervisor of the run under `root` is."""
    path = root.absolute() / "run" / "supervisor" / "supervisor.json"

    def find() -> str | None:
        try:
            return "http://" + json.loads(path.read_text(encoding="utf-8"))["http"]
        except (OSError, ValueError, KeyError):
            return None

    return find


async def run(options: Options, *, tell: Callable[[dict[str, str]], None], say: Callable[[str], None]) -> dict[str, Any]:
    """Until Ctrl-C, or with `once` until the run that was started has ended. The document with addresses and alerts.

    Args:
        tell: gets the addresses when both programs answer.
        say: gets the lines that the run writes about itself.
    """
    ended = asyncio.Event()
    over = False

    def find() -> str | None:
        try:
            return None if over else options.find()
        except ConfigurationError:  # a local run that came to its end: nothing to scrape
            return None

    every = 1 if options.factor < 1 else 15
    plan = Plan(
        root=options.root,
        find=find,
        prometheus_port=options.ports[0],
        alertmanager_port=options.ports[1],
        every_seconds=every,
        factor=options.factor,
        https=options.https,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    code: int | None = None
    async with Stack(plan) as stack:
        begin = time.time()
        addresses = {
            "prometheus": stack.prometheus,
            "alerts_page": await stack.alerts_page(),
            "alertmanager": stack.alertmanager,
            "root": str(stack.root),
        }
        tell(addresses | {"grafana": grafana.hint(stack.root)})
        if options.started:
            code = await _run_until(options, ended, say)
            over = True
            if not options.once and not ended.is_set():
                await ended.wait()
        else:
            await ended.wait()
        alerts = await story.fired(stack, begin, time.time(), every)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.remove_signal_handler(number)
    return {**addresses, "run_exit_code": code, "alerts": msgspec.to_builtins(alerts)}


async def _run_until(options: Options, ended: asyncio.Event, say: Callable[[str], None]) -> int:
    """The run that was started, to its end, or stopped when we are; its exit code."""
    with (options.root / "run.json").open("wb") as answer:
        child = await asyncio.create_subprocess_exec(
            *options.started,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=answer,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=dict(os.environ),
        )
    told = asyncio.create_task(_copy(child, options.root / "run.log", say))
    waiting = asyncio.create_task(child.wait())
    asked = asyncio.create_task(ended.wait())
    await asyncio.wait((waiting, asked), return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not waiting.done():
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await asyncio.shield(waiting)
        if not waiting.done():
            child.kill()
    await told
    return await waiting


async def _copy(child: asyncio.subprocess.Process, log: Path, say: Callable[[str], None]) -> None:
    """What the run says about itself, to its log and to people."""
    assert child.stderr is not None
    with log.open("wb") as output:
        while line := await child.stderr.readline():
            output.write(line)
            output.flush()
            say(line.decode(errors="replace").rstrip("\n"))
