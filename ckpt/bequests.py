"""States that workers left when they were killed, in the writer's memory until their successors have taken them up.

A worker of a generation that failed holds the newest state there is. It copies it into memory that the writer owns, and dies; its
successor in the same place of the node asks for it (docs/adr/0018-dying-gasp.md). One for each place: a later one takes its place.
"""

from __future__ import annotations

import asyncio
import logging

from regrow.ckpt.arenas import Arena
from regrow.ckpt.budget import spare_memory
from regrow.ckpt.channel import ServerChannel
from regrow.ckpt.protocol import Bequeath, Bequeathed, Bequest, HeldAll, Inherit, Inherited, Ready, Rejected

KEEP_SECONDS = 900.0
"""Nobody came for it within this: the memory is given back."""
SPARE_RATIO = 1.5
"""A state is taken only where so many times its bytes can be spared: the host must not run out of memory for it."""
log = logging.getLogger("regrow.ckpt.writer")

Message = Bequeath | Bequeathed | Inherit | Inherited
"""What concerns them."""


class _Laid:
    """Memory in the hands of a worker that has not filled it yet."""

    def __init__(self, order: Bequeath, arena: Arena) -> None:
        self.order = order
        self.arena = arena


class Bequests:
    """Of all jobs of a node: {(job, place): what was left}. Used on the writer's event loop."""

    def __init__(self) -> None:
        self._laid: dict[ServerChannel, _Laid] = {}
        self._left: dict[tuple[str, int], tuple[Bequest, Arena]] = {}

    @property
    def num_kept(self) -> int:
        """States that are here."""
        return len(self._left)

    async def hear(self, channel: ServerChannel, message: Message) -> list[int]:
        """Do what a worker asks for. Returns descriptors that are to be closed when its connection ends."""
        match message:
            case Bequeath():
                await self._lay(channel, message)
            case Bequeathed():
                self._keep(channel, message)
            case Inherit():
                return self._give(channel, message)
            case Inherited():
                self._forget((message.job, message.slot))
        return []

    def gone(self, channel: ServerChannel) -> None:
        """The connection ended: what was not whole by then is void."""
        laid = self._laid.pop(channel, None)
        if laid is not None:
            laid.arena.close()
            log.info("bequest void job=%s generation=%d place=%d", laid.order.job, laid.order.generation, laid.order.slot)

    def outlived(self, job: str, generation: int) -> None:
        """A generation takes snapshots of its own: what those before it left is not needed any more."""
        for key in [key for key, (left, _) in self._left.items() if key[0] == job and left.generation < generation]:
            self._forget(key)

    async def _lay(self, channel: ServerChannel, order: Bequeath) -> None:
        self.gone(channel)
        known = self._left.get((order.job, order.slot))
        if known is not None and known[0].generation >= order.generation:
            channel.send(Rejected(reason=f"generation {known[0].generation} has left its state here", fenced=True))
            return
        if spare_memory() < SPARE_RATIO * order.num_bytes:
            channel.send(Rejected(reason=f"{order.num_bytes} bytes, and memory is short"))
            return
        try:
            arena = await asyncio.to_thread(Arena, order.num_bytes)
        except OSError as error:
            channel.send(Rejected(reason=f"no memory for {order.num_bytes} bytes: {error.strerror}"))
            return
        self._laid[channel] = _Laid(order, arena)
        channel.send(Ready(num_arenas=1, arena_bytes=order.num_bytes), [arena.handle])

    def _keep(self, channel: ServerChannel, message: Bequeathed) -> None:
        laid = self._laid.pop(channel, None)
        if laid is None:
            return
        order, key = laid.order, (laid.order.job, laid.order.slot)
        self._forget(key)
        left = Bequest(
            generation=order.generation,
            step=message.step,
            num_bytes=order.num_bytes,
            head_bytes=message.head_bytes,
            digest=message.digest,
        )
        self._left[key] = (left, laid.arena)
        asyncio.get_running_loop().call_later(KEEP_SECONDS, self._expire, key, left)
        log.info("bequest job=%s generation=%d place=%d step=%d bytes=%d", *key[:1], left.generation, key[1], left.step, left.num_bytes)

    def _give(self, channel: ServerChannel, message: Inherit) -> list[int]:
        found = self._left.get((message.job, message.slot))
        handle = found[1].share() if found is not None else -1
        if found is not None and handle >= 0:
            channel.send(found[0], [handle])
        channel.send(HeldAll())
        return [handle] if handle >= 0 else []

    def _expire(self, key: tuple[str, int], left: Bequest) -> None:
        if key in self._left and self._left[key][0] is left:
            self._forget(key)

    def _forget(self, key: tuple[str, int]) -> None:
        """Whoever reads it has a descriptor of its own; nothing else is ever put into this memory."""
        found = self._left.pop(key, None)
        if found is not None:
            found[1].close()

    def close(self) -> None:
        """Give all memory back."""
        for key in list(self._left):
            self._forget(key)
        for channel in list(self._laid):
            self.gone(channel)
