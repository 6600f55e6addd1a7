"""Regrow keeps a long training run alive on a cluster that breaks every few hours.

`import regrow` is cheap and never imports torch. The worker-side names (`attach`, `TrainState`) are resolved on
first use, inside the training process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regrow.agent.worker.session import GenerationChanged, Run, attach, in_place
    from regrow.ckpt.state import TrainState

__all__ = ["GenerationChanged", "Run", "TrainState", "__version__", "attach", "in_place"]

_HOMES = {
    "attach": "regrow.agent.worker.session",
    "in_place": "regrow.agent.worker.session",
    "Run": "regrow.agent.worker.session",
    "GenerationChanged": "regrow.agent.worker.session",
    "TrainState": "regrow.ckpt.state",
}


def __getattr__(name: str) -> Any:
    """Resolve a worker-side name lazily, so that the CLI and the daemons start without torch."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'regrow' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(home), name)
