"""One pass of a job's second tier, as a process of its own: clients of object stores bring threads and memory that no daemon wants.

    python -m regrow.ckpt.mirroring FOLDER URL KEEP

Prints what it did as one line of JSON. Exit 0, or 1 with the reason on stderr. Ends with its launcher.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from regrow.ckpt import catalog
from regrow.ckpt.remote import Tier, fetch, mirror
from regrow.errors import RegrowError
from regrow.processes import signal_at_lifeline_end


def bring_back(folder: str, url: str) -> str:
    """Fetch the newest checkpoint behind the URL into a folder that has none. Returns its name; empty: there was one, or none is there.

    Raises:
        OperationalError: the store does not answer, or none of what it has is intact: no reason to start at step 0.
    """
    if catalog.scan(folder):
        return ""
    tier = Tier(url)
    return fetch(tier, Path(folder)).name if tier.scan() else ""


def main() -> None:
    """Mirror a folder once."""
    folder, url, keep = sys.argv[1:4]
    signal_at_lifeline_end(signal.SIGTERM)
    os.nice(5)
    try:
        done = mirror(Path(folder), Tier(url), keep=int(keep))
    except RegrowError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from error
    sys.stdout.write(msgspec.json.encode(done).decode() + "\n")


if __name__ == "__main__":
    main()
