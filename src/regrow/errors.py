"""The error tree. Three kinds, told apart by what the caller can do about them.

Every error says what failed, where (node, rank, generation, file, flag) and what to try.
"""

from __future__ import annotations


class RegrowError(Exception):
    """Base of all errors that Regrow raises on purpose."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}\n  try: {self.hint}" if self.hint else text

    def document(self) -> dict[str, str]:
        """The error as plain data, for `--json`."""
        return {"kind": type(self).__name__, "what": self.what, "where": self.where, "hint": self.hint}


class ConfigurationError(RegrowError):
    """Wrong usage or configuration, found before any side effect. Exit code 2."""

    exit_code = 2


class OperationalError(RegrowError):
    """The world is in the way (network, disk, store, a lost node): an event, retried or reported. Exit code 1."""


class FencedError(OperationalError):
    """Somebody holds a higher (epoch, generation): this process must not have effects any more."""


class NotBuiltError(ConfigurationError):
    """A command of the contract that this version does not have yet. Exit code 2, never a stub answer."""


class InternalError(RegrowError):
    """A bug in Regrow: crash with the story."""
