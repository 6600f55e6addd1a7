"""Context parallelism: each rank holds a run of the sequence, keys and values travel around the ring of ranks.

The softmax is put together block by block (online softmax, https://arxiv.org/abs/1805.02867; the ring is that of
https://arxiv.org/abs/2310.01889), so no rank ever holds the keys of the whole sequence. The backward pass computes the
blocks again from the saved row sums, and sends the gradients of keys and values around with them until they are home.

The sequence is cut into equal runs in order: with a causal mask the last rank computes about twice the mean. A cut that
pairs early with late runs would balance that and is not built.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regrow.errors import ConfigurationError
from regrow.parallel.dropout import KeyedDropout


@runtime_checkable
class ContextAware(Protocol):
    """A module that has to know which part of the sequence its rank holds."""

    def on_context(self, group: dist.ProcessGroup, *, index: int, size: int) -> None:
        """This rank holds part `index` of `size` equal parts; `group` connects them in order."""
        ...


class CausalAttention(nn.Module):
    """Softmax attention over earlier positions, with keyed dropout on its weights. No parameters.

    Args:
        drop: over the weights, full shape [heads, sequence, sequence], split by heads.
    """

    def __init__(self, drop: KeyedDropout) -> None:
        super().__init__()
        self.drop = drop
        self._group: dist.ProcessGroup | None = None

    def on_context(self, group: dist.ProcessGroup, *, index: int, size: int) -> None:
        """See ContextAware."""
        del index, size
        self._group = group

    def forward(self, query: Tensor, keys: Tensor, value: Tensor, key: Tensor | None) -> Tensor:
        """Attend: all [batch, heads here, sequence here, size of a head]; `key`: sample keys of the dropout."""
        if self._group is not None:
            return cast("Tensor", _Ring.apply(query, keys, value, key if self.drop.active else None, self.drop, self._group))
        scores = query @ keys.transpose(-1, -2) / math.sqrt(query.shape[-1])
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        weights = self.drop(scores.masked_fill(future, -math.inf).softmax(dim=-1), key)
        return weights @ value


def place_on_context(model: nn.Module, group: dist.ProcessGroup, *, index: int, size: int) -> None:
    """Tell every module that asks which part of the sequence this rank holds.

    Raises:
        ConfigurationError: no attention of the model can work on a part.
    """
    if not any(isinstance(module, CausalAttention) for module in model.modules()):
        raise ConfigurationError(
            f"cp = {size}: the model has no attention that works on a part of the sequence",
            where="--mesh",
            hint="use regrow.parallel.apply_context.CausalAttention in its layers, or cp = 1",
        )
    for module in model.modules():
        if isinstance(module, ContextAware):
            module.on_context(group, index=index, size=size)


def cut_sequence(tensor: Tensor, *, index: int, size: int) -> Tensor:
    """This rank's part of [batch, sequence, ...]."""
    return tensor.chunk(size, dim=1)[index].contiguous() if size > 1 else tensor


class _Ring(torch.autograd.Function):
    """Attention whose keys and values go around. See the module's text; formulas as in https://arxiv.org/abs/2205.14135."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, keys: Tensor, value: Tensor, key: Tensor | None, drop: KeyedDropout, group: Any) -> Tensor:
        blocks = _Blocks(query, key, drop, group)
        most = torch.full(query.shape[:-1], -math.inf, dtype=torch.float32, device=query.device)
        total, out = torch.zeros_like(most), torch.zeros_like(query, dtype=torch.float32)
        here = (keys.contiguous(), value.contiguous())
        for number in blocks.order:
            scores = blocks.scores(query, here[0], number)
            if scores is not None:
                higher = torch.maximum(most, scores.amax(dim=-1))
                weights = (scores - higher.unsqueeze(-1)).exp()
                shrink = (most - higher).exp()
                total = total * shrink + weights.sum(dim=-1)
                out = out * shrink.unsqueeze(-1) + blocks.dropped(weights, number) @ here[1].float()
                most = higher
            if number != blocks.order[-1]:
                here = blocks.pass_on(here)
        out = out / total.unsqueeze(-1)
        ctx.save_for_backward(query, keys, value, out, most + total.log())
        ctx.blocks = blocks
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, value, out, normal = ctx.saved_tensors
        gradient = gradients[0].float()
        blocks = cast("_Blocks", ctx.blocks)
        own = (gradient * out).sum(dim=-1, keepdim=True)
        to_query = torch.zeros_like(out)
        nothing = torch.zeros(out.shape, dtype=out.dtype, device=out.device)
        here = (keys.contiguous(), value.contiguous(), nothing, nothing.clone())
        for number in blocks.order:
            there, values, to_keys, to_value = here
            scores = blocks.scores(query, there, number)
            if scores is not None:
                weights = (scores - normal.unsqueeze(-1)).exp()
                to_value += blocks.dropped(weights, number).transpose(-1, -2) @ gradient
                to_weights = blocks.dropped(gradient @ values.float().transpose(-1, -2), number)
                to_scores = weights * (to_weights - own) * blocks.scale
                to_query += to_scores @ there.float()
                to_keys += to_scores.transpose(-1, -2) @ query.float()
            here = blocks.pass_on(here)  # the last time brings the gradients home
        return to_query.to(query.dtype), here[2].to(keys.dtype), here[3].to(value.dtype), None, None, None


class _Blocks:
    """The blocks of one attention: which rows are here, which columns come by, what is masked and dropped in each."""

    def __init__(self, query: Tensor, key: Tensor | None, drop: KeyedDropout, group: dist.ProcessGroup) -> None:
        self.scale = 1.0 / math.sqrt(query.shape[-1])
        self._key, self._drop, self._group = key, drop, group
        self._heads, self._size = query.shape[1], query.shape[2]
        self._index, self._count = dist.get_rank(group), dist.get_world_size(group)
        self.order = [(self._index - turn) % self._count for turn in range(self._count)]
        """Numbers of the blocks in the order in which they come by, our own first."""

    def pass_on(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give these to the next rank; returns what the one before gave."""
        arriving = tuple(torch.empty_like(tensor) for tensor in tensors)
        to, source = (self._index + 1) % self._count, (self._index - 1) % self._count
        sends = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=to) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=source) for tensor in arriving]
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()
        return arriving

    def scores(self, query: Tensor, keys: Tensor, number: int) -> Tensor | None:
        """Scaled scores of our rows with block `number`; None for a block of the future."""
        if number > self._index:
            return None
        scores = (query @ keys.transpose(-1, -2)).float() * self.scale
        if number == self._index:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(future, -math.inf)
        return scores

    def dropped(self, weights: Tensor, number: int) -> Tensor:
        """The same dropout that the whole matrix of weights would have in this place."""
        if self._key is None:
            return weights
        offsets = (self._drop.offset, self._index * self._size, number * self._size)
        return weights * self._drop.mask(self._key, (self._heads, self._size, self._size), offsets, dtype=weights.dtype)
