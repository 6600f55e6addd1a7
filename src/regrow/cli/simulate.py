"""`regrow simulate`: goodput of a policy on a failure trace, by the production decision core in virtual time."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

_SIZE, _FAULTS, _COST, _RUN, _REAL = "Cluster", "Failures", "Costs, in seconds", "Runs", "Against runs that happened"
_LEADER = "What one leader bears"


def register(app: typer.Typer) -> None:
    """Add `simulate`."""
    app.command("simulate")(simulate)


def simulate(
    context: typer.Context,
    *,
    nodes: Annotated[int, typer.Option(help="Nodes that train; spares come on top.", rich_help_panel=_SIZE)] = 2048,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs a node.", rich_help_panel=_SIZE)] = 8,
    days: Annotated[float | None, typer.Option(help="Length (default: 54, or that of the trace).", rich_help_panel=_SIZE)] = None,
    mesh: Annotated[
        str | None, typer.Option(help="DP x PP in nodes, as in dp=128,pp=16; tensor parallelism fills a node.", rich_help_panel=_SIZE)
    ] = None,
    rate_per_gpu_hour: Annotated[
        float | None, typer.Option(help="Failures a GPU and hour, all causes (default: Llama 3's).", rich_help_panel=_FAULTS)
    ] = None,
    trace: Annotated[str | None, typer.Option(help="llama3, a CSV or JSON history, or a run's journal.", rich_help_panel=_FAULTS)] = None,
    shape: Annotated[float, typer.Option(help="Weibull shape of the gaps; below 1: in batches.", rich_help_panel=_FAULTS)] = 1.0,
    rack_size: Annotated[int, typer.Option(help="Nodes of a rack or NVLink domain.", rich_help_panel=_FAULTS)] = 0,
    rack_share: Annotated[float, typer.Option(help="Share of the failures that take a whole rack.", rich_help_panel=_FAULTS)] = 0.0,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Everything breaks, then must converge: for safety, not goodput.", rich_help_panel=_FAULTS)
    ] = False,
    policy: Annotated[str, typer.Option(help="fixed-world, dp-shrink, replan or spares:N.", rich_help_panel=_RUN)] = "replan",
    compare: Annotated[bool, typer.Option("--compare", help="All policies on the same failures.", rich_help_panel=_RUN)] = False,
    seeds: Annotated[int, typer.Option(help="Runs.", rich_help_panel=_RUN)] = 5,
    seed: Annotated[int, typer.Option(help="First seed.", rich_help_panel=_RUN)] = 1,
    save_seconds: Annotated[float, typer.Option(help="From a snapshot to durable.", rich_help_panel=_COST)] = 30.0,
    stall_seconds: Annotated[float, typer.Option(help="What a save holds training up.", rich_help_panel=_COST)] = 1.0,
    step_seconds: Annotated[float, typer.Option(help="Step of the full mesh.", rich_help_panel=_COST)] = 6.2,
    interval_seconds: Annotated[float, typer.Option(help="Fixed interval; 0: the optimum.", rich_help_panel=_COST)] = 0.0,
    constants: Annotated[Path | None, typer.Option(help="TOML with other delays (docs/simulator.md).", rich_help_panel=_COST)] = None,
    journal: Annotated[Path | None, typer.Option(help="Write every turn as a line of JSON.", rich_help_panel=_RUN)] = None,
    svg: Annotated[Path | None, typer.Option(help="Write lost time by phase as a picture.", rich_help_panel=_RUN)] = None,
    curves: Annotated[
        Path | None, typer.Option(help="36 points: recovery time x failure rate x interval, as a page.", rich_help_panel=_RUN)
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Journal of a run with faults: simulate it and compare the recovery phases. Repeatable.", rich_help_panel=_REAL),
    ] = None,
    measure: Annotated[
        list[Path] | None, typer.Option(help="Journals in which --against measures its delays. Repeatable.", rich_help_panel=_REAL)
    ] = None,
    leader: Annotated[bool, typer.Option("--leader", help="No training: its beats, reports, greetings.", rich_help_panel=_LEADER)] = False,
    group: Annotated[int, typer.Option(help="Nodes that an aggregator stands for.", rich_help_panel=_LEADER)] = 64,
    costs: Annotated[
        Path | None, typer.Option(help="What benchmarks/aggregators.py --json printed, or TOML like leader.toml.", rich_help_panel=_LEADER)
    ] = None,
    json: Json = False,
) -> None:
    """Goodput of a policy on a failure trace, by the production decision core in virtual time."""
    flags: dict[str, Any] = dict(locals())
    _check_modes(context)
    if leader or costs is not None:
        _leader(group, costs, seed, as_json=json)
        return
    if against or measure:
        _against(against or [], measure or [], seeds, as_json=json)
        return
    from regrow.supervisor.sim import answer, show

    request = _request(flags)
    if curves is not None:
        _curves(request, curves, as_json=json)
        return
    document = answer.compare(request) if compare else answer.answer(request)
    if svg is not None:
        show.svg(document, svg)
    emit(document, as_json=json, human=lambda: typer.echo("\n".join(show.text(document))))


_MODES: tuple[tuple[tuple[str, ...], frozenset[str]], ...] = (
    (("leader", "costs"), frozenset(("leader", "costs", "group", "seed", "json"))),
    (("against", "measure"), frozenset(("against", "measure", "seeds", "json"))),
)
"""(flags of which one chooses what is done, all flags that it knows)."""


def _check_modes(context: typer.Context) -> None:
    """A flag that would be passed over in silence is an error."""
    given = {name for name in context.params if (source := context.get_parameter_source(name)) is not None and source.name != "DEFAULT"}
    for chosen, known in _MODES:
        mode = [name for name in chosen if name in given]
        unknown = sorted(given - known) if mode else []
        if unknown:
            raise ConfigurationError(
                f"--{mode[0]} knows no --{unknown[0].replace('_', '-')}",
                where=f"--{mode[0]}, --{unknown[0].replace('_', '-')}",
                hint=f"with it: {', '.join(f'--{name}' for name in sorted(known - {mode[0]}))}",
            )
    pairs = (("curves", "compare"), ("curves", "svg"), ("curves", "journal"), ("compare", "journal"), ("compare", "policy"))
    for one, other in pairs:
        if {one, other} <= given:
            raise ConfigurationError(f"--{one} knows no --{other}", where=f"--{one}, --{other}", hint="give one of the two")
    if "group" in given and not {"leader", "costs"} & given:
        raise ConfigurationError("--group is of --leader", where="--group", hint="add --leader")


def _leader(group: int, costs: Path | None, seed: int, *, as_json: bool) -> None:
    from regrow.supervisor.sim import leader_answer, leader_costs

    request = leader_answer.Request(costs=leader_costs.load(costs), group=group, seed=seed)
    document = leader_answer.answer(request)

    def human() -> None:
        for line in leader_answer.text(document):
            typer.echo(line)

    emit(document, as_json=as_json, human=human)


def _against(journals: list[Path], measured_in: list[Path], seeds: int, *, as_json: bool) -> None:
    from regrow.supervisor.sim import fidelity, recorded

    if not journals or not measured_in:
        raise ConfigurationError(
            "a comparison needs journals of both kinds",
            where="--against, --measure",
            hint="measure delays in one run and try them on another: --measure RUN1 --against RUN2",
        )
    same = {path.resolve() for path in journals} & {path.resolve() for path in measured_in}
    if same:
        raise ConfigurationError(
            f"{min(same)} is measured in and compared with", where="--against, --measure", hint="a run that is fitted proves nothing"
        )
    if seeds < 1:
        raise ConfigurationError(f"{seeds} seeds", where="--seeds", hint="give at least 1")
    document = fidelity.compare([recorded.read(path) for path in measured_in], [recorded.read(path) for path in journals], seeds=seeds)

    def human() -> None:
        for line in fidelity.text(document):
            typer.echo(line)

    emit(document, as_json=as_json, human=human)
    if not document["ok"]:
        raise typer.Exit(1)


def _curves(request: Any, path: Path, *, as_json: bool) -> None:
    from regrow.supervisor.sim import curves

    document = curves.curves(request)
    curves.page(document, path)

    def human() -> None:
        for line in curves.text(document):
            typer.echo(line)

    emit(document, as_json=as_json, human=human)


def _request(flags: dict[str, Any]) -> Any:
    from regrow.ids import MeshShape
    from regrow.supervisor.sim import answer, constants, faults
    from regrow.supervisor.sim.setup import LLAMA3_RATE, Setup

    trace = flags["trace"] or ""
    if trace and flags["rate_per_gpu_hour"] is not None:
        raise ConfigurationError("a trace and a rate are given", where="--trace, --rate-per-gpu-hour", hint="give one of the two")
    if trace and flags["chaos"]:
        raise ConfigurationError("a trace and chaos are given", where="--trace, --chaos", hint="give one of the two")
    days = flags["days"]
    if days is None and trace not in ("", "llama3"):
        hours = faults.last_hours(Path(trace))
        days = math.ceil(hours) / 24.0 if hours > 0 else None
    setup = Setup(
        constants=constants.load(flags["constants"]),
        nodes=flags["nodes"],
        gpus_per_node=flags["gpus_per_node"],
        days=54.0 if days is None else days,
        policy=flags["policy"],
        rate_per_gpu_hour=LLAMA3_RATE if flags["rate_per_gpu_hour"] is None else flags["rate_per_gpu_hour"],
        save_seconds=flags["save_seconds"],
        stall_seconds=flags["stall_seconds"],
        step_seconds=flags["step_seconds"],
        interval_seconds=flags["interval_seconds"],
        mesh=MeshShape.parse(flags["mesh"]) if flags["mesh"] else None,
    )
    return answer.check_request(
        answer.Request(
            setup=setup,
            trace=trace,
            shape=flags["shape"],
            rack=flags["rack_size"],
            rack_share=flags["rack_share"],
            chaos=flags["chaos"],
            seeds=flags["seeds"],
            first_seed=flags["seed"],
            journal=flags["journal"],
            replay=_replay(flags),
        )
    )


def _replay(flags: dict[str, Any]) -> str:
    """The command line that repeats one seed, with its journal."""
    words = ["regrow simulate"]
    for name in ("nodes", "gpus_per_node", "days", "mesh", "rate_per_gpu_hour", "trace", "shape", "rack_size", "rack_share", "policy"):
        value = flags[name]
        if value not in (None, 0, 0.0):
            words.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    for name in ("save_seconds", "stall_seconds", "step_seconds", "interval_seconds", "constants"):
        value = flags[name]
        if value not in (None, 0.0):
            words.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    if flags["chaos"]:
        words.append("--chaos")
    return " ".join([*words, "--seeds 1 --seed {seed} --journal seed-{seed}.jsonl"])
