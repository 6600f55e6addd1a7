"""`python -m regrow`: the same as the `regrow` command."""

from __future__ import annotations

from regrow.cli import main

main()
