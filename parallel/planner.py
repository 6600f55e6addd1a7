"""The planner's public face: `choose_mesh` for a running job."""

from __future__ import annotations

from regrow.parallel.elastic import MeshChoice, choose_mesh

__all__ = ["MeshChoice", "choose_mesh"]
