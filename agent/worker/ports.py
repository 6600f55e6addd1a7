"""What the step boundary asks of the state, and what a script tells it (torch-free)."""

from __future__ import annotations

import math
from typing import Protocol, SupportsFloat

import msgspec

from regrow import wire


class Keeper(Protocol):
    """What the step boundary asks of the checkpointed state."""

    def ready(self) -> bool:
        """Is there room for a snapshot now? Once true it stays true until the next save."""
        ...

    def save(self, step: int, samples: int, *, memory: bool = False) -> wire.SaveReport:
        """Take a snapshot. Returns when training may go on."""
        ...

    def skip(self, step: int, reason: str) -> None:
        """Take none although others of this step may: it is void for all at once, and counted."""
        ...

    def measured(self, name: str, value: float, step: int) -> None:
        """How good the state of `step` is; goes into the records of its save and of later ones, until there is a newer value."""
        ...

    def wait_durable(self, step: int, seconds: float) -> bool:
        """Wait until this rank's part of `step` is on storage; False at the deadline or when it failed."""
        ...

    def last_reason(self) -> str:
        """Why the newest snapshot that did not become durable did not; empty when none failed."""
        ...

    def memory_seconds(self) -> float:
        """Of the newest snapshot that stays in memory, until it was safe there; 0 while there is none."""
        ...

    def write_seconds(self) -> float:
        """How long the newest durable snapshot took to become durable; 0 while there is none."""
        ...


class Watch(Protocol):
    """What looks at the state around an update: digest, at-rest check, chaos."""

    def before_sync(self) -> str:
        """Gradients are this rank's own still: name of the first parameter whose gradient is not finite, empty: none."""
        ...

    def before_update(self) -> None:
        """Gradients are ready, nothing is written yet: the check at rest."""
        ...

    def applied(self, step: int, *, whole: bool) -> str:
        """After the update of `step`: the digest as hex, empty when none is due. `whole`: of everything, as a save follows."""
        ...

    def resting(self, step: int) -> None:
        """The boundary of `step` is over; until the next update nothing may change."""
        ...

    def agreed_cost(self, digest_us: int, step_us: int) -> None:
        """What a whole digest and a step take on the slowest rank, as all ranks agreed."""
        ...

    def cost_seconds(self) -> float:
        """What a whole digest and its check at rest take on this rank; 0: not known."""
        ...

    def take_mismatch(self) -> str:
        """Name of a tensor that changed at rest since the last call; empty: none."""
        ...

    def take_copies(self) -> str:
        """Beside AT_REST, under HSDP: what is compared with the copies of a shard. Once a step; empty: nothing."""
        ...

    def take_evidence(self, *, names: bool) -> wire.DigestEvidence | None:
        """Beside a digest: where a difference is, and what was received otherwise than its owner has it. Once a step; None: nothing."""
        ...

    def doubt(self, reason: str) -> None:
        """Why the newest snapshot that was not published was not; empty: none was refused."""
        ...

    def poisoned(self) -> str:
        """Name of a tensor of the state that is known to be not finite; empty: none is."""
        ...


class Live(Protocol):
    """What marks the state that survivors of a generation go on with."""

    def updating(self) -> None:
        """The optimizer is about to write."""
        ...

    def resting(self, step: int, samples: int) -> None:
        """What there is now is the state of this completed step."""
        ...


class Repeats(Protocol):
    """What repeats micro-steps."""

    producer: str
    """Who made the first number that was not finite in the last `non_finite_again`; empty: nobody did."""

    def take_verdict(self) -> wire.ReplayVerdict | None:
        """Of the check in this step, once; None: none was due."""
        ...

    def non_finite_again(self) -> bool | None:
        """Repeat the step's work whose gradient is not finite; False: it was finite this time and is used. None: cannot tell."""
        ...


class NoWatch:
    """Looks at nothing."""

    def before_sync(self) -> str:
        """No check."""
        return ""

    def before_update(self) -> None:
        """No check."""

    def applied(self, step: int, *, whole: bool) -> str:
        """No digest."""
        del step, whole
        return ""

    def resting(self, step: int) -> None:
        """Nothing rests."""

    def agreed_cost(self, digest_us: int, step_us: int) -> None:
        """No cost."""

    def cost_seconds(self) -> float:
        """No cost."""
        return 0.0

    def take_mismatch(self) -> str:
        """No mismatch."""
        return ""

    def take_copies(self) -> str:
        """No copies."""
        return ""

    def take_evidence(self, *, names: bool) -> wire.DigestEvidence | None:
        """No evidence."""
        del names
        return None

    def doubt(self, reason: str) -> None:
        """Nothing to look into."""

    def poisoned(self) -> str:
        """Nothing is known."""
        return ""


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """What a script tells of a step. None and 0: not known on this rank."""

    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    tokens: int = 0
    compute_seconds: float | None = None

    @classmethod
    def told(
        cls,
        loss: SupportsFloat | None,
        learning_rate: SupportsFloat | None,
        grad_norm: SupportsFloat | None,
        *,
        tokens: int,
        compute_seconds: float | None,
    ) -> Measures:
        """Of numbers that may be tensors."""

        def plain(number: SupportsFloat | None) -> float | None:
            return None if number is None else float(number)

        return cls(
            loss=plain(loss),
            learning_rate=plain(learning_rate),
            grad_norm=plain(grad_norm),
            tokens=tokens,
            compute_seconds=compute_seconds,
        )

    @property
    def nonfinite(self) -> str:
        """Name of a number that was given and is infinite or NaN: such a state must not be published. Empty: none."""
        given = {"loss": self.loss, "grad_norm": self.grad_norm}
        return next((name for name, value in given.items() if value is not None and not math.isfinite(value)), "")
