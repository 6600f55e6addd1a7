"""Nodes that something is the matter with: few of thousands, found by one look at what changed."""

from __future__ import annotations

from regrow.supervisor.core import quarantine
from regrow.supervisor.core.memo import Scan
from regrow.supervisor.core.view import NodeView, View


def _is_notable(node: NodeView) -> bool:
    away = node.silent_since is not None or not node.connected  # not `reachable`: a property costs as much as all the rest here
    return away or bool(node.leaving) or node.clear_asked or quarantine.is_bad(node)


_notable: Scan[NodeView] = Scan(_is_notable)


def notable(view: View) -> tuple[NodeView, ...]:
    """Nodes that are away, leave, were cleared by an operator or say that they are unhealthy, in the view's order."""
    return _notable.get(view.nodes)
