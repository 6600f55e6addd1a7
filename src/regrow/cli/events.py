"""`regrow events`: the journal."""

from __future__ import annotations

import functools
import sys
from typing import Annotated, Any

import typer

from regrow.cli import remote, tables
from regrow.cli.output import Json, dumps, emit

_FREQUENT = frozenset(
    ("digests_reported", "spare_store_changed", "steps_completed", "checkpoint_moved", "checkpoint_gone", "set_checkpoint")
)


def register(app: typer.Typer) -> None:
    """Add `events`."""
    app.command("events")(events)


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as events happen.")] = False,
    job: Annotated[str, typer.Option(help="Only of this job.")] = "",
    after: Annotated[int, typer.Option(help="Only after this id.", min=0)] = 0,
    limit: Annotated[int, typer.Option(help="At most this many of what was, the newest.", min=1)] = 200,
    brief: Annotated[bool, typer.Option("--brief", "-b", help="Without what comes with every step and every save.")] = False,
    supervisor: remote.Address = "",
    store: remote.StoreUrl = "",
    cluster: remote.Cluster = "local",
    as_json: Json = False,
) -> None:
    """What happened and what was decided, with reasons. With --follow --json: one JSON document a line; a leader that moves is followed."""
    if not follow:
        document = remote.get(remote.find(supervisor, store, cluster), "/v1/events", after=after, job=job, limit=limit)
        document["events"] = [entry for entry in document["events"] if not brief or entry["kind"] not in _FREQUENT]
        emit(document, as_json=as_json, human=lambda: _print(document["events"]))
        if not document["events"]:
            left_out = " but frequent ones" if brief else ""
            sys.stderr.write(f"no event{f' of a job {job!r}' if job else ''}{f' after {after}' if after else ''}{left_out}\n")
        return
    find = functools.partial(remote.find, supervisor, store, cluster)
    try:
        for entry in remote.follow(find, "/v1/events", follow=1, after=after, job=job, limit=limit):
            if brief and entry["kind"] in _FREQUENT:
                continue
            if as_json:
                sys.stdout.write(dumps(entry) + "\n")
            else:
                _print([entry])
            sys.stdout.flush()
    except KeyboardInterrupt:
        return


def line(entry: dict[str, Any]) -> str:
    """An entry for people."""
    parts = [str(entry["time"])[11:23], str(entry["kind"])]
    parts += [f"{name}={entry[name]}" for name in ("job", "node", "generation") if entry.get(name)]
    text = str(entry.get("text", ""))
    return " ".join(parts) + (f": {text}" if text else "")


def _print(entries: list[dict[str, Any]]) -> None:
    """One line an entry, never wrapped: it is made for grep. On a terminal orders stand out from facts."""
    screen = tables.console()
    for entry in entries:
        screen.print(line(entry), style="bold" if "seq" in entry.get("data", {}) else "", soft_wrap=True)
