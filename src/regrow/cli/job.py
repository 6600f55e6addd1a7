"""`regrow job`: submit, look at and steer jobs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from regrow.cli import complete, remote, tables
from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError, OperationalError

Name = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=complete.jobs)]


def register(app: typer.Typer) -> None:
    """Add `job`."""
    group = typer.Typer(help="Submit jobs, look at them, stop and pause them.", no_args_is_help=True)
    group.command("submit")(submit)
    group.command("ls")(ls)
    group.command("show")(show)
    for command in (stop, save_and_stop, pause, resume, abort):
        group.command(command.__name__.replace("_", "-"))(command)
    group.command("logs")(logs)
    group.command("where")(where)
    app.add_typer(group, name="job")


def submit(
    spec: Annotated[Path, typer.Argument(metavar="SPEC.json", help="Job specification (wire.JobSpec); - reads stdin.")],
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """Hand a job to a running cluster. `regrow run --supervisor URL script.py` does it from a command line."""
    try:
        content = sys.stdin.buffer.read() if str(spec) == "-" else spec.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", where=str(spec), hint="give a JSON file") from error
    document = remote.post(remote.find(supervisor, store, cluster), "/v1/jobs", content)
    emit(document, as_json=as_json, human=remote.writer(f"job {document['job']}: submitted\n"))


def ls(supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False) -> None:
    """All jobs."""
    document = remote.get(remote.find(supervisor, store, cluster), "/v1/jobs")
    emit(document, as_json=as_json, human=lambda: _table(document["jobs"]))


def show(
    job: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """One job: state, mesh, nodes, incidents with their phases, checkpoints, goodput. Exits 1 when the job failed."""
    document = remote.get(remote.find(supervisor, store, cluster), f"/v1/jobs/{job}")
    emit(document, as_json=as_json, human=lambda: _details(document))
    if document["state"] == "failed":
        raise typer.Exit(1)


def stop(
    job: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """Stop now: SIGTERM, a grace, SIGKILL. The last checkpoint stays."""
    _order(job, "stop", supervisor, store, cluster, as_json)


def save_and_stop(
    job: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """Save at the next step boundary, then stop."""
    _order(job, "save-and-stop", supervisor, store, cluster, as_json)


def pause(
    job: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """Save at the next step boundary and free the nodes until `resume`."""
    _order(job, "pause", supervisor, store, cluster, as_json)


def resume(
    job: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """Go on after `pause`."""
    _order(job, "resume", supervisor, store, cluster, as_json)


def abort(
    job: Name, supervisor: remote.Address = "", store: remote.StoreUrl = "", cluster: remote.Cluster = "local", as_json: Json = False
) -> None:
    """Kill at once, without a grace."""
    _order(job, "abort", supervisor, store, cluster, as_json)


def where(
    job: Name,
    rank: Annotated[int | None, typer.Option(help="Only this rank.", min=0)] = None,
    generation: Annotated[int | None, typer.Option(help="An earlier generation (the last 20 are kept).", min=1)] = None,
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """On which node and GPU a rank runs, or ran in an earlier generation."""
    params = {name: value for name, value in (("rank", rank), ("generation", generation)) if value is not None}
    document = remote.get(remote.find(supervisor, store, cluster), f"/v1/jobs/{job}/where", **params)

    def human() -> None:
        for item in document["ranks"]:
            sys.stdout.write(
                f"rank {item['rank']}: {item['node']} local {item['local_rank']} {item['device']} {item.get('coordinates', '')}\n"
            )

    emit(document, as_json=as_json, human=human)


def logs(
    job: Name,
    rank: Annotated[int, typer.Option(help="Rank whose output is shown.", min=0)] = 0,
    generation: Annotated[int | None, typer.Option(help="An earlier generation.", min=1)] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Last lines.", min=1)] = 50,
    state: Annotated[Path | None, typer.Option(help="State folder of the agent (or run folder of `regrow run`).")] = None,
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """The last lines of a rank's output, read from the state folder of its node on this machine."""
    from regrow.supervisor.logs import find_log, tail

    base = remote.find(supervisor, store, cluster)
    params = {"rank": rank} | ({"generation": generation} if generation is not None else {})
    placed = remote.get(base, f"/v1/jobs/{job}/where", **params)
    number, node = placed["generation"], placed["ranks"][0]["node"]
    path = find_log(state or Path("runs") / job, node=node, job=job, generation=number, rank=rank)
    if path is None:
        raise OperationalError(
            f"the log of rank {rank} is not on this machine",
            where=f"node {node}, generation {number}",
            hint="run this on that node with --state DIR",
        )
    text = tail(path, lines)
    document: dict[str, Any] = {"job": job, "rank": rank, "generation": number, "node": node, "path": str(path), "text": text}
    emit(document, as_json=as_json, human=remote.writer(text))


def _order(job: str, command: str, supervisor: str, store: str, cluster: str, as_json: bool) -> None:
    document = remote.post(remote.find(supervisor, store, cluster), f"/v1/jobs/{job}/{command}")
    text = f"{command} {job}: ordered\n" if document.get("changed") else f"{job} is {document.get('state')} already\n"
    emit(document, as_json=as_json, human=remote.writer(text))


def _table(jobs: list[dict[str, Any]]) -> None:
    rows = [
        (job["job"], job["state"], job["step"], job["mesh"] or "-", f"{job['loss']:.4f}" if job["loss"] is not None else "-")
        for job in jobs
    ]
    screen = tables.console()
    screen.print(tables.table(("job", "state", "#step", "mesh", "#loss"), rows) if rows else "no job")


def _bound(bound: dict[str, Any]) -> str:
    """Only of ranks and nodes whose parts of the state are nowhere else."""
    who = [
        f"{bound[key]} {name}{'' if bound[key] == 1 else 's'}"
        for key, name in (("sole_ranks", "rank"), ("sole_nodes", "node"))
        if bound[key]
    ]
    since = {"checkpoint": "the newest checkpoint", "memory": "the newest snapshot in memory", "start": "the start"}[bound["source"]]
    cost = f", {bound['seconds']:.1f} s at most now" if bound["seconds"] is not None else ""
    return f"without a replica: {' and '.join(who)}; the loss of one costs the work since {since}{cost}"


def _details(job: dict[str, Any]) -> None:
    screen = tables.console()
    screen.print(f"job {job['job']}: {job['state']}, generation {job['generation']}, step {job['step']}, mesh {job['mesh'] or '-'}")
    if job["reason"]:
        tables.indented(screen, f"{job['reason']}")
    tables.indented(
        screen,
        f"goodput {tables.percent(job['goodput'])}, ETTR {tables.percent(job['ettr'])}, {job['restarts']} restarts charged,"
        f" {job['lost_steps']} steps lost",
    )
    checkpoint = job["checkpoint"]
    if checkpoint["step"] is not None:
        verified = f", newest verified: step {checkpoint['verified_step']}" if checkpoint["verified_step"] is not None else ""
        tables.indented(screen, f"checkpoint of step {checkpoint['step']}, {tables.ago(checkpoint['age_seconds'])} old{verified}")
    for tier in checkpoint.get("tiers") or ():
        often = f"every {tier['interval_seconds']:.4g} s" if tier["interval_seconds"] > 0 else "not saved to"
        tables.indented(screen, f"{tier['tier']}: {often} ({tier['reason']})")
    bound = checkpoint.get("bound")
    if bound and (bound["sole_ranks"] or bound["sole_nodes"]):
        tables.indented(screen, _bound(bound))
    if checkpoint.get("void"):
        void = checkpoint["void"]
        tables.indented(screen, f"{void['count']} saves since then are void, the last of step {void['step']}: {void['reason']}")
    screen.print()
    nodes = [(node["node"], node["state"], tables.ranks(node["ranks"]) or "-", node["why"]) for node in job["nodes"]]
    screen.print(tables.table(("node", "state", "ranks", "why not"), nodes) if nodes else "no node")
    for item in job["incidents"]:
        spans = ", ".join(f"{name} {seconds:.2f}" for name, seconds in item["phases"].items())
        seconds = f"{item['seconds']:.2f} s" if item["seconds"] is not None else "open" if not item["closed"] else "closed"
        screen.print()
        screen.print(f"incident {item['id']}: {item['kind']} {item['node']} ({item['cause']}), {seconds}")
        tables.indented(screen, f"{item['text']}")
        tables.indented(screen, f"{item['rung'] or 'no answer yet'}; {item['lost_steps'] or 0} steps computed again; {spans}")
    outcome = job["outcome"]
    if outcome and outcome.get("traceback"):
        sys.stdout.write(f"rank {outcome['rank']} on {outcome['node']}:\n{outcome['traceback']}\n")
