"""What the script gave its optimizers before anything was restored, and what becomes of it when a change is accepted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from regrow.ckpt import plain
from regrow.ckpt.differences import IMPLEMENTATION_KEYS
from regrow.ckpt.flatten import name_of, optimizers_of

_POSITION_KEYS = frozenset({"params", "lr", "initial_lr"})


def launched(optimizer: Any, names: dict[int, str]) -> list[dict[str, Any]]:
    """Settings of each parameter group as the script made it: {"class", "params", "launch": {key: value}}.

    Call it before a restore. The learning rate is the one before any scheduler changed it.
    """
    found: list[dict[str, Any]] = []
    for one in optimizers_of(optimizer):
        for group in one.param_groups:
            values = {key: value for key, value in group.items() if key not in _POSITION_KEYS | IMPLEMENTATION_KEYS}
            if "lr" in group:
                values["lr"] = group.get("initial_lr", group["lr"])
            launch = {key: plain.encode(_number(value), key) for key, value in values.items()}
            # An optimizer around another one (ZeRO stage 1) is the same optimizer: its state enters meshes that do without.
            found.append(
                {
                    "class": type(getattr(one, "inner", one)).__qualname__,
                    "params": [name_of(p, names) for p in group["params"]],
                    "launch": launch,
                }
            )
    return found


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value


class Accepted:
    """Puts accepted changes of optimizer settings into effect after everything has been restored."""

    def __init__(self, optimizer: Any, names: dict[int, str], now: list[dict[str, Any]], saved: Collection[Mapping[str, Any]]) -> None:
        self._groups = [(one, index) for one in optimizers_of(optimizer) for index in range(len(one.param_groups))]
        self._now = now
        self._before = {name: group["launch"] for group in saved if group.get("launch") is not None for name in group["params"]}
        self._names = names

    def apply(self, accept: Collection[str], schedulers: Collection[Any]) -> None:
        """Take the launch's value of each accepted field.

        A learning rate keeps its place in the schedule: rate, initial rate and the schedulers' base rates are scaled
        by new / old.
        """
        ratios: dict[tuple[int, int], float] = {}
        for (one, index), now in zip(self._groups, self._now, strict=True):
            group = one.param_groups[index]
            before = next((self._before[name] for name in now["params"] if name in self._before), None)
            if before is None:
                continue
            for key, value in now["launch"].items():
                if key != "lr" and f"optimizer.{key}" in accept:
                    group[key] = plain.decode(value)
            if "learning_rate" in accept and before.get("lr") and now["launch"].get("lr") != before["lr"]:
                ratio = float(now["launch"]["lr"]) / float(before["lr"])
                ratios[id(one), index] = ratio
                _scale_group(group, ratio)
        for scheduler in schedulers:
            _scale_scheduler(scheduler, ratios)


def _scale_group(group: dict[str, Any], ratio: float) -> None:
    for key in ("lr", "initial_lr"):
        if isinstance(group.get(key), torch.Tensor):
            group[key].mul_(ratio)
        elif key in group:
            group[key] *= ratio


def _scale_scheduler(scheduler: Any, ratios: Mapping[tuple[int, int], float]) -> None:
    owner = id(getattr(scheduler, "optimizer", None))
    for name in ("base_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if isinstance(rates, list):
            setattr(scheduler, name, [rate * ratios.get((owner, index), 1.0) for index, rate in enumerate(rates)])
    for inner in getattr(scheduler, "_schedulers", []):
        _scale_scheduler(inner, ratios)
