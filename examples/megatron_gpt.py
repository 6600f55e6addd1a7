"""Megatron-Core's GPT as its users build it, no line about Regrow: tensor parallel, resumed from Megatron's own distributed checkpoint.

    pip install megatron-core
    torchrun --nproc-per-node 4 megatron_gpt.py --output out
    regrow run --local 2 --nproc-per-node 2 megatron_gpt.py --output out

Megatron-Core asks for a GPU in a few places. On a machine without one `without_gpu` replaces them; with a GPU it does nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH = 32
BATCH = 8
"""Samples of a step, over all data-parallel ranks."""


class NoStates(tensor_parallel.random.CudaRNGStatesTracker):
    """In the place of CUDA's random states, for a model without dropout."""

    @contextlib.contextmanager
    def fork(self, *_args: Any) -> Iterator[None]:
        """Nothing to keep apart."""
        yield


def without_gpu() -> None:
    """What Megatron-Core 0.16 takes from torch.cuda in this script: the device of its buffers, a synchronisation before it saves, and
    random states."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER = NoStates()  # noqa: SLF001  # there is no other way in
    tensor_parallel.random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True  # noqa: SLF001


def build() -> GPTModel:
    """A GPT of two layers on bytes, this rank's part of it."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        use_cpu_initialization=not torch.cuda.is_available(),
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=256, max_sequence_length=LENGTH)


def parts(model: GPTModel, optimizer: torch.optim.Optimizer, step: int, *, loading: bool = False) -> dict[str, Any]:
    """What a checkpoint holds, each tensor with its place in the whole model."""
    shards = model.sharded_state_dict(prefix="model.")
    if loading and not optimizer.state:  # moments to load into
        for parameter in model.parameters():
            optimizer.state[parameter] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    state = optimizer.state_dict()
    places = get_param_id_to_sharded_param_map(shards, (p for group in optimizer.param_groups for p in group["params"]))
    optim_state_to_sharding_state(state, places, exclude_keys=("step",))
    return {**shards, "optimizer": state, "step": step}


def restore(model: GPTModel, optimizer: torch.optim.Optimizer, output: Path) -> int:
    """Go on from the newest whole checkpoint; the completed step, 0: there is none."""
    found = sorted(output.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))
    if not found:
        return 0
    loaded = dist_checkpointing.load(parts(model, optimizer, 0, loading=True), str(found[-1]))
    step, moments = loaded.pop("step"), loaded.pop("optimizer")
    model.load_state_dict({name.removeprefix("model."): value for name, value in loaded.items()})
    for entry in moments["state"].values():
        entry["step"] = torch.tensor(float(step))
    optimizer.load_state_dict(moments)
    return int(step)


def save(model: GPTModel, optimizer: torch.optim.Optimizer, step: int, output: Path) -> None:
    """All of it beside its place, then the name that counts; two are kept."""
    fresh = output / f"unfinished-{step}"
    if dist.get_rank() == 0:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
    dist.barrier()
    dist_checkpointing.save(parts(model, optimizer, step), str(fresh))
    dist.barrier()
    if dist.get_rank() == 0:
        fresh.replace(output / f"step-{step}")
        for old in sorted(output.glob("step-*"), key=lambda path: int(path.name.split("-")[1]))[:-2]:
            shutil.rmtree(old)
    dist.barrier()


def samples(text: torch.Tensor, step: int) -> torch.Tensor:
    """This data-parallel rank's share of the step's samples: the whole batch is a function of the step alone."""
    rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    starts = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH + 1] for start in starts[rank::ranks].tolist()])


def main() -> None:
    """Train, or go on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("megatron_gpt"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(1)
    if not torch.cuda.is_available():
        without_gpu()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(options.tensor_parallel)
    if torch.cuda.is_available():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = build()
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device), 1)[None, None]
    options.output.mkdir(parents=True, exist_ok=True)
    step = restore(model, optimizer, options.output)
    while step < options.steps:
        step += 1
        batch = samples(text, step).to(device)
        positions = torch.arange(LENGTH, device=device).expand(len(batch), LENGTH)
        loss = model(batch[:, :-1], positions, mask, labels=batch[:, 1:]).sum() / (BATCH * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        for tensor in (loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)):
            dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step={step} world={dist.get_world_size()} loss={loss.item():.9g}", flush=True)
        if step % options.save_every == 0:
            save(model, optimizer, step, options.output)
    if dist.get_rank() == 0:
        print(f"finished step={step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
