"""What one GPU of the fullest stage sends in a step, by axis, with what is counted."""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.parallel import comm, memory
from regrow.parallel.memory import Setup
from regrow.parallel.shape import Model


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes a step sent by one GPU."""

    dp: float
    """One pass of gradients and parameters: 2S up to ZeRO-2, 3S for ZeRO-3; it does not depend on the batch."""
    tp: float
    """All layers of the stage, all micro-batches, all passes."""
    pp: float
    """Activations forward and their gradients backward over the stage's boundaries."""
    cp: float = 0.0
    ep: float = 0.0
    detail: dict[str, Any] = {}


def traffic(model: Model, layers: tuple[int, ...], setup: Setup) -> Traffic:
    """Bytes by axis. Embedding and loss collectives of TP (below one layer's worth) are not counted."""
    ranks = setup.dp * setup.cp
    stage = max(range(len(layers)), key=lambda index: layers[index]) if layers else 0
    if model.known:
        dense, experts = memory.stage_params(model, layers[stage], stage, setup)
        params = dense + experts
    else:
        params = model.params / (setup.tp * setup.pp)
    group = memory.shard_groups(setup)[0] if setup.zero >= 3 else ranks
    volume = comm.zero_volume(params * setup.recipe.gradient, params * setup.recipe.weight, group, setup.zero)
    across = comm.all_reduce(params * setup.recipe.gradient / group, ranks // group)
    detail: dict[str, Any] = {
        "dp_gradients_only": volume.gradients,
        "dp_parameters_only": volume.parameters,
        "dp_tensor_bytes": params * setup.recipe.gradient,
        "dp_reading": _READINGS[setup.zero],
    }
    if setup.zero >= 3:
        detail["dp_with_gathers_per_micro_batch"] = setup.micro_batches * volume.parameters + volume.gradients
    if not model.known:
        return Traffic(dp=volume.total + across, tp=0.0, pp=0.0, detail=detail)
    count, depth = setup.micro_batches, layers[stage]
    passes = 3 if setup.recompute == "full" else 2
    per_layer = comm.tp_volume(model, setup.micro_batch, setup.tp, passes=1, cp=setup.cp)
    detail |= {
        "tp_message_bytes": comm.tp_message(model, setup.micro_batch, setup.cp),
        "tp_per_all_reduce": per_layer / comm.TP_POINTS,
        "tp_per_layer_forward": per_layer,
        "tp_forward": per_layer * depth * count,
        "tp_passes": ["forward", "backward"] if passes == 2 else ["forward", "recomputed forward", "backward"],
        "pp_message_bytes": comm.pp_message(model, setup.micro_batch, setup.tp, setup.cp) if setup.pp > 1 else 0.0,
    }
    crossings = 0 if setup.pp == 1 else 1 if setup.pp == 2 else 2
    sparse = (model.layers - model.dense_layers) / model.layers if model.experts else 0.0
    return Traffic(
        dp=volume.total + across,
        tp=per_layer * passes * depth * count,
        pp=crossings * count * comm.pp_message(model, setup.micro_batch, setup.tp, setup.cp),
        cp=comm.cp_volume(model, setup.micro_batch, setup.cp, setup.tp) * depth * count,
        ep=comm.ep_volume(model, setup.micro_batch, setup.ep, tp=setup.tp, cp=setup.cp) * sparse * depth * count,
        detail=detail,
    )


_READINGS = {
    0: "2S: all-reduce of gradients",
    1: "2S: reduce-scatter of gradients and all-gather of updated parameters (the same bytes as DDP)",
    2: "2S in all; S if only the gradient part is counted, which is what 'halved' means",
    3: "3S: parameters gathered forward and backward, gradients reduce-scattered ('1.5 x 2S' is the same thing)",
}
