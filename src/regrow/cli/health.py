"""`regrow health`: this node's verdict, or what the lines of a log mean."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regrow.cli.output import Json, emit
from regrow.errors import ConfigurationError

if TYPE_CHECKING:
    from regrow.agent.health.base import Outcome
    from regrow.agent.health.host import HostSample
    from regrow.agent.health.policy import Policy
    from regrow.agent.health.sample import NodeSample

_EXIT_BY_STATE = {"healthy": 0, "degraded": 3, "unhealthy": 1, "unknown": 1}


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command("health", help="This node's verdict; or classify log lines.")
    def _health(
        classify: Annotated[
            Path | None, typer.Option("--classify", metavar="FILE", help="Classify the lines of a log; - reads standard input.")
        ] = None,
        state: Annotated[Path | None, typer.Option("--state", metavar="FILE", help="State file of the fake NVML for this call.")] = None,
        explain: Annotated[bool, typer.Option("--explain", help="Say which rule, threshold and history led to the verdict.")] = False,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Judge with --policy and say what would be done; nothing ever acts here.")
        ] = False,
        policy: Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="Policy file instead of the package's.")] = None,
        agent_state: Annotated[
            Path | None, typer.Option("--agent-state", metavar="DIR", help="State folder of the agent: judge with its history.")
        ] = None,
        clear: Annotated[
            str, typer.Option("--clear", metavar="INCIDENT", help="Tell the agent of --agent-state that an incident (or `all`) is over.")
        ] = "",
        why: Annotated[str, typer.Option("--why", help="For the audit of --clear: what was done or tested.")] = "",
        deadline: Annotated[float, typer.Option("--deadline", min=0.1, help="Seconds after which a silent driver is hung.")] = 10.0,
        as_json: Json = False,
    ) -> None:
        if clear:
            _clear(clear, agent_state, why, as_json=as_json)
        elif classify is not None:
            _classify(classify, explain=explain, as_json=as_json)
        else:
            _judge(state, policy, agent_state, deadline, explain=explain or dry_run, as_json=as_json)


def _clear(incident: str, agent_state: Path | None, why: str, *, as_json: bool) -> None:
    """Leave a request that the running agent takes within a second; what still holds it finds again."""
    import getpass

    from regrow.agent.health import history

    hint = "--agent-state DIR, the folder that `regrow agent --state` has"
    if agent_state is None:
        raise ConfigurationError("needs the state folder of the agent", where="--clear", hint=hint)
    if not agent_state.is_dir():
        raise ConfigurationError("is no folder", where=f"--agent-state {agent_state}", hint=hint)
    if not why:
        raise ConfigurationError("needs a reason for the audit", where="--clear", hint='--why "memory test passed"')
    known = history.load(agent_state / "health.json")
    open_now = [one.incident for one in known.conditions]
    if incident != "all" and incident not in open_now:
        raise ConfigurationError(f"no open incident {incident!r}", where="--clear", hint=f"open: {', '.join(open_now) or 'none'}; or `all`")
    request = history.ClearRequest(incident="" if incident == "all" else incident, by=getpass.getuser(), why=why)
    history.request_clear(agent_state, request)
    cleared = open_now if incident == "all" else [incident]
    emit({"requested": cleared, "by": request.by}, as_json=as_json, human=lambda: _say(f"asked the agent to clear: {', '.join(cleared)}\n"))


def _say(text: str) -> None:
    sys.stdout.write(text)


def _classify(path: Path, *, explain: bool, as_json: bool) -> None:
    from regrow.agent.health import classify as classifier

    lines = classifier.classify_lines(_lines_of(path))
    verdict = classifier.verdict(lines)
    document = {
        "lines": [
            {"line": one.line, "class": one.kind, "action": one.action, "role": one.role, "xid": one.xid, "source": one.source}
            for one in lines
        ],
        "verdict": {
            "class": verdict.kind,
            "action": verdict.action,
            "first_line": verdict.first_line or None,
            "reason": verdict.reason,
        },
    }

    def human() -> None:
        for one in lines:
            if one.kind != "benign" or explain:
                xid = f" xid={one.xid}" if one.xid is not None else ""
                sys.stdout.write(f"{one.line:>6}  {one.kind:<24} {one.action:<28} {one.role:<9}{xid}\n        {one.text[:160]}\n")
        sys.stdout.write(f"verdict: {verdict.kind}, action {verdict.action}: {verdict.reason}\n")

    emit(document, as_json=as_json, human=human)


def _lines_of(path: Path) -> list[str]:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise ConfigurationError(
            f"cannot be read: {error.strerror}", where=f"--classify {path}", hint="name a log file, or - for stdin"
        ) from error
    lines = data.decode(errors="replace").split("\n")
    return lines[:-1] if lines and not lines[-1] else lines


def _judge(
    state: Path | None, policy_file: Path | None, agent_state: Path | None, deadline: float, *, explain: bool, as_json: bool
) -> None:
    from regrow.agent.health import base, history, host, network
    from regrow.agent.health import policy as policies
    from regrow.agent.health.prober import probe_once
    from regrow.agent.health.xid import XidSeen

    if state is not None:
        _check_state(state)
    policy = policies.load(policy_file) if policy_file is not None else policies.default()
    sample = probe_once(deadline_seconds=deadline, fake_state=state)
    machine = host.read_host(agent_state or Path.cwd(), with_processes=True)
    before = history.load(agent_state / "health.json") if agent_state is not None else history.History()
    now = time.time()
    links = network.read_links()
    outcome = base.evaluate(
        base.Observation(
            at=now,
            sample=sample,
            xids=tuple(XidSeen(code=one.data, at=now, uuid=one.uuid) for one in sample.events if one.kind == base.XID_EVENT),
            events=tuple(one for one in sample.events if one.kind != base.XID_EVENT),
            host=tuple(host.findings(machine, policy.host)),
        ),
        before,
        policy,
    )
    document = _document(sample, outcome, machine)
    document["links"] = links
    if explain:
        document["explain"] = _explanation(outcome, policy)
    emit(document, as_json=as_json, human=lambda: _tell(sample, outcome, policy if explain else None))
    raise typer.Exit(_EXIT_BY_STATE[outcome.verdict.state])


def _check_state(state: Path) -> None:
    import json

    try:
        json.loads(state.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError("cannot be read", where=f"--state {state}", hint="docs/fake-nvml.md shows how to write one") from error
    except ValueError as error:
        raise ConfigurationError(f"is not JSON: {error}", where=f"--state {state}", hint="docs/fake-nvml.md shows the keys") from error


def _document(sample: NodeSample, outcome: Outcome, machine: HostSample) -> dict[str, Any]:
    verdict = outcome.verdict
    return {
        "state": verdict.state,
        "action": verdict.action,
        "reason": verdict.reason,
        "incident": verdict.incident,
        "device_uuids": verdict.device_uuids,
        "evidence": verdict.evidence,
        "probe": {
            "status": sample.status,
            "error": sample.error,
            "detail": sample.detail,
            "seconds": sample.seconds,
            "driver_version": sample.driver_version,
            "gpus": sample.count,
        },
        "devices": list(sample.devices),
        "xids": {
            uuid: {str(code): {"count": count.count, "teardown": count.teardown} for code, count in one.xids.items()}
            for uuid, one in outcome.history.devices.items()
            if one.xids
        },
        "host": machine,
    }


def _explanation(outcome: Outcome, policy: Policy) -> dict[str, Any]:
    from regrow.agent.health import xid

    return {
        "conditions": outcome.history.conditions,
        "cleared": outcome.cleared,
        "set_aside": outcome.explained,
        "policy_version": policy.version,
        "xid_table_version": xid.version(),
        "policy": policy,
    }


def _tell(sample: NodeSample, outcome: Outcome, policy: Policy | None) -> None:
    verdict = outcome.verdict
    write = sys.stdout.write
    write(f"{verdict.state}: action {verdict.action}" + (f": {verdict.reason}" if verdict.reason else "") + "\n")
    for one in sample.devices:
        status = "lost" if one.lost else f"{one.temperature} C"
        write(f"  GPU {one.device.index} {one.device.uuid} {one.device.pci_bus_id} {one.device.name}: {status}\n")
    for line in verdict.evidence:
        write(f"  {line}\n")
    if policy is None:
        return
    for line in outcome.explained:
        write(f"  set aside: {line}\n")
    for entry in outcome.cleared:
        write(f"  cleared: {entry.kind} {entry.uuid} by {entry.by}: {entry.why}\n")
    write(f"  policy version {policy.version}; thresholds in agent/health/policy.toml, XIDs in agent/health/xid.toml\n")
