"""Finding and reading the output of a rank on this machine."""

from __future__ import annotations

from pathlib import Path

_BLOCK = 65_536


def find_log(root: Path, *, node: str, job: str, generation: int, rank: int) -> Path | None:
    """<state>/jobs/<job>/g<generation>/rank<r>.out under an agent's state folder, or under nodes/<node> of a run folder."""
    tail_path = Path("jobs") / job / f"g{generation}" / f"rank{rank}.out"
    for base in (root, root / "nodes" / node, root / node):
        if (base / tail_path).is_file():
            return base / tail_path
    return None


def tail(path: Path, lines: int) -> str:
    """The last `lines` lines of a file, read from its end."""
    with path.open("rb") as file:
        file.seek(0, 2)
        position = file.tell()
        data = b""
        while position > 0 and data.count(b"\n") <= lines:
            step = min(_BLOCK, position)
            position -= step
            file.seek(position)
            data = file.read(step) + data
    return "".join(f"{line}\n" for line in data.decode(errors="replace").splitlines()[-lines:])
