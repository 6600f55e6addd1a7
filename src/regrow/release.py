"""The version of this installation, for parts that may not import the package's front (it leads to the worker library)."""

from __future__ import annotations

from importlib import metadata

VERSION = metadata.version("regrow")
