"""Shell completion of names that only a running supervisor knows."""

from __future__ import annotations

import os
from typing import Any

from regrow.errors import RegrowError


def _names(path: str, key: str, name: str, incomplete: str) -> list[str]:
    from regrow.cli import remote

    try:
        base = remote.find(
            os.environ.get("REGROW_SUPERVISOR", ""), os.environ.get("REGROW_STORE", ""), os.environ.get("REGROW_CLUSTER", "local")
        )
        document: dict[str, Any] = remote.get(base, path)
    except RegrowError:
        return []  # a shell that completes has nowhere to show an error: nothing is offered
    return [str(item[name]) for item in document[key] if str(item[name]).startswith(incomplete)]


def jobs(incomplete: str) -> list[str]:
    """Names of jobs that begin so."""
    return _names("/v1/jobs", "jobs", "job", incomplete)


def nodes(incomplete: str) -> list[str]:
    """Names of nodes that begin so."""
    return _names("/v1/nodes", "nodes", "node", incomplete)
