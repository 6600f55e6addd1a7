"""`regrow interval`: how often to save, why, and what it costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli.output import Json, emit

_RATE, _COST, _FORM, _BOUND = "Failures (one of)", "Costs, in seconds", "Formula", "Bounds"


def register(app: typer.Typer) -> None:
    """Add `interval`."""
    app.command("interval")(interval)


def interval(
    *,
    preset: Annotated[
        str | None, typer.Option(help="seed, bloom or llama3: published numbers where no flag is given.", rich_help_panel=_RATE)
    ] = None,
    failures_per_hour: Annotated[float | None, typer.Option(help="Failures of the job an hour.", rich_help_panel=_RATE)] = None,
    mtbf_hours: Annotated[float | None, typer.Option(help="Mean time between failures of the job.", rich_help_panel=_RATE)] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs of the job, with --rate-per-gpu-hour.", rich_help_panel=_RATE)] = None,
    rate_per_gpu_hour: Annotated[float | None, typer.Option(help="Failures a GPU and hour, all causes.", rich_help_panel=_RATE)] = None,
    observed_failures: Annotated[
        int | None, typer.Option(help="Failures seen, with --observed-hours; 0 is an answer.", rich_help_panel=_RATE)
    ] = None,
    observed_hours: Annotated[float | None, typer.Option(help="Hours of the job in which they were seen.", rich_help_panel=_RATE)] = None,
    tier_share: Annotated[float, typer.Option(help="Share of the failures that need this tier of storage.", rich_help_panel=_RATE)] = 1.0,
    save_seconds: Annotated[float | None, typer.Option(help="C: time of a save.", rich_help_panel=_COST)] = None,
    stall_seconds: Annotated[
        float | None, typer.Option(help="Visible part of it when saves are asynchronous.", rich_help_panel=_COST)
    ] = None,
    restore_seconds: Annotated[float, typer.Option(help="R: time to restore.", rich_help_panel=_COST)] = 0.0,
    detect_seconds: Annotated[float, typer.Option(help="Time to notice a failure.", rich_help_panel=_COST)] = 0.0,
    step_seconds: Annotated[float, typer.Option(help="S: time of a training step.", rich_help_panel=_COST)] = 0.0,
    notice_seconds: Annotated[float, typer.Option(help="P: notice before a preemption.", rich_help_panel=_COST)] = 0.0,
    a: Annotated[float | None, typer.Option(help="Coefficient of a f T (seed: 4).", rich_help_panel=_FORM)] = None,
    b: Annotated[float | None, typer.Option(help="Coefficient of b / T (seed: 55.8).", rich_help_panel=_FORM)] = None,
    method: Annotated[
        str | None, typer.Option(help="seed, young, daly or exact (default with a save time).", rich_help_panel=_FORM)
    ] = None,
    min_seconds: Annotated[float, typer.Option(help="Lower bound.", rich_help_panel=_BOUND)] = 0.0,
    max_seconds: Annotated[float | None, typer.Option(help="Upper bound.", rich_help_panel=_BOUND)] = None,
    checkpoint_gb: Annotated[float, typer.Option(help="Size of a checkpoint in GB.", rich_help_panel=_BOUND)] = 0.0,
    write_gb_per_second: Annotated[float, typer.Option(help="Bandwidth that saves may use on average.", rich_help_panel=_BOUND)] = 0.0,
    storage_gb: Annotated[float, typer.Option(help="Space for checkpoints.", rich_help_panel=_BOUND)] = 0.0,
    keep: Annotated[int, typer.Option(help="Checkpoints that are kept.", rich_help_panel=_BOUND)] = 3,
    max_lost_gpu_hours: Annotated[float, typer.Option(help="Most that one failure may cost; needs --gpus.", rich_help_panel=_BOUND)] = 0.0,
    node_state_gb: Annotated[float, typer.Option(help="What the ranks of a node save, in GB.", rich_help_panel=_BOUND)] = 0.0,
    node_memory_gb: Annotated[
        float, typer.Option(help="Memory of a node for snapshots, its live state not counted.", rich_help_panel=_BOUND)
    ] = 0.0,
    max_stall_share: Annotated[
        float, typer.Option(help="Share of the time that stalls of a tier may take; 0: no limit.", rich_help_panel=_BOUND)
    ] = 0.0,
    tier: Annotated[list[str] | None, typer.Option(help="NAME:SHARE:STALL:WRITE, an interval of its own for each.")] = None,
    svg: Annotated[Path | None, typer.Option(help="Write E(T) as a picture.")] = None,
    json: Json = False,
) -> None:
    """Optimal checkpoint interval, E(T), bounds and warnings."""
    flags: dict[str, Any] = dict(locals())
    from regrow.cli import interval_answer

    document = interval_answer.answer(flags)
    if svg is not None:
        interval_answer.write_svg(document, svg)
    emit(document, as_json=json, human=lambda: _show(document))


def _show(document: dict[str, Any]) -> None:
    from regrow.parallel.draw import curve_text

    def line(text: str) -> None:
        typer.echo(text)

    if document["preset"]:
        line(f"preset     {document['preset']['name']}: {document['preset']['source']}")
    mtbf, hours = document["mtbf_hours"], document["t_opt_hours"]
    line(f"failures   {document['failures_per_hour']:.4g} an hour: MTBF {mtbf:.4g} h ({document['rate_scope']})")
    line(f"formula    {document['method']}: {document['formula']}")
    line(f"T*         {hours:.4g} h = {hours * 3600:.6g} s; cost {document['expected_cost_at_t_opt']:.4g} {document['cost_unit']}")
    used = document["interval_seconds"]
    steps = f" = {document['steps']} steps" if document["steps"] else ""
    line(f"use        {used:.6g} s{steps}: {document['bounds']['rule_text']}")
    if document["overhead_ratio"] is not None:
        line(f"overhead   {document['overhead_ratio']:.2%} of the time: saves, lost work, detection, restore")
    if document["notice"]["needed_seconds"] and document["notice"]["given_seconds"]:
        line(f"notice     {document['notice']['needed_seconds']:g} s needed, {document['notice']['given_seconds']:g} s given")
    line("")
    points = [(point["hours"], point["cost"]) for point in document["curve"] if math.isfinite(point["cost"])]
    for row in curve_text(points, mark=hours):
        line(row)
    line(f"            interval in hours (log), cost in {document['cost_unit']}; + is T*")
    for tier in document["tiers"]:
        line(f"tier {tier['name']}: every {tier['interval_seconds']:.4g} s ({tier['reason']})")
    for warning in document["warnings"]:
        line(f"warning: {warning}")
