"""The mesh for a number of workers, remembered: the planner is pure, so the same question has the same answer."""

from __future__ import annotations

import msgspec

from regrow import wire
from regrow.parallel.planner import MeshChoice, choose_mesh

_REMEMBERED = 256
_answers: dict[tuple[bytes, int], MeshChoice | None] = {}


def choose(spec: wire.JobSpec, num_workers: int) -> MeshChoice | None:
    """The best mesh of at most `num_workers` workers that keeps the job's batch; None: there is none.

    Raises:
        ConfigurationError: the job's own mesh table is wrong.
    """
    key = (msgspec.json.encode(spec), num_workers)
    if key not in _answers:
        if len(_answers) >= _REMEMBERED:
            _answers.clear()
        _answers[key] = choose_mesh(spec, num_workers)
    return _answers[key]
