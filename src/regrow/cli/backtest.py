"""`regrow backtest`: what Regrow would have done with a site's own history."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from regrow.supervisor.sim.history import Evidence

_LATER = "at_idle"
"""Actions that wait until the node is idle take nobody out of a job."""


def register(app: typer.Typer) -> None:
    """Add `backtest`."""
    app.command("backtest")(backtest)


def backtest(
    *,
    jobs: Annotated[Path, typer.Option(help="Job accounting: job,start,end,state[,nodes,gpus,nodelist,failed_node].")],
    steps: Annotated[Path | None, typer.Option(help="Step log: at,step[,job].")] = None,
    kernel: Annotated[Path | None, typer.Option(help="Kernel log: at,line[,node].")] = None,
    policy: Annotated[str, typer.Option(help="dp-shrink, replan or spares:N.")] = "replan",
    seeds: Annotated[int, typer.Option(help="Simulated runs.")] = 20,
    save_seconds: Annotated[float, typer.Option(help="From a snapshot to durable.")] = 30.0,
    stall_seconds: Annotated[float, typer.Option(help="What a save holds training up.")] = 1.0,
    step_seconds: Annotated[float, typer.Option(help="Step time where no step log says it.")] = 0.0,
    constants: Annotated[Path | None, typer.Option(help="TOML with other delays (docs/simulator.md).")] = None,
    json: Json = False,
) -> None:
    """What Regrow would have done with a site's own history: hours saved, and wrong evictions."""
    from regrow.supervisor.sim import backtest as engine
    from regrow.supervisor.sim import constants as delays
    from regrow.supervisor.sim import history

    if not 2 <= seeds <= 10_000:
        raise ConfigurationError(f"{seeds} seeds", where="--seeds", hint="give 2 to 10000")
    for flag, value in (("--save-seconds", save_seconds), ("--stall-seconds", stall_seconds), ("--step-seconds", step_seconds)):
        if not 0.0 <= value < float("inf"):
            raise ConfigurationError(f"{value} seconds", where=flag, hint="give a finite number of at least 0")
    attempts = history.attempts(jobs)
    progress = history.progress(steps, attempts[0].job) if steps is not None else []
    evidence = _evidence(kernel) if kernel is not None else []
    costs = engine.Costs(
        constants=delays.load(constants), policy=policy, save_seconds=save_seconds, stall_seconds=stall_seconds, step_seconds=step_seconds
    )
    document = engine.backtest(engine.cases(attempts, progress, evidence), costs, seeds=seeds)

    def human() -> None:
        for line in _text(document):
            typer.echo(line)

    emit(document, as_json=json, human=human)


def _evidence(path: Path) -> list[Evidence]:
    """Lines that the health monitor's table takes for a broken part, to be taken out at once."""
    from regrow.agent.health.classify import BROKEN_PART, classify
    from regrow.supervisor.sim import history

    found: list[history.Evidence] = []
    for row in history.kernel(path):
        line = classify(row.line)
        if line.tier == BROKEN_PART and not line.action.endswith(_LATER):
            action = "replace" if "replace" in line.action else "reset"
            found.append(history.Evidence(at=row.at, node=row.node, kind=line.kind, action=action, line=row.line))
    return found


def _text(document: dict[str, Any]) -> list[str]:
    lost, saved, evictions = document["lost_hours"], document["saved_hours"], document["evictions"]
    lines: list[str] = []
    for job in document["jobs"]:
        lines.append(
            f"{job['job']}: {job['nodes']} nodes, {job['gpus']} GPUs, {job['hours']:.1f} h, {len(job['interruptions'])} interruptions"
        )
        lines += [f"  {stop['lost_seconds'] / 60:8.1f} min  {stop['kind']:<8} {stop['why']}" for stop in job["interruptions"]]
    regrow = lost["regrow"]
    lines += [
        f"lost       {lost['observed']:.2f} h as it was; {regrow['p50']:.2f} h with Regrow (p5 {regrow['p5']:.2f}, p95 {regrow['p95']:.2f})",
        f"saved      {saved['point']:.2f} h (90 % interval {saved['low']:.2f} to {saved['high']:.2f}), {document['saved_gpu_hours']:.0f} GPU-hours",
    ]
    bound = f" (true share below {evictions['upper95']:.0%} with 95 % confidence)" if evictions["verdicts"] else ""
    lines.append(f"evictions  {evictions['wrong']} of {evictions['verdicts']} verdicts would have been wrong{bound}")
    lines += [f"  {line['node']}: {line['line']}" for line in evictions["lines"]]
    return lines + [f"warning: {warning}" for warning in document["warnings"]]
