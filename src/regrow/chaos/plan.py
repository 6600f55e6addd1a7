"""A chaos plan: TOML in, checked data out. A seed and a plan give the same faults in the same order."""

from __future__ import annotations

import difflib
import random
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import msgspec

from regrow.chaos.built_in import BUILT_IN
from regrow.chaos.kinds import KINDS, NOISE_XIDS, SEVERE_XIDS, Kind, Names
from regrow.errors import ConfigurationError

VERSION = 1
_OWN_TRUTH = ("command", "dcgm_inject")
"""Kinds of which the plan says what must be told."""


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ClusterPart(_Table, frozen=True, kw_only=True):
    """The cluster that the plan runs on."""

    nodes: int = 3
    slots: int = 1


class JobPart(_Table, frozen=True, kw_only=True):
    """The job that is hurt; without a script: the byte-level GPT of the demo, data parallel."""

    kind: Literal["gpt", "small"] = "gpt"
    """Of the built-in job: the byte-level GPT of the demo, or a small network with evaluations and repeated micro-steps."""
    script: str = ""
    """As seen from the plan's folder."""
    args: tuple[str, ...] = ()
    steps: int = 2000
    """Of the built-in job: enough that it outlives the plan; it is stopped when the plan is done."""
    global_batch: int = 16
    micro_batch: int = 2
    hang_seconds: float = 0.0
    """Limit of a step; 0: learned."""
    hang_phase_seconds: dict[str, float] = {}
    """Limits of eval, save, restore."""


class Fault(_Table, frozen=True, kw_only=True):
    """One fault. `node` and `rank` may be "any": drawn with the seed when its turn comes."""

    kind: str
    node: str = "any"
    rank: int | str = "any"
    quiet_seconds: float = 15.0
    """For faults that must not cause an incident: how long to watch for one."""
    within_seconds: float = 0.0
    """Deadline of detection; 0: the kind's own."""
    signal: str = "KILL"
    phase: str = "step"
    ratio: float = 0.05
    steps: int = 20
    where: str = "optimizer"
    when: str = "rest"
    bit: int = 22
    xid: int = 79
    value: int = 1
    gpu: int = 0
    """dcgm_inject: DCGM's number of the GPU."""
    field: int = 230
    """dcgm_inject: DCGM's number of the field; 230 is the last XID."""
    delay_seconds: float = 0.5
    rate: float = 20_000.0
    """Bytes a second; net_rate: of everything, so take millions."""
    shift_seconds: float = 600.0
    text: str = ""
    """For the reader of the score card."""
    argv: tuple[str, ...] = ()
    """command: {rank} {pid} {agent} {shim} {writer} {state} {root} {checkpoints} stand for the chosen rank's process, its node's daemons and
    folders. It is killed when the fault is over."""
    incidents: tuple[str, ...] = ()
    """command, dcgm_inject: kinds of incident that are a right answer; none: the job must go on without any."""
    names: Names = "nothing"
    """command, dcgm_inject: what the incident must name."""
    straggler: bool = False
    """worker_slow, command: `regrow_straggler_rank` must name the rank within the deadline; waits for the detector's warm-up before."""
    back_after: float = 2.0
    """node_kill: the node returns so many seconds after the recovery."""

    @property
    def truth(self) -> Kind:
        """What Regrow must say."""
        known = KINDS[self.kind]
        if self.kind not in _OWN_TRUTH:
            return msgspec.structs.replace(known, straggler=self.straggler)
        return msgspec.structs.replace(known, incidents=self.incidents, names=self.names, straggler=self.straggler)

    @property
    def words(self) -> str:
        """What this fault does that its kind does not say."""
        return self.text or " ".join(self.argv)

    @property
    def deadline_seconds(self) -> float:
        """For detection."""
        return self.within_seconds or self.truth.within_seconds


class Plan(_Table, frozen=True, kw_only=True):
    """A whole plan."""

    version: int = VERSION
    name: str = "plan"
    seed: int = 0
    cluster: ClusterPart = ClusterPart()
    job: JobPart = JobPart()
    fault: tuple[Fault, ...] = ()


_NOT_DRAWN = ("command", "sick_gemm", "dcgm_inject")
"""They need words, another job, or a tool."""


def load(source: str) -> Plan:
    """A plan by the name of a built-in one, or from a file.

    Raises:
        ConfigurationError: unreadable, unknown kind, key or value, with what to try.
    """
    if source in BUILT_IN:
        return parse(BUILT_IN[source], where=f"plan {source}")
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "no such plan", where=source, hint=f"name a TOML file, or one of {', '.join(BUILT_IN)}; `regrow chaos ls` shows what they do"
        ) from error
    plan = parse(text, where=source)
    if not plan.job.script:
        return plan
    script = Path(source).parent / plan.job.script
    if not script.is_file():
        raise ConfigurationError(f"no script {plan.job.script!r}", where=f"{source}, [job]", hint="a path as seen from the plan's folder")
    return msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, script=str(script.absolute())))


def parse(text: str, *, where: str) -> Plan:
    """Read and check a plan.

    Raises:
        ConfigurationError: as for `load`.
    """
    try:
        plan = msgspec.convert(tomllib.loads(text), Plan)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(str(error), where=where, hint="docs/chaos.md shows a plan") from error
    except msgspec.ValidationError as error:
        raise ConfigurationError(str(error), where=_place(text, where, str(error)), hint="docs/chaos.md shows a plan") from error
    if plan.version != VERSION:
        raise ConfigurationError(f"version {plan.version} is not known", where=where, hint=f"this Regrow reads version {VERSION}")
    if plan.cluster.nodes < 1 or plan.cluster.slots < 1:
        raise ConfigurationError("a cluster needs a node and a slot", where=f"{where}, [cluster]")
    if not plan.fault:
        raise ConfigurationError("has no faults", where=where, hint="add a [[fault]]")
    for number, fault in enumerate(plan.fault, 1):
        _check(fault, _place(text, where, f"fault[{number - 1}]"), plan)
    return plan


def _place(text: str, where: str, words: str) -> str:
    """Where in the plan it is that `words` speak of ("fault[0]", "$.job.steps", a key in backquotes): line and number of the fault."""
    found = re.search(r"fault\[(\d+)\]", words)
    table = re.search(r"\$\.(cluster|job)", words)
    headers = [number for number, line in enumerate(text.splitlines(), 1) if line.replace(" ", "").startswith("[[fault]]")]
    begin, name = 0, ""
    if found:
        number = int(found[1])
        begin, name = headers[number] if number < len(headers) else 0, f", fault {number + 1}"
    elif table:
        begin = next((number for number, line in enumerate(text.splitlines(), 1) if line.replace(" ", "").startswith(f"[{table[1]}]")), 0)
    key = re.search(r"field `(\w+)`", words) or re.search(r"\$(?:\.\w+|\[\d+\])*\.(\w+)`?$", words)
    inside = text.splitlines()[begin:] if key and (begin or not found) else ()
    for number, line in enumerate(inside, begin + 1):
        if line.lstrip().startswith("["):
            break
        if key and re.match(rf"\s*{key[1]}\s*=", line):
            begin = number
            break
    return f"{where}, line {begin}{name}" if begin else f"{where}{name}"


def _check(fault: Fault, where: str, plan: Plan) -> None:
    if fault.kind not in KINDS:
        near = difflib.get_close_matches(fault.kind, KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known kinds: {', '.join(KINDS)}"
        raise ConfigurationError(f"unknown kind {fault.kind!r}", where=where, hint=hint)
    names = [f"n{number}" for number in range(plan.cluster.nodes)]
    if fault.node not in ("any", *names):
        raise ConfigurationError(f"node {fault.node!r} is not in the cluster", where=where, hint=f"any, {', '.join(names)}")
    if isinstance(fault.rank, str) and fault.rank != "any":
        raise ConfigurationError(f"rank {fault.rank!r} is not a number", where=where, hint='a number, or "any"')
    if fault.kind == "nvml_noise" and fault.xid not in NOISE_XIDS:
        raise ConfigurationError(f"XID {fault.xid} is no noise", where=where, hint=f"one of {', '.join(map(str, NOISE_XIDS))}")
    _check_values(fault, where, plan)
    if fault.truth.needs_library and plan.job.script and not plan.job.args:
        return  # the script may or may not use the worker library: the injection itself says so


def _check_values(fault: Fault, where: str, plan: Plan) -> None:
    small = plan.job.kind == "small" and not plan.job.script
    if fault.kind == "sick_gemm" and not small and not plan.job.script:
        raise ConfigurationError("the GPT of the demo repeats no micro-steps", where=where, hint='add kind = "small" to [job]')
    if fault.kind == "worker_hang" and fault.phase == "eval" and not small and not plan.job.script:
        raise ConfigurationError("the GPT of the demo evaluates at its end only", where=where, hint='add kind = "small" to [job]')
    if (fault.kind == "command") != bool(fault.argv):
        raise ConfigurationError("argv belongs to kind command, and it needs one", where=where, hint='argv = ["kill", "-STOP", "{writer}"]')
    if fault.straggler and (fault.incidents or fault.kind not in ("command", "worker_slow")):
        raise ConfigurationError("straggler belongs to worker_slow and to a command without incidents", where=where)
    if fault.kind == "net_loss" and not 0 < fault.ratio < 1:
        raise ConfigurationError(f"ratio {fault.ratio} is no share of packets", where=where, hint="between 0 and 1")
    negative = [name for name in ("delay_seconds", "rate", "quiet_seconds", "within_seconds", "gpu", "field") if getattr(fault, name) < 0]
    if negative:
        raise ConfigurationError(f"{negative[0]} is negative", where=where)


def needs_namespace(plan: Plan) -> bool:
    """Whether some fault breaks the loopback network."""
    return any(fault.truth.needs_namespace for fault in plan.fault)


def needs_dcgm(plan: Plan) -> bool:
    """Whether some fault is put into DCGM."""
    return any(fault.kind == "dcgm_inject" for fault in plan.fault)


def draw(number: int, *, seed: int, nodes: int = 4) -> Plan:
    """A random plan of `number` faults: kinds and XIDs by the seed. Faults that take a node for good are kept below the number of nodes."""
    chooser = random.Random(seed)  # noqa: S311 - repeatable, not secret
    faults: list[Fault] = []
    spare = nodes - 2
    while len(faults) < number:
        kind = chooser.choice(tuple(KINDS.values()))
        takes_node = kind.incidents and (kind.name.startswith("nvml_") or kind.name in ("preempt", "flip_bit"))
        if (takes_node and spare == 0) or kind.needs_namespace or kind.name in _NOT_DRAWN:
            continue
        spare -= bool(takes_node)
        xid = chooser.choice(NOISE_XIDS if kind.name == "nvml_noise" else SEVERE_XIDS)
        faults.append(Fault(kind=kind.name, xid=xid, quiet_seconds=8.0))
    return Plan(name=f"drawn-{seed}", seed=seed, cluster=ClusterPart(nodes=nodes), fault=tuple(faults))


def document(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    return msgspec.json.decode(msgspec.json.encode(plan))
