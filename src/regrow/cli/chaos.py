"""`regrow chaos`: injected faults with ground truth and a score card."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from regrow.chaos.score import Card

_COLUMNS = 79


def register(app: typer.Typer) -> None:
    """Add `chaos run|ls`."""
    group = typer.Typer(help="Injected faults with ground truth and a score card.", no_args_is_help=True)
    group.command("run")(run)
    group.command("ls")(ls)
    app.add_typer(group, name="chaos")


def run(
    plan: Annotated[str, typer.Argument(help="TOML file, or the name of a built-in plan.")] = "",
    draw: Annotated[int, typer.Option("--draw", min=0, help="Instead of a plan: so many random faults, by --seed.")] = 0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Of the plan; wins over the file.")] = None,
    nodes: Annotated[int, typer.Option("--nodes", min=2, help="Of a drawn plan.")] = 4,
    run_dir: Annotated[str, typer.Option("--run-dir", help="Folder of the run, empty or new.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and print the plan, break nothing.")] = False,
    stay: Annotated[bool, typer.Option("--stay", help="Keep the cluster after the plan, to look at, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Break a local cluster as the plan says and judge what Regrow made of it. Exit 1: something was missed or named wrongly."""
    import asyncio

    import msgspec

    from regrow.chaos import plan as plans

    if bool(plan) == bool(draw):
        raise ConfigurationError("give either a plan or --draw N", where="regrow chaos run", hint="`regrow chaos ls` lists plans and kinds")
    chosen = plans.draw(draw, seed=seed or 0, nodes=nodes) if draw else plans.load(plan)
    if seed is not None:
        chosen = msgspec.structs.replace(chosen, seed=seed)
    if dry_run:
        emit(plans.document(chosen), as_json=as_json, human=lambda: _tell_plan(plans.document(chosen)))
        return
    if plans.needs_dcgm(chosen):
        from regrow.chaos import dcgm

        dcgm.check()
    if plans.needs_namespace(chosen):
        from regrow.chaos import namespace

        namespace.enter(sys.argv[1:])
    from regrow.chaos.runner import Runner

    folder = Path(run_dir) if run_dir else Path("runs") / f"chaos-{chosen.name}-{chosen.seed}"
    card = asyncio.run(Runner(chosen, folder, stay=stay).run())
    emit(card, as_json=as_json, human=lambda: tell_card(card))
    raise typer.Exit(0 if card.ok else 1)


def ls(as_json: Json = False) -> None:
    """Kinds of fault with what Regrow must say, and the built-in plans."""
    from regrow.chaos import kinds, plan

    document = {
        "kinds": list(kinds.KINDS.values()),
        "plans": {name: plan.document(plan.load(name)) for name in plan.BUILT_IN},
        "costs": kinds.COSTS,
    }

    def human() -> None:
        for one in kinds.KINDS.values():
            answer = f"{' or '.join(one.incidents)}, names the {one.names}" if one.incidents else "no incident"
            sys.stdout.write(f"{one.name:<16} {one.text}\n{'':17}right: {answer}\n")
        sys.stdout.write(f"plans: {', '.join(plan.BUILT_IN)}\n")

    emit(document, as_json=as_json, human=human)


def _tell_plan(document: dict[str, object]) -> None:
    faults = document["fault"]
    assert isinstance(faults, list)
    sys.stdout.write(f"plan {document['name']}, seed {document['seed']}: {len(faults)} faults\n")
    for fault in faults:
        sys.stdout.write(f"  {fault['kind']} node={fault['node']} rank={fault['rank']}\n")


def tell_card(card: Card) -> None:
    """Print a card within 80 columns: what was said, and about what, on lines of their own."""
    write = sys.stdout.write
    write(f"{'fault':<16} {'where':<8} {'verdict':<13} {'detect':>9} {'recover':>9} {'lost steps':>10}\n")
    for mark in card.marks:
        where = mark.node + (f"/{mark.rank}" if mark.rank >= 0 else "")
        seen = "-" if mark.detect_seconds is None else f"{mark.detect_seconds:.2f} s"
        back = "-" if mark.recover_seconds is None else f"{mark.recover_seconds:.2f} s"
        lost = "-" if mark.lost_steps is None else str(mark.lost_steps)
        write(f"{mark.kind:<16} {where or '-':<8} {mark.error or 'right':<13} {seen:>9} {back:>9} {lost:>10}\n")
        for text in (mark.detail, mark.said):
            write(textwrap.fill(text, _COLUMNS, initial_indent=" " * 4, subsequent_indent=" " * 6, max_lines=3) + "\n" if text else "")
    write(
        f"detected {card.num_detected} of {card.num_expected}, named right {card.num_named_right}; cost {card.cost:g}\n"
        f"{card.num_false_alarms} false alarms in {card.observed_hours * 60:.1f} min "
        f"(at most {card.false_alarms_per_day_upper95:.0f} a day, 95 %)\n"
    )
