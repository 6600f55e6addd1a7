"""The health policy itself: what was seen and what is remembered in, a verdict with its evidence out. Pure.

Every fault is a condition with an incident id of its own; what ends one never touches another (a recovery that was
meant for fault A cannot cancel fault B). How a condition ends is part of it: the next probe, quiet, a reset, a reboot,
or an operator; each end is an audit entry.
"""

from __future__ import annotations

import msgspec

from regrow.agent.health import xid as xids
from regrow.agent.health.conditions import Book, clears_of, entry_of, state_of, with_evidence
from regrow.agent.health.findings import LASTING, Context, Finding, counters_of, lost, of_device
from regrow.agent.health.history import MAX_AUDIT, MAX_TIMES, Cleared, Condition, DeviceHistory, History, XidCount
from regrow.agent.health.policy import Policy
from regrow.agent.health.sample import DeviceSample, NodeSample, XidEvent
from regrow.agent.health.xid import XidSeen, rank
from regrow.wire import HealthVerdict

_CRASHES_BEFORE_VERDICT = 3

XID_EVENT = 0x8
"""NVML event type of an XID."""

NVML_EVENTS: dict[int, tuple[str, str]] = {
    0x2: ("gpu_mem_uncorrectable", "reset"),
    0x200: ("gpu_mem_corrected", "watch"),
    0x400: ("gpu_mem_remap_pending", "reset"),
    0x800: ("gpu_mem_remap_failed", "replace"),
    0x1000: ("gpu_mem_contained", "restart_app"),
    0x2000: ("gpu_mem_uncontained", "reset"),
    0x4000: ("gpu_lost", "reboot"),
}
"""NVML event types besides XID (8) and recovery action (0x8000, also in the sample): kind and action."""


class KernelEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A kernel log line of a class that the policy may count."""

    kind: str
    text: str
    at: float
    uuid: str = ""


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is new since the last evaluation. Instants: this host's clock, seconds."""

    at: float
    sample: NodeSample | None = None
    xids: tuple[XidSeen, ...] = ()
    events: tuple[XidEvent, ...] = ()
    """NVML events that are not XIDs."""
    kernel: tuple[KernelEvent, ...] = ()
    host: tuple[Finding, ...] = ()
    teardowns: tuple[tuple[float, float], ...] = ()
    """When we killed workers ourselves: [from, to]."""
    idle: bool | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    verdict: HealthVerdict
    history: History
    opened: tuple[Condition, ...] = ()
    cleared: tuple[Cleared, ...] = ()
    explained: tuple[str, ...] = ()
    """For people: what was seen and not held against the node, and why."""


def evaluate(seen: Observation, history: History, policy: Policy) -> Outcome:
    """One turn of the policy."""
    turn = _Turn(seen, history, policy)
    turn.boot()
    turn.node_status()
    turn.devices()
    turn.xids()
    turn.nvml_events()
    turn.kernel_lines()
    for finding in seen.host:
        turn.book.find(finding)
    turn.book.expire(answered=seen.sample is not None and seen.sample.status in ("ok", "no_driver"))
    return turn.outcome()


def clear(history: History, *, incident: str, by: str, why: str, at: float) -> History:
    """End one incident by an operator's command or a passed test. Other incidents are untouched; unknown ids change nothing."""
    ended = [one for one in history.conditions if one.incident == incident]
    left = tuple(one for one in history.conditions if one.incident != incident)
    audit = (*history.audit, *(entry_of(one, at, by, why) for one in ended))[-MAX_AUDIT:]
    return msgspec.structs.replace(history, conditions=left, audit=audit)


def note_reset(history: History, *, uuid: str, at: float, by: str = "reset") -> History:
    """The GPU was reset: conditions of it that a reset ends are over, others stay."""
    ended = [one.incident for one in history.conditions if one.uuid == uuid and one.clears == "reset" and one.last_at <= at]
    for incident in ended:
        history = clear(history, incident=incident, by=by, why="the GPU was reset", at=at)
    return history


def verdict_of(history: History, status: str = "ok") -> HealthVerdict:
    """The verdict that the open conditions add up to."""
    conditions = sorted(history.conditions, key=lambda one: (one.state != "unhealthy", -rank(one.action), one.since_at))
    if not conditions:
        reason = {"no_driver": "no GPUs", "crashed": "the probe failed; nothing known against the node"}.get(status, "")
        return HealthVerdict(state="healthy", action="none", reason=reason)
    worst = conditions[0]
    leading = [one for one in conditions if one.state == worst.state]
    return HealthVerdict(
        state=worst.state,
        action=worst.action,
        reason=f"{worst.kind}: {worst.reason}",
        device_uuids=tuple(dict.fromkeys(one.uuid for one in leading if one.uuid)),
        evidence=tuple(line for one in conditions for line in (_line(one), *one.evidence))[:32],
        incident=worst.incident,
    )


def _line(one: Condition) -> str:
    where = one.uuid or "node"
    return f"{where} {one.kind} {one.state} action={one.action} clears={one.clears} incident={one.incident}: {one.reason}"


class _Turn:
    """Working state of one evaluation; `outcome` is its only product."""

    def __init__(self, seen: Observation, history: History, policy: Policy) -> None:
        self.seen = seen
        self.policy = policy
        self.before = history
        self.known = dict(history.devices)
        self.book = Book(history, policy, seen.at)
        self.kernel = dict(history.kernel)
        self.hung = history.hung_probes
        self.explained: list[str] = []
        self.recent = history.recent
        self.status = seen.sample.status if seen.sample else "ok"
        self.boot_id = seen.sample.boot_id if seen.sample and seen.sample.boot_id else history.boot_id
        self.book.boot_id = self.boot_id

    # --- what the sample says ------------------------------------------------------------------------------------

    def boot(self) -> None:
        """A new boot id ends what a reboot ends; what still holds is found again, as a new incident."""
        if not self.before.boot_id or self.boot_id == self.before.boot_id:
            return
        for key, one in list(self.book.open.items()):
            if one.clears != "operator":
                self.book.end(key, "reboot", f"boot id is now {self.boot_id[:8]}")
        self.book.pending.clear()
        self.kernel.clear()

    def node_status(self) -> None:
        """Verdicts on NVML as a whole: hung, failed, or a driver that went away."""
        sample = self.seen.sample
        if sample is None:
            return
        if sample.status in ("hung", "crashed"):
            self.hung += 1
        else:
            self.hung = 0
        if sample.status == "hung" and self.hung >= self.policy.probe.hung_probes:
            self.book.find(Finding(kind="driver_hung", action="reboot", reason="NVML does not answer", evidence=(sample.detail,)))
        elif sample.status == "crashed" and self.hung >= _CRASHES_BEFORE_VERDICT:
            self.book.find(
                Finding(kind="probe_failed", action="watch", state="degraded", reason="the NVML probe fails", evidence=(sample.detail,))
            )
        elif sample.status == "init_failed":
            reason = f"NVML does not start: error {sample.error}"
            self.book.find(Finding(kind="driver_failed", action="reboot", reason=reason, evidence=(sample.detail,)))
        elif sample.status == "no_driver" and self.known:
            self.book.find(Finding(kind="driver_failed", action="reboot", reason="the NVIDIA driver is gone", evidence=(sample.detail,)))

    def devices(self) -> None:
        """Findings of every GPU; GPUs that are known and not listed are lost."""
        sample = self.seen.sample
        if sample is None or sample.status != "ok":
            return
        for one in sample.devices:
            context = Context(one, self._comparable(one, sample.boot_id), self._age(one), self.policy, self.seen.idle)
            for finding in of_device(context):
                self.book.find(finding)
            if not one.lost:
                self._remember(one, sample.boot_id)
        present = {one.device.uuid for one in sample.devices}
        missing = [uuid for uuid in self.known if uuid not in present]
        if missing and len(present - self.before.devices.keys()) >= len(missing):
            for uuid in missing:
                self._forget(uuid)
            missing = []
        for uuid in missing:
            self.book.find(lost(uuid))
        if len(sample.unreachable) > len(missing):
            numbers = ", ".join(str(index) for index in sample.unreachable)
            self.book.find(Finding(kind="gpu_lost", action="reboot", reason=f"no handle for GPU {numbers}", clears="reboot"))

    def _comparable(self, one: DeviceSample, boot_id: str) -> DeviceHistory | None:
        before = self.known.get(one.device.uuid)
        if before is None:
            return None
        if before.boot_id == boot_id:
            return before
        counters = {name: value if name in LASTING else 0 for name, value in before.counters.items()}
        return msgspec.structs.replace(before, counters=counters, links_up=())

    def _age(self, one: DeviceSample) -> float:
        before = self.known.get(one.device.uuid)
        return max(self.seen.at - before.at, 0.0) if before else 0.0

    def _remember(self, one: DeviceSample, boot_id: str) -> None:
        uuid = one.device.uuid
        before = self.known.get(uuid)
        now = counters_of(one)
        if before and before.boot_id == boot_id and self._was_reset(before.counters, now):
            for key, condition in list(self.book.open.items()):
                if condition.uuid == uuid and condition.clears == "reset" and condition.last_at < self.seen.at:
                    self.book.end(key, "reset", "volatile counters started over")
        up = tuple(link.link for link in one.links if link.up)
        self.known[uuid] = DeviceHistory(
            device=one.device,
            boot_id=boot_id,
            at=self.seen.at,
            counters=now,
            links_up=tuple(sorted({*up, *(before.links_up if before and before.boot_id == boot_id else ())})),
            xids=before.xids if before else {},
        )

    @staticmethod
    def _was_reset(before: dict[str, int], now: dict[str, int]) -> bool:
        return now.get("ecc_uncorrected_volatile", 0) < before.get("ecc_uncorrected_volatile", 0)

    def _forget(self, uuid: str) -> None:
        self.explained.append(f"{uuid} was replaced by another GPU")
        del self.known[uuid]
        for key in [key for key in self.book.open if key[0] == uuid]:
            self.book.end(key, "replaced", "another GPU is in its place")

    # --- XIDs and other events -------------------------------------------------------------------------------------

    def xids(self) -> None:
        """New XIDs: our own teardown and cascades are told apart from causes."""
        batch, self.recent = xids.merge((self._placed(one) for one in self.seen.xids), self.recent)
        starts = [one for one in batch if xids.known(one.code).role == "initiating" and not self._ours(one)]
        for one in batch:
            row = xids.known(one.code)
            ours = row.killed and self._ours(one)
            self._count(one, teardown=ours)
            name = f"Xid {one.code} ({row.meaning}) on {one.uuid or one.pci_bus_id or 'unknown GPU'}"
            if ours:
                self.explained.append(f"{name}: within our own teardown")
            elif row.role == "cascade":
                self._cascade(one, starts, name)
            else:
                self._initiating(one, name)

    def _placed(self, one: XidSeen) -> XidSeen:
        if one.uuid:
            return one
        uuid = next((uuid for uuid, known in self.known.items() if known.device.pci_bus_id == one.pci_bus_id), "")
        return msgspec.structs.replace(one, uuid=uuid)

    def _ours(self, one: XidSeen) -> bool:
        grace = self.policy.xid.teardown_grace_seconds
        return any(start <= one.at <= end + grace for start, end in self.seen.teardowns)

    def _count(self, one: XidSeen, *, teardown: bool) -> None:
        device = self.known.get(one.uuid)
        if device is None:
            return
        count = device.xids.get(one.code, XidCount())
        count = XidCount(
            count=count.count + 1,
            teardown=count.teardown + teardown,
            first_at=one.at if count.first_at is None else count.first_at,
            last_at=one.at,
            times=count.times if teardown else (*count.times, one.at)[-MAX_TIMES:],
        )
        self.known[one.uuid] = msgspec.structs.replace(device, xids={**device.xids, one.code: count})

    def _cascade(self, one: XidSeen, starts: list[XidSeen], name: str) -> None:
        chain = self.policy.xid.chain_seconds
        if any(start.uuid == one.uuid and abs(start.at - one.at) <= chain for start in starts):
            self.explained.append(f"{name}: follows an initiating XID")
            return
        for key, condition in self.book.open.items():
            if key[0] == one.uuid and one.at - condition.last_at <= chain:
                self.book.open[key] = with_evidence(condition, f"{name} followed")
                self.explained.append(f"{name}: follows incident {condition.incident}")
                return
        action = xids.action_of(one)
        if action == "none":
            self.explained.append(f"{name}: cleanup, never a cause by itself")
            return
        self.book.find(
            Finding(
                kind=xids.known(one.code).log_class,
                action=action,
                reason=name,
                uuid=one.uuid,
                state=state_of(action),
                clears=clears_of(action),
            )
        )

    def _initiating(self, one: XidSeen, name: str) -> None:
        row = xids.known(one.code)
        action = self._repeated(one, xids.action_of(one))
        if action == "none":
            self.explained.append(f"{name}: harmless")
            return
        state = "degraded" if row.at_idle and self.seen.idle is False else state_of(action)
        if not one.uuid and rank(action) >= rank("reset"):
            self.explained.append(f"{name}: not a GPU of this node as NVML lists it; nobody is blamed")
            action, state = "watch", "degraded"
        text = f"{name}: {one.text}" if one.text else name
        self.book.find(
            Finding(kind=row.log_class, action=action, reason=name, uuid=one.uuid, state=state, clears=clears_of(action), evidence=(text,))
        )

    def _repeated(self, one: XidSeen, action: str) -> str:
        device = self.known.get(one.uuid)
        times = device.xids[one.code].times if device and one.code in device.xids else ()
        for number, hours, more in xids.known(one.code).escalate:
            if sum(at > one.at - hours * 3600 for at in times) >= number and rank(more) > rank(action):
                action = more
        return action

    def nvml_events(self) -> None:
        """Events of NVML that are not XIDs."""
        for event in self.seen.events:
            named = NVML_EVENTS.get(event.kind)
            if named is None:
                continue
            kind, action = named
            self.book.find(
                Finding(
                    kind=kind,
                    action=action,
                    reason=f"NVML event {event.kind:#x}",
                    uuid=event.uuid,
                    state=state_of(action),
                    clears=clears_of(action),
                )
            )

    def kernel_lines(self) -> None:
        """Kernel lines that the policy names, once they came often enough."""
        for event in self.seen.kernel:
            rule = self.policy.kernel.get(event.kind)
            if rule is None:
                self.explained.append(f"kernel line of class {event.kind}: not in the policy")
                continue
            times = tuple(at for at in (*self.kernel.get(event.kind, ()), event.at) if at > event.at - rule.seconds)[-MAX_TIMES:]
            self.kernel[event.kind] = times
            if len(times) < rule.times:
                self.explained.append(f"kernel line of class {event.kind}: {len(times)} of {rule.times} within {rule.seconds:.0f} s")
                continue
            action = "watch" if rule.ours_only and not event.uuid else rule.action
            reason = f"kernel log: {event.text[:160]}"
            state, clears = state_of(action), clears_of(action)
            self.book.find(Finding(kind=event.kind, action=action, reason=reason, uuid=event.uuid, state=state, clears=clears))

    def outcome(self) -> Outcome:
        """The result."""
        history = msgspec.structs.replace(
            self.before,
            boot_id=self.boot_id,
            devices=self.known,
            conditions=tuple(self.book.open.values()),
            pending=self.book.pending,
            kernel=self.kernel,
            hung_probes=self.hung,
            recent=self.recent,
            next_incident=self.book.next_incident,
            audit=tuple(self.book.audit[-MAX_AUDIT:]),
        )
        return Outcome(
            verdict=verdict_of(history, self.status),
            history=history,
            opened=tuple(self.book.opened),
            cleared=tuple(self.book.cleared),
            explained=tuple(self.explained),
        )
