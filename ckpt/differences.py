"""What differs between the configuration of a launch and of the checkpoint that it restores, with a rule for each field. Pure.

A field may change freely (the mesh: resharding is what this is for), is told (another torch), or needs a flag: then the
restore is refused until the user accepts the change by the flag's name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Literal

import msgspec

from regrow.errors import ConfigurationError

Rule = Literal["may change", "told", "needs a flag"]

ACCEPT_VARIABLE = "REGROW_ACCEPT"
"""Environment of the workers: fields that are accepted, separated by commas."""

IMPLEMENTATION_KEYS = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""How an optimizer computes, not what: the launch's value is taken."""

_RULES: dict[str, Rule] = {
    "mesh": "may change",
    "world_size": "may change",
    "micro_batch": "may change",
    "micro_batches": "may change",
    "layers_per_stage": "may change",
    "torch": "told",
    "global_batch": "needs a flag",
    "seed": "needs a flag",
    "data": "needs a flag",
    "optimizer": "needs a flag",
    "learning_rate": "needs a flag",
}


class FieldDifference(msgspec.Struct, frozen=True, kw_only=True):
    """One field that is not as it was."""

    field: str
    saved: Any
    now: Any
    rule: Rule
    accepted: bool = False
    """Needs a flag, and the flag was given."""

    def __str__(self) -> str:
        """One line for people."""
        rule = f"accepted by {self.field}" if self.accepted else self.rule
        return f"{self.field}: {self.saved} in the checkpoint, {self.now} at this launch ({rule})"


def rule_of(field: str) -> Rule:
    """The rule of a field; hyper-parameters of an optimizer need a flag, what the user added himself is told."""
    return _RULES.get(field, "needs a flag" if field.startswith("optimizer.") else "told")


def fields_of(facts: Mapping[str, Any], *, mesh: object = None, world_size: int = 0) -> dict[str, Any]:
    """A record's facts (or those of a launch) as comparable fields."""
    batch: Mapping[str, Any] = facts.get("batch") or {}
    fields: dict[str, Any] = {"mesh": str(mesh), "world_size": world_size} if mesh is not None else {}
    fields |= {key: batch[key] for key in ("global_batch", "micro_batch", "micro_batches") if batch.get(key)}
    fields |= {key: facts[key] for key in ("layers_per_stage", "torch", "seed") if facts.get(key) is not None}
    recipes = [{key: value for key, value in one.items() if key != "micro_batch"} for one in facts.get("batches") or []]
    fields |= {"data": recipes} if recipes else {}
    known = {"batch", "layers_per_stage", "torch", "seed", "batches", "scheduler", "skipped", "fork"}
    return fields | {f"facts.{key}": value for key, value in facts.items() if key not in known}


def compare(saved: Mapping[str, Any], now: Mapping[str, Any], accept: Collection[str] = ()) -> list[FieldDifference]:
    """Fields that both have and that are not equal, those that need a flag first."""
    found = [
        FieldDifference(field=field, saved=saved[field], now=now[field], rule=rule_of(field), accepted=field in accept)
        for field in sorted(saved.keys() & now.keys())
        if saved[field] != now[field]
    ]
    return sorted(found, key=lambda one: one.rule != "needs a flag")


def compare_groups(
    saved: Collection[Mapping[str, Any]], now: Collection[Mapping[str, Any]], accept: Collection[str] = ()
) -> list[FieldDifference]:
    """Compare what the optimizers were launched with, parameter by parameter, whatever the groups are.

    Args:
        saved: Of all ranks: {"params": names, "launch": {key: value}, "class": name}; those without "launch" are left out.
        now: Of this rank, of the same form.
        accept: Flags that were given.
    """
    before = {name: group for group in saved for name in group["params"] if group.get("launch") is not None}
    found: dict[str, FieldDifference] = {}
    for group in now:
        for name in group["params"]:
            other = before.get(name)
            if other is None:
                continue
            pairs = {"optimizer": (other.get("class"), group.get("class"))}
            for key in other["launch"].keys() & group["launch"].keys():
                pairs["learning_rate" if key == "lr" else f"optimizer.{key}"] = (other["launch"][key], group["launch"][key])
            for field, (was, is_) in pairs.items():
                if was != is_:
                    one = FieldDifference(field=field, saved=was, now=is_, rule=rule_of(field), accepted=field in accept)
                    found.setdefault(field, one)
    return [found[field] for field in sorted(found)]


def check_fields(fields: Collection[str]) -> tuple[str, ...]:
    """Fields that are to be accepted, when each is one that needs it; `optimizer.<key>` may name any setting of an optimizer.

    Raises:
        ConfigurationError: a field that never needs it, with those that do.
    """
    known = sorted(field for field, rule in _RULES.items() if rule == "needs a flag")
    for field in fields:
        if rule_of(field) != "needs a flag" or field == "optimizer.":
            near = difflib.get_close_matches(field, known, 1)
            raise ConfigurationError(
                f"{field!r} is not a difference that needs to be accepted",
                where="--accept",
                hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}, optimizer.KEY",
            )
    return tuple(dict.fromkeys(fields))


def refuse(found: Collection[FieldDifference]) -> None:
    """Stop where a change needs a flag that was not given.

    Raises:
        ConfigurationError: lists all such fields with both values.
    """
    open_ = [one for one in found if one.rule == "needs a flag" and not one.accepted]
    if open_:
        flags = ",".join(one.field for one in open_)
        words = " ".join(f"--accept {one.field}" for one in open_)
        raise ConfigurationError(
            f"this launch differs from the checkpoint: {'; '.join(map(str, open_))}",
            hint=f"launch as it was, or accept the change: `regrow run {words}`, {ACCEPT_VARIABLE}={flags}, or accept= of train_state",
        )
