"""Transcripts: what happens, what is decided, and why, as text that people review. Re-record: REGROW_RECORD=1 pytest tests/golden."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from regrow.supervisor.core import actions as a
from regrow.supervisor.core import events as e
from regrow.supervisor.core import phases

FOLDER = Path(__file__).parent / "transcripts"
_LONG = 100


class Transcript:
    """Wraps a world and writes down each turn."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.lines: list[str] = []
        self._began = world.now
        original = world.tell

        def tell(*events: e.Event) -> Any:
            for event in events:
                if not isinstance(event, e.Tick):
                    self._say(f"- {_line(event, 'event')}")
            before = len(world.log)
            place = len(self.lines)
            decision = original(*events)
            own = world.log[before][1]
            told = [f"      why: {own.reason}"] if own.reason else []
            told += [f"    > {_line(action, 'action')}" for action in own.actions]
            if not told and isinstance(events[0], e.Tick):
                return decision
            if isinstance(events[0], e.Tick):
                told.insert(0, self._stamped("- (time passes)"))
            self.lines[place:place] = told
            return decision

        world.tell = tell

    def note(self, text: str) -> None:
        """A heading."""
        self.lines.append(f"# {text}")

    def _stamped(self, text: str) -> str:
        return f"{self.world.now - self._began:8.2f} {text}"

    def _say(self, text: str) -> None:
        self.lines.append(self._stamped(text))

    def finish(self) -> str:
        """The text, with the incidents at the end."""
        for job in self.world.view.jobs.values():
            for item in job.incidents:
                spans = " ".join(f"{name}={seconds:.2f}" for name, seconds in phases.spans(item).items())
                self.lines.append(
                    f"# incident {item.id} {item.kind} cause={item.cause} node={item.node} rank={item.rank} rung={item.rung}: {spans}"
                )
            if job.outcome is not None:
                self.lines.append(f"# outcome {job.outcome.state} exit={job.outcome.exit_code}: {job.outcome.reason}")
        return "\n".join(self.lines) + "\n"


def _line(value: msgspec.Struct, tag: str) -> str:
    data = msgspec.to_builtins(value, str_keys=True)
    kind = data.pop(tag)
    data.pop("at", None)
    if isinstance(value, a.RecordGeneration):
        spec = value.spec
        restore = spec.restore.step if spec.restore else 0
        extra = f" damaged={sorted(value.damaged)}" if value.damaged else ""
        charged = f" charge={value.charge.cause}" if value.charge else ""
        return f"{kind} generation={spec.generation} mesh={spec.mesh} nodes={','.join(spec.nodes)} restore={restore}{charged}{extra}"
    if isinstance(value, e.NodeJoined):
        hello = value.hello
        running = f" running={hello.running.generation}" if hello.running else ""
        return f"{kind} node={hello.node} incarnation={hello.incarnation}{running}"
    if isinstance(value, e.JobLoaded):
        return f"{kind} job={value.spec.job} nodes={value.spec.min_nodes}..{value.spec.max_nodes}"
    data.pop("ledger", None)
    return " ".join([kind, *(f"{name}={_short(item)}" for name, item in data.items())])


def _short(item: Any) -> str:
    text = item if isinstance(item, str) else msgspec.json.encode(item).decode()
    text = text.replace("\n", " / ")
    return text if len(text) <= _LONG else text[:_LONG] + "..."


def compare(name: str, text: str) -> None:
    """Compare with the recorded transcript, or record it."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("REGROW_RECORD") == "1":
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    assert path.exists(), f"no transcript {path.name}: record it with REGROW_RECORD=1"
    assert text == path.read_text(encoding="utf-8"), f"{path.name} differs: read the difference, then record it with REGROW_RECORD=1"
