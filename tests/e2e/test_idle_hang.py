"""A script that does not know Regrow hangs in the middle of its run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launcher import Run

pytestmark = pytest.mark.timeout(400)

_SCRIPT = """
import os, threading, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        threading.Lock().acquire()
        lock = threading.Lock(); lock.acquire(); lock.acquire()
    threading.Event().wait()
end = time.process_time() + 1.0
while time.process_time() < end:
    pass
print("worked", flush=True)
"""


@pytest.mark.soak
def test_idle_ranks_of_a_plain_script_are_hung_when_that_was_asked_for(launch: Callable[..., Run], tmp_path: Path) -> None:
    """Case E01 at level 0: no steps, no phases; no rank uses CPU time for four seconds, the second attempt works."""
    script = tmp_path / "plain.py"
    script.write_text(_SCRIPT)
    run = launch("--local", "2", "--nproc-per-node", "1", "--job", "plain", "--hang-idle-seconds", "4", str(script))
    assert run.wait() == 0, run.story()
    (incident,) = run.result()["incidents"]
    assert incident["kind"] == "hang"
    assert "no progress" in incident["text"]
