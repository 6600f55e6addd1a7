"""`regrow ckpt mirror | fetch`: a second tier of a checkpoint folder behind a URL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regrow.cli.ckpt import no_such, progress_bar, size_text
from regrow.cli.output import Json, emit, say

Url = Annotated[str, typer.Argument(help="s3://bucket/folder, gs://bucket/folder, file:///folder …", show_default=False)]
Folder = Annotated[Path, typer.Argument(help="A job's checkpoint folder.", show_default=False)]


def register(group: typer.Typer) -> None:
    """Add the commands to `regrow ckpt`."""
    group.command("mirror")(_mirror)
    group.command("fetch")(_fetch)


def _mirror(
    path: Folder,
    url: Url,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Checkpoints to have there.")] = 3,
    follow: Annotated[float, typer.Option("--follow", min=0.0, help="Look again every so many seconds, until stopped; 0: once.")] = 0.0,
    json: Json = False,
) -> None:
    """Copy the newest checkpoints to another storage, records last; safe while the job runs. What is older there is removed."""
    import signal
    import threading

    from regrow.ckpt.remote import Tier, mirror

    if not path.is_dir():
        raise no_such(path)
    tier = Tier(url)
    ended = threading.Event()
    if follow:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
    while True:
        with progress_bar("mirror", quiet=json) as progress:
            result = mirror(path, tier, keep=keep, progress=progress)
        if follow:
            say(f"uploaded {len(result.uploaded)}, removed {len(result.removed)}, there {len(result.kept)}")
        if not follow or ended.wait(follow):
            break

    def human() -> None:
        for verb, names in (("uploaded", result.uploaded), ("removed", result.removed), ("there", result.kept)):
            for name in names:
                print(f"{verb:<9} {name}")
        print(f"{size_text(result.num_bytes)} uploaded to {url}")

    emit({"path": str(path), "url": url, "result": result}, as_json=json, human=human)


def _fetch(
    url: Url,
    path: Annotated[Path, typer.Argument(help="Checkpoint folder to fetch into.", show_default=False)],
    step: Annotated[int | None, typer.Option("--step", help="Take the checkpoint of this step.")] = None,
    json: Json = False,
) -> None:
    """Bring the newest checkpoint from another storage into a folder, every byte verified; a job then restores it."""
    from regrow.ckpt.catalog import check_place
    from regrow.ckpt.manifest import read_record
    from regrow.ckpt.remote import Tier, fetch

    check_place(path)
    tier = Tier(url)
    with progress_bar("fetch", quiet=json) as progress:
        made = fetch(tier, path, step=step, progress=progress)
    record = read_record(made)
    document = {"directory": str(made), "step": record.step, "samples": record.samples, "bytes": record.num_bytes}
    emit(document, as_json=json, human=lambda: print(f"{made}: step {record.step}, {size_text(record.num_bytes)}"))
