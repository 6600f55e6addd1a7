"""`regrow demo`: the main job on this machine, nothing to configure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

_SHORT = {"rendezvous": "rendez.", "first_step": "1st step"}


def register(app: typer.Typer) -> None:
    """Add `demo`."""
    app.command("demo")(demo)


def demo(
    fault: Annotated[str, typer.Option(help="What breaks: none, node, gpu, sdc, hang, all, or several with commas.")] = "all",
    seed: Annotated[int, typer.Option(help="Of weights, sample order, dropout and the choice of victims.")] = 0,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 45,
    zero: Annotated[int, typer.Option(help="Shard over the data axis: 0 nothing, 1 optimizer, 2 gradients, 3 weights.")] = 0,
    run_dir: Annotated[str, typer.Option(help="Folder of the run.")] = "runs/demo",
    keep: Annotated[bool, typer.Option(help="Keep checkpoints and logs after a good end.")] = False,
    plain: Annotated[bool, typer.Option(help="Lines instead of a live table.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small GPT on 8 workers, break things, and prove that nothing was lost (about two minutes)."""
    import asyncio

    faults = _faults(fault)
    if zero not in range(4):
        raise ConfigurationError(f"--zero {zero} is no ZeRO stage", where="regrow demo", hint="use 0, 1, 2 or 3")
    if seed < 0 or steps < 12:
        raise ConfigurationError(f"seed {seed}, {steps} steps", where="regrow demo", hint="a seed of 0 or more, and at least 12 steps")
    from regrow.demo import main

    options = main.DemoOptions(faults=faults, seed=seed, steps=steps, zero=zero, run_dir=Path(run_dir), plain=plain or as_json)
    result = asyncio.run(main.run(options))
    emit(result, as_json=as_json, human=lambda: _print(result))
    if result["ok"] and not keep:
        main.clear_bulk(Path(run_dir))
    raise typer.Exit(0 if result["ok"] else 1)


def _faults(text: str) -> tuple[str, ...]:
    known = ("node", "sdc", "gpu", "hang")
    if text == "none":
        return ()
    words = known if text == "all" else tuple(word.strip() for word in text.split(","))
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ConfigurationError(f"unknown fault {unknown[0]!r}", where="--fault", hint="use none, node, gpu, sdc, hang or all")
    return tuple(word for word in known if word in words)


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    from regrow.cli.tables import console

    screen = console()
    whole = not screen.is_terminal  # in a log each check is one line, however long
    names = list(dict.fromkeys(name for incident in result["incidents"] for name in incident.get("phases", {})))
    table = Table(title="Recoveries (seconds)", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("fault", no_wrap=True)
    table.add_column("node", no_wrap=True)
    for name in [*names, "total"]:
        table.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
    for incident in result["incidents"]:
        cells = [f"{incident.get('phases', {}).get(name, 0.0):.2f}" for name in names]
        table.add_row(str(incident["kind"]), str(incident.get("node", "")), *cells, f"{incident.get('seconds') or 0:.2f}")
    screen.print(table)
    for check in result["checks"]:
        text = f"{'holds' if check['ok'] else 'FAILS'}  {check['name']}: {check['detail']}"
        screen.print(text, style=None if check["ok"] else "bold red", soft_wrap=whole)
    screen.print(result["summary"], soft_wrap=whole)
    screen.print(f"report: {result['report']}", soft_wrap=True)
