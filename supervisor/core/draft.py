"""What a plan collects while it is made. Local to one call of `plan`: nothing outside sees it change."""

from __future__ import annotations

from regrow.supervisor.core.actions import Action, Decision


class Draft:
    """Actions, reasons and the earliest instant to look again."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.reasons: list[str] = []
        self.wake_at: float | None = None

    def act(self, *actions: Action, because: str = "") -> None:
        """Add actions, and why."""
        self.actions.extend(actions)
        if because:
            self.reasons.append(because)

    def say(self, reason: str) -> None:
        """Why nothing is done."""
        if reason:
            self.reasons.append(reason)

    def look(self, at: float | None) -> None:
        """Look again at this instant at the latest."""
        if at is not None and (self.wake_at is None or at < self.wake_at):
            self.wake_at = at

    def decision(self) -> Decision:
        """The result."""
        return Decision(actions=tuple(self.actions), reason="; ".join(self.reasons), wake_at=self.wake_at)
