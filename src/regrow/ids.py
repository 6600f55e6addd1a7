"""Names and numbers that identify things, and the order of fences."""

from __future__ import annotations

import re
import uuid
from typing import NewType

import msgspec

from regrow.errors import ConfigurationError

NodeName = NewType("NodeName", str)
JobName = NewType("JobName", str)
Incarnation = NewType("Incarnation", str)
"""One start of one process: a random hex string, never reused."""

_NAME = re.compile(r"^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$")


def check_name(kind: str, value: str) -> str:
    """Return `value` when it can be a key segment in etcd, a file name and a metric label; else raise.

    Raises:
        ConfigurationError: with the rule and what to try.
    """
    if not _NAME.match(value):
        raise ConfigurationError(
            f"{kind} name {value!r} is not usable",
            where=f"--{kind}",
            hint="use 1 to 63 characters of a-z, 0-9, dot, dash, underscore; start and end with a letter or digit",
        )
    return value


def new_incarnation() -> Incarnation:
    """A fresh incarnation: 32 hex digits."""
    return Incarnation(uuid.uuid4().hex)


class Token(msgspec.Struct, frozen=True, order=True):
    """A fencing token. Compared as (epoch, generation): whoever holds the lower one is refused."""

    epoch: int
    generation: int


_AXIS = re.compile(r"^(dp|tp|pp|cp|ep)=?(\d+)$")


class MeshShape(msgspec.Struct, frozen=True, order=True):
    """Sizes of the parallel axes. `ep` is folded into dp x tp and is not a factor of the world size.

    Rank order, innermost first: tp, cp, pp, dp (the order of Llama 3), so
    ``rank = ((dp_i * pp + pp_i) * cp + cp_i) * tp + tp_i``.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        """Number of workers that the mesh occupies."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replica_size(self) -> int:
        """Workers in one data-parallel replica."""
        return self.tp * self.pp * self.cp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis indices {"dp","pp","cp","tp"} of a rank of this mesh."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside mesh {self} of {self.world_size} workers")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        dp, pp = divmod(rest, self.pp)
        return {"dp": dp, "pp": pp, "cp": cp, "tp": tp}

    def rank(self, *, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at the given axis indices."""
        return ((dp * self.pp + pp) * self.cp + cp) * self.tp + tp

    def __str__(self) -> str:
        text = f"dp={self.dp},tp={self.tp},pp={self.pp}"
        if self.cp > 1:
            text += f",cp={self.cp}"
        if self.ep > 1:
            text += f",ep={self.ep}"
        return text

    @classmethod
    def parse(cls, text: str) -> MeshShape:
        """Read ``dp=2,tp=2,pp=2`` (separators , . x; the equals sign may be left out) or three numbers ``2x2x2``.

        Raises:
            ConfigurationError: the text is not a mesh.
        """
        parts = [part for part in re.split(r"[,.x\s]+", text.strip().lower()) if part]
        sizes: dict[str, int] = {}
        if parts and all(part.isdigit() for part in parts) and len(parts) in (3, 4):
            sizes = dict(zip(("dp", "tp", "pp", "cp"), map(int, parts), strict=False))
        else:
            for part in parts:
                match = _AXIS.match(part)
                if match is None or match[1] in sizes:
                    raise _bad_mesh(text, f"{part!r} is not an axis, or is given twice")
                sizes[match[1]] = int(match[2])
        if not sizes or any(size < 1 for size in sizes.values()):
            raise _bad_mesh(text, "every axis must be at least 1")
        return cls(**sizes)


def _bad_mesh(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"mesh {text!r} cannot be read: {why}", where="--mesh", hint="write it like dp=2,tp=2,pp=2 or 2x2x2 (DP x TP x PP)"
    )
