"""A small byte-level GPT, written so that a mesh can cut it: blocks in a ModuleDict under their global number.

No linear layer has a bias: a bias on K has a gradient of pure rounding noise, which would drown comparisons.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.nn import functional

from regrow.errors import ConfigurationError
from regrow.parallel.apply_context import CausalAttention
from regrow.parallel.apply_experts import MixtureOfExperts
from regrow.parallel.apply_layers import tie
from regrow.parallel.dropout import PLACES_PER_LAYER, KeyedDropout


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes. The defaults have 0.5 million parameters and divide by 1, 2, 3 (and heads, width and sequence by 6)."""

    layers: int = 4
    hidden: int = 96
    heads: int = 6
    seq: int = 96
    vocabulary: int = 256
    dropout: float = 0.1
    tied: bool = False
    """One matrix for embedding and output."""
    experts: int = 0
    """Experts in each layer, of which a token uses two; 0: one dense feed-forward layer."""


class Attention(nn.Module):
    """Causal self-attention over the heads that this rank holds."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.head_size = config.hidden // config.heads
        self.query = nn.Linear(config.hidden, config.hidden, bias=False)
        self.key = nn.Linear(config.hidden, config.hidden, bias=False)
        self.value = nn.Linear(config.hidden, config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        full = (config.heads, config.seq, config.seq)
        self.attend = CausalAttention(KeyedDropout(config.dropout, layer * PLACES_PER_LAYER + 1, full, split="heads"))

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        query, keys, value = (self._heads(part(x)) for part in (self.query, self.key, self.value))
        return self.out(self.attend(query, keys, value, key).transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


class Mlp(nn.Module):
    """Two linear layers with GELU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        place = (config.seq, config.hidden)
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config, layer)
        self.drop1 = KeyedDropout(config.dropout, layer * PLACES_PER_LAYER + 2, place)
        self.norm2 = nn.LayerNorm(config.hidden)
        inner = config.hidden
        self.mlp = Mlp(config) if not config.experts else MixtureOfExperts(config.experts, config.hidden, inner, chosen=2)
        self.drop2 = KeyedDropout(config.dropout, layer * PLACES_PER_LAYER + 3, place)

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x), key), key)
        return x + self.drop2(self.mlp(self.norm2(x)), key)


class Embedding(nn.Module):
    """Byte and position embeddings."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.bytes = nn.Embedding(config.vocabulary, config.hidden)
        self.positions = nn.Embedding(config.seq, config.hidden)
        self.drop = KeyedDropout(config.dropout, 0, (config.seq, config.hidden))
        self._part = 0

    def on_context(self, group: dist.ProcessGroup, *, index: int, size: int) -> None:
        """This rank holds part `index` of the sequence (apply_context.ContextAware)."""
        del group, size
        self._part = index

    def forward(self, x: Tensor, key: Tensor | None) -> Tensor:
        first = self._part * x.shape[1]
        positions = torch.arange(first, first + x.shape[1], device=x.device).unsqueeze(0)
        return self.drop(self.bytes(x) + self.positions(positions), key)


class Head(nn.Module):
    """Final norm and projection to bytes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.out = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


class Gpt(nn.Module):
    """The whole model, or the part of it that one pipeline stage keeps (absent parts are None or missing layers)."""

    first_parts = ("embedding",)
    last_parts = ("head",)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding: Embedding | None = Embedding(config)
        self.layers = nn.ModuleDict({str(layer): Block(config, layer) for layer in range(config.layers)})
        self.head: Head | None = Head(config)
        self.apply(_initialise)
        self.ties = {"head.out.weight": "embedding.bytes.weight"} if config.tied else {}
        tie(self, self.ties)

    def stream(self, micro_batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Meta tensors of one micro-batch: bytes, hidden states, logits."""
        config = self.config
        source = torch.empty(micro_batch, config.seq, dtype=torch.int64, device="meta")
        hidden = torch.empty(micro_batch, config.seq, config.hidden, device="meta")
        return source, hidden, torch.empty(micro_batch, config.seq, config.vocabulary, device="meta")

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Logits [batch, seq, vocabulary] of bytes [batch, seq]; between stages, hidden states. key: sample_keys."""
        if self.embedding is not None:
            x = self.embedding(x, key)
        for block in self.layers.values():
            x = block(x, key)
        return x if self.head is None else self.head(x)

    def tensor_plan(self, *, sequence_parallel: bool) -> dict[str, ParallelStyle]:
        """Styles for parallelize_module; `*` stands for any layer.

        Raises:
            ConfigurationError: a mixture of experts, which tensor parallelism does not cut here.
        """
        if self.config.experts:
            raise ConfigurationError("no tensor parallelism for mixtures of experts", where="--tp", hint="use ep, dp and pp")
        stream = Shard(1) if sequence_parallel else Replicate()
        whole = Replicate()
        plan: dict[str, ParallelStyle] = {
            "embedding.bytes": RowwiseParallel(input_layouts=whole, output_layouts=stream),
            "embedding.positions": RowwiseParallel(input_layouts=whole, output_layouts=stream),
            "layers.*.attention": PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(whole, None)),
            "layers.*.attention.query": ColwiseParallel(),
            "layers.*.attention.key": ColwiseParallel(),
            "layers.*.attention.value": ColwiseParallel(),
            "layers.*.attention.out": RowwiseParallel(output_layouts=stream),
            "layers.*.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
            "layers.*.mlp.up": ColwiseParallel(),
            "layers.*.mlp.down": RowwiseParallel(output_layouts=stream),
            "head.out": ColwiseParallel(input_layouts=stream, output_layouts=whole),
        }
        if sequence_parallel:
            plan |= {name: SequenceParallel() for name in ("layers.*.norm1", "layers.*.norm2", "head.norm")}
        return plan


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
