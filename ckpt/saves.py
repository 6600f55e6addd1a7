"""The state of the saves that a writer works on: which ranks of this node are in, and what comes out. No I/O."""

from __future__ import annotations

from typing import Literal

import msgspec

from regrow.ckpt.manifest import Metric, Parent, RankManifest, newest_metrics
from regrow.ckpt.protocol import ProducerHello, Submit
from regrow.wire import ShardsFailed

Key = tuple[str, int, int]
"""(job, generation, step)"""


class Save(msgspec.Struct, kw_only=True):
    """One step of one generation on this node."""

    hello: ProducerHello
    directory: str
    started_at: float
    parent: Parent | None = None
    samples: int = 0
    facts: dict[str, object] = {}
    metrics: dict[str, Metric] = {}
    sizes: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    """Bytes of the images of the ranks that have submitted."""
    submitted: set[int] = msgspec.field(default_factory=set[int])
    writing: set[int] = msgspec.field(default_factory=set[int])
    written: dict[int, RankManifest] = msgspec.field(default_factory=dict[int, RankManifest])
    failure: str = ""
    reported: bool = False


class Saves:
    """Folds submissions, written files and lost ranks; says when a step is complete, failed or over."""

    def __init__(self) -> None:
        self._saves: dict[Key, Save] = {}
        self._lost: dict[tuple[str, int], set[int]] = {}

    @property
    def writing_steps(self) -> tuple[int, ...]:
        """Steps with a write in progress."""
        return tuple(sorted({key[2] for key, save in self._saves.items() if save.writing}))

    def joined(self, hello: ProducerHello) -> None:
        """A producer is here (again). Earlier generations of its job are over."""
        for token in [one for one in self._lost if one[0] == hello.job and one[1] < hello.generation]:
            del self._lost[token]
        self._lost.get((hello.job, hello.generation), set[int]()).discard(hello.rank)

    def submit(self, hello: ProducerHello, message: Submit, now: float) -> Save:
        """A rank's snapshot is complete. A submission that contradicts the others' fails the step."""
        key = (hello.job, hello.generation, message.step)
        save = self._saves.get(key)
        if save is None:
            save = self._saves[key] = Save(
                hello=hello, directory=message.directory, started_at=now, samples=message.samples, parent=message.parent
            )
        if (message.directory, message.samples) != (save.directory, save.samples):
            save.failure = save.failure or f"rank {hello.rank} disagrees about directory or samples"
        if hello.rank in save.submitted:
            save.failure = save.failure or f"rank {hello.rank} submitted step {message.step} twice"
        gone = self._lost.get(key[:2], set[int]()) & set(hello.local_ranks) - save.submitted
        if gone:
            save.failure = save.failure or f"rank {min(gone)} ended before its snapshot"
            save.submitted |= gone
        save.submitted.add(hello.rank)
        save.writing.add(hello.rank)
        save.facts = {**save.facts, **message.facts}
        save.metrics = newest_metrics(save.metrics, message.metrics)
        return save

    def wrote(self, save: Save, rank: int, result: RankManifest | str) -> None:
        """A rank's file is on storage, or failed with a reason."""
        save.writing.discard(rank)
        if isinstance(result, str):
            save.failure = save.failure or result
        else:
            save.written[rank] = result

    def skip(self, hello: ProducerHello, step: int, reason: str) -> None:
        """A rank takes no part in a step: it is void."""
        key = (hello.job, hello.generation, step)
        save = self._saves.setdefault(key, Save(hello=hello, directory="", started_at=0.0))
        save.failure = save.failure or f"rank {hello.rank}: {reason}"
        save.submitted.add(hello.rank)

    def lost(self, hello: ProducerHello) -> list[Key]:
        """A producer is gone: steps that still wait for it fail, and all that others begin. Returns the former."""
        self._lost.setdefault((hello.job, hello.generation), set()).add(hello.rank)
        found: list[Key] = []
        for key, save in self._saves.items():
            if key[:2] == (hello.job, hello.generation) and hello.rank not in save.submitted:
                save.failure = save.failure or f"rank {hello.rank} ended before its snapshot"
                save.submitted.add(hello.rank)
                found.append(key)
        return found

    def supersede(self, key: Key) -> list[Key]:
        """A step is durable: older ones of its generation that still wait fail. Returns those.

        One whose manifest is being written is left alone: its files are whole, and the committing agent says that it is too late.
        """
        found: list[Key] = []
        for other, save in self._saves.items():
            if other[:2] == key[:2] and other[2] < key[2] and not save.reported:
                save.failure = save.failure or f"superseded by step {key[2]}"
                save.submitted.update(save.hello.local_ranks)
                found.append(other)
        return found

    def verdict(self, key: Key) -> Literal["open", "complete", "failed"]:
        """Where a step stands. `failed` is told once, as soon as it is known."""
        save = self._saves[key]
        if save.failure:
            return "open" if save.reported else "failed"
        return "complete" if set(save.written) == set(save.hello.local_ranks) else "open"

    def get(self, key: Key) -> Save | None:
        """A step that is not over yet."""
        return self._saves.get(key)

    def forget(self, key: Key) -> None:
        """A step is over."""
        self._saves.pop(key, None)

    def is_over(self, key: Key) -> bool:
        """A failed step is over when no write of it runs and all ranks of the node have been heard."""
        save = self._saves[key]
        return bool(save.failure) and not save.writing and save.submitted >= set(save.hello.local_ranks)

    @staticmethod
    def failed_report(key: Key, save: Save) -> ShardsFailed:
        """The message for the committing agent."""
        return ShardsFailed(job=key[0], generation=key[1], step=key[2], node=save.hello.node, reason=save.failure)
