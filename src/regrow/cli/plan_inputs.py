"""From the flags of `regrow plan` to a request of the planner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from regrow.errors import ConfigurationError
from regrow.parallel import configs, inventory, memory, pipeline, shape
from regrow.parallel.planner import Request

_SHAPE = (
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "seq",
    "params",
    "experts",
    "experts_per_token",
    "expert_ffn",
    "shared_experts",
    "dense_layers",
    "gated",
    "tied",
)
_INVENTORY = ("gpu_type", "gpu_memory_gb", "peak_tflops", "nvlink_gpus")
_AXES = ("dp", "tp", "pp", "cp", "ep")
_SETTINGS = ("zero", "recompute", "schedule", "virtual", "hsdp_shard")


def request(flags: dict[str, Any]) -> tuple[Request, list[str]]:
    """The request, and notes about what was assumed.

    Raises:
        ConfigurationError: nonsense or contradicting flags.
    """
    notes: list[str] = []
    model, stated = _model(flags)
    there = _inventory(flags)
    asked = {name: flags[name] if flags[name] is not None else stated.get(name) for name in (*_AXES, *_SETTINGS)}
    axes: dict[str, Any] = {name: asked[name] for name in _AXES}
    if stated:
        notes.append("the file states " + ", ".join(f"{name.replace('_', '-')} {value}" for name, value in stated.items()))
    micro = _micro_batches(flags["micro_batch"]) or ((stated["micro_batch"],) if stated.get("micro_batch") else ())
    batch = flags["global_batch"] if flags["global_batch"] is not None else stated.get("global_batch")
    if batch is None:
        batch = there.gpus * (micro[0] if micro else 1)
        notes.append(f"no --global-batch given: {batch} samples, one micro-batch a GPU, is assumed")
    if model.known and not (model.seq and model.vocab):
        missing = "--seq" if not model.seq else "--vocab"
        raise ConfigurationError(f"{missing} is missing or 0", where=missing, hint="activations, logits and time depend on it")
    if not model.known:
        notes.append("only a parameter count is known: activations, TP and PP traffic are not modelled, give the shape for those")
    notes.extend(_doubts(model))
    reserve = flags["reserve_gb"]
    if not math.isfinite(reserve) or reserve < 0:
        raise ConfigurationError(f"{reserve} GB", where="--reserve-gb", hint="give a finite number of at least 0")
    schedule = pipeline.check_name(asked["schedule"] or "1f1b")
    made = Request(
        model=model,
        inventory=there,
        global_batch=batch,
        micro_batch=micro,
        zero=asked["zero"],
        schedule=schedule,
        virtual=asked["virtual"] if asked["virtual"] is not None else 2 if schedule == "interleaved" else 1,
        recompute=memory.check_recompute(asked["recompute"]) if asked["recompute"] else None,
        recipe=_recipe(flags["optimizer"]),
        offload=_choice(flags["offload"], ("none", "optimizer", "all"), "--offload"),
        hsdp_shard=asked["hsdp_shard"] or 0,
        equal_replicas=flags["equal_replicas"],
        sequence_parallel=flags["sequence_parallel"],
        replicate_kv=flags["replicate_kv"],
        context_bytes=reserve * 1e9,
        **axes,
    )
    return made, notes


def lose(made: Request, lost: int) -> Request:
    """The same request after losing nodes.

    Raises:
        ConfigurationError: a negative number, or no node left.
    """
    if lost < 0 or lost >= len(made.inventory.nodes):
        raise ConfigurationError(
            f"losing {lost} of {len(made.inventory.nodes)} nodes", where="--lose", hint=f"0 to {len(made.inventory.nodes) - 1}"
        )
    return msgspec.structs.replace(made, inventory=made.inventory.without(lost))


def read_text(path: Path, flag: str) -> str:
    """A file's text.

    Raises:
        ConfigurationError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}", where=flag, hint="check the path") from error


def _model(flags: dict[str, Any]) -> tuple[shape.Model, dict[str, Any]]:
    given = {name: flags[name] for name in _SHAPE}
    if flags["model"] is None:
        return shape.make(**given), {}
    path: Path = flags["model"]
    if path.is_dir():
        path = path / "config.json"
    return configs.read(read_text(path, "--model"), str(path), **given)


def _inventory(flags: dict[str, Any]) -> inventory.Inventory:
    if flags["inventory"] is not None:
        overrides = {name: flags[name] for name in _INVENTORY}
        if flags["nodes"] is not None or flags["gpus_per_node"] is not None:
            raise ConfigurationError("--inventory and --nodes both describe nodes", where="--inventory", hint="give one of them")
        return inventory.read(read_text(flags["inventory"], "--inventory"), str(flags["inventory"]), **overrides)
    sizes = _numbers(flags["gpus_per_node"], "--gpus-per-node") if flags["gpus_per_node"] is not None else [8]
    nodes = flags["nodes"] if flags["nodes"] is not None else len(sizes)
    return inventory.uniform(
        nodes,
        sizes[0] if len(sizes) == 1 else sizes,
        device=flags["gpu_type"] or "h100",
        gpu_memory_gb=flags["gpu_memory_gb"],
        peak_tflops=flags["peak_tflops"],
        nvlink_gpus=flags["nvlink_gpus"],
    )


def _micro_batches(text: str | None) -> tuple[int, ...]:
    sizes = _numbers(text, "--micro-batch") if text is not None else []
    if any(size < 1 for size in sizes):
        raise ConfigurationError(f"micro-batch {text}", where="--micro-batch", hint="give at least 1 sample")
    return tuple(sizes)


def _numbers(text: str, flag: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigurationError(
            f"{text!r} is not a whole number or a list of them", where=flag, hint="for example 8, or 8,8,7,6"
        ) from error


def _recipe(name: str) -> memory.Recipe:
    return memory.RECIPES[_choice(name, tuple(memory.RECIPES), "--optimizer")]


def _choice(name: str, known: tuple[str, ...], flag: str) -> str:
    if name not in known:
        raise ConfigurationError(f"{name!r} is not known", where=flag, hint=f"one of {', '.join(known)}")
    return name


def _doubts(model: shape.Model) -> list[str]:
    counted = shape.counted(model)
    if model.known and model.params and abs(counted / model.params - 1.0) > 0.1:
        return [f"the shape counts {counted / 1e9:.4g}B parameters, {model.params / 1e9:.4g}B were stated: the layers are scaled to match"]
    return []
