"""Names of what the supervisor keeps in the store, under /regrow/<cluster>/."""

from __future__ import annotations


class Keys:
    """The contract of design.md section 5, and five keys more: `epoch` (the highest term), `cordons/<node>`, `actuations/<actuator>/<node>`,
    `jobs/<job>/incidents` and `jobs/<job>/learned`."""

    def __init__(self, cluster: str) -> None:
        self.root = f"/regrow/{cluster}"
        self.leader = f"{self.root}/leader"
        self.meta = f"{self.root}/meta"
        self.epoch = f"{self.root}/epoch"
        self.nodes = f"{self.root}/nodes/"
        self.jobs = f"{self.root}/jobs/"
        self.quarantine = f"{self.root}/quarantine/"
        self.cordons = f"{self.root}/cordons/"
        self.events = f"{self.root}/events/"
        self.automation = f"{self.root}/automation"
        self.actuations = f"{self.root}/actuations/"

    def job(self, job: str, what: str) -> str:
        """spec, generation, ledger, command, incidents or learned (times) of a job."""
        return f"{self.jobs}{job}/{what}"

    def members(self, job: str, generation: int, chunk: int) -> str:
        """One chunk of the ranks of a generation."""
        return f"{self.members_of(job, generation)}{chunk:04d}"

    def members_of(self, job: str, generation: int) -> str:
        """Prefix of all chunks of a generation."""
        return f"{self.jobs}{job}/members/{generation}/"

    def checkpoints(self, job: str) -> str:
        """Prefix of all committed checkpoints of a job."""
        return f"{self.jobs}{job}/checkpoints/"

    def checkpoint(self, job: str, step: int) -> str:
        """A committed checkpoint."""
        return f"{self.jobs}{job}/checkpoints/{step}"

    def quarantined(self, key: str) -> str:
        """A piece of hardware."""
        return f"{self.quarantine}{key.replace('/', '_')}"

    def cordon(self, node: str) -> str:
        """An operator's order on a node."""
        return f"{self.cordons}{node}"

    def actuated(self, actuator: str, node: str) -> str:
        """The last order to an actuator for a node; with an empty node the prefix of all of them."""
        return f"{self.actuations}{actuator}/{node}"

    def event(self, mark: str) -> str:
        """A journal entry that came with a change of state."""
        return f"{self.events}{mark}"


def decision_mark(epoch: int, seq: int) -> str:
    """Of a leader's own action."""
    return f"{epoch:06d}-{seq:09d}"


def order_mark(epoch: int, seq: int, number: int) -> str:
    """Of an operator's order: the `number`th of this term, given after the action `seq`."""
    return f"{decision_mark(epoch, seq)}.{number:06d}"
