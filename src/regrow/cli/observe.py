"""`regrow observe`: Prometheus and Alertmanager for a running cluster, or for a chaos run or demo that it starts itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli import remote
from regrow.cli.output import Json, emit, say
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from regrow.observe.session import Options

_FACTOR_OF_A_SHORT_RUN = 1.0 / 30.0
"""A run of minutes sees in seconds what the rules expect in minutes."""


def register(app: typer.Typer) -> None:
    """Add `observe`."""
    app.command("observe")(observe)


def observe(
    chaos: Annotated[str, typer.Option(metavar="PLAN", help="Start `regrow chaos run PLAN` and watch it.")] = "",
    demo: Annotated[bool, typer.Option("--demo", help="Start `regrow demo` and watch it.")] = False,
    once: Annotated[bool, typer.Option("--once", help="End with the run that was started, instead of at Ctrl-C.")] = False,
    run_dir: Annotated[str, typer.Option(help="Folder for configuration, rules and data.")] = "runs/observe",
    prometheus_port: Annotated[int, typer.Option(min=0, max=65535, help="Loopback port; 0: any free one.")] = 9090,
    alertmanager_port: Annotated[int, typer.Option(min=0, max=65535, help="Loopback port; 0: any free one.")] = 9093,
    pace: Annotated[float, typer.Option(help="Shorten all times in the rules by this factor; 0: 1, and 1/30 for a run it starts.")] = 0.0,
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """Prometheus and Alertmanager with Regrow's rules. Stays until Ctrl-C, then says which alerts fired; --once exits as the run did."""
    import asyncio

    from regrow.observe import session
    from regrow.observe.stack import binaries

    if bool(chaos) + demo + bool(supervisor or store) > 1:
        raise ConfigurationError("give one of --chaos, --demo and --supervisor or --store", where="regrow observe")
    if once and not (chaos or demo):
        raise ConfigurationError("needs a run that this command starts", where="--once", hint="add --chaos smoke or --demo")
    if pace < 0 or pace > 1:
        raise ConfigurationError(f"{pace} is not a share", where="--pace", hint="above 0 and at most 1")
    binaries()
    if chaos:
        from regrow.chaos import plan

        plan.load(chaos)
    started = session.command(chaos, demo=demo, root=Path(run_dir), stay=not once)
    factor = pace or (_FACTOR_OF_A_SHORT_RUN if started else 1.0)
    find = session.of_run(Path(run_dir)) if started else lambda: remote.find(supervisor, store, cluster)
    known = "" if started else find()
    if known:
        remote.get(known, "/healthz")
    options = session.Options(
        root=Path(run_dir),
        started=started,
        once=once,
        factor=factor,
        ports=(prometheus_port, alertmanager_port),
        find=find,
        https=(known or "").startswith("https:"),
    )
    document = asyncio.run(session.run(options, tell=lambda at: _tell(at, options, known), say=say))
    emit(document, as_json=as_json, human=lambda: _story(document))
    raise typer.Exit((document["run_exit_code"] or 0) if once else 0)


def _tell(addresses: dict[str, str], options: Options, supervisor: str | None) -> None:
    if supervisor:
        say(f"page          {supervisor}/")
    say(f"Prometheus    {addresses['alerts_page']}")
    say(f"Alertmanager  {addresses['alertmanager']} (amtool --alertmanager.url={addresses['alertmanager']} alert)")
    say(f"files         {addresses['root']} (rules with all times x {options.factor:.3g})")
    say(addresses["grafana"])
    say("ends with the run" if options.once else "Ctrl-C ends it; until then all of it can be looked at")


def _story(document: dict[str, Any]) -> None:
    write = sys.stdout.write
    if document["run_exit_code"] is not None:
        write(f"the run ended with {document['run_exit_code']}; its output is in {document['root']}/run.log\n")
    if not document["alerts"]:
        write("no alert fired\n")
        return
    write(f"{'alert':<26} {'':<7} {'from':>8} {'to':>8}  labels\n")
    for one in document["alerts"]:
        labels = " ".join(f"{name}={text}" for name, text in sorted(one["labels"].items()) if name != "cluster")
        to = f"{one['to_seconds']:.0f} s" if one["cleared"] else "firing"
        write(
            f"{one['alert']:<26} {one['severity']:<7} {one['from_seconds']:>6.0f} s {to:>8}  {labels}{' (silenced: the run came to its end)' if one['silenced'] else ''}\n"
        )
