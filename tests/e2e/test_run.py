"""`regrow run --local` as a user sees it: real etcd, real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launcher import TEST_MARK, Run

from regrow.ckpt import catalog
from regrow.processes import marked

ROOT = Path(__file__).parents[2]
TOY = Path(__file__).with_name("toy.py")
PLAIN = ROOT / "examples" / "ddp_plain.py"

pytestmark = pytest.mark.timeout(400)


def toy(tmp_path: Path, steps: int, *flags: str) -> tuple[str, ...]:
    return (
        "--local",
        "2",
        "--nproc-per-node",
        "1",
        "--global-batch",
        "8",
        "--job",
        "toy",
        *flags,
        str(TOY),
        "--steps",
        str(steps),
        "--log",
        str(tmp_path / "log"),
    )


def lines(tmp_path: Path) -> list[list[dict[str, Any]]]:
    """What any rank wrote down in every generation, in order: where it began, then its steps.

    The last step of a rank that was killed may be in the logs of its peers only: they had applied it, and it is not computed again.
    """
    found: dict[int, dict[int, dict[str, Any]]] = {}
    for path in sorted((tmp_path / "log").glob("g*-r*.jsonl")):
        log = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found.setdefault(int(path.stem[1:].split("-")[0]), {}).update({line.get("step", 0): line for line in log})
    return [[line for _, line in sorted(log.items())] for _, log in sorted(found.items())]


def lineage(tmp_path: Path) -> dict[int, float]:
    """{step: loss} of what survived: each generation goes on after what it restored."""
    kept: dict[int, float] = {}
    for log in lines(tmp_path):
        restored = log[0]["restored"]
        kept = {step: loss for step, loss in kept.items() if step <= restored} | {line["step"]: line["loss"] for line in log[1:]}
    return kept


def assert_like_twin(found: dict[int, float], twin: dict[int, float], steps: int) -> None:
    assert sorted(found) == list(range(1, steps + 1))
    for step, loss in found.items():
        assert loss == pytest.approx(twin[step], rel=1e-5), f"step {step}"


def test_unmodified_script_survives_the_kill_of_a_worker(launch: Callable[..., Run], tmp_path: Path) -> None:
    snapshot = tmp_path / "ddp.pt"
    run = launch("--local", "2", "--nproc-per-node", "1", "--job", "plain", str(PLAIN), "--steps", "300", "--checkpoint", str(snapshot))
    run.until(snapshot.exists, "a snapshot")
    assert run.inject("n1", "kill_worker")["done"]
    run.until(lambda: (run.job("plain").get("generation") or 0) >= 2, "a second generation")
    assert run.wait() == 0, run.story()
    assert run.result()["state"] == "done"
    assert run.gone(5.0) == []


NEVER_ENDS = """
import os, pathlib, threading
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    pathlib.Path("stuck").touch()
    threading.Event().wait()
pathlib.Path("ended-" + os.environ["RANK"]).touch()
"""


def test_rank_that_does_not_end_is_found_by_its_idleness(
    launch: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGROW_POLICY_END_LINGER_SECONDS", "3")
    script = tmp_path / "stuck.py"
    script.write_text(NEVER_ENDS)
    run = launch("--local", "2", "--nproc-per-node", "1", "--job", "stuck", str(script))
    assert run.wait() == 0, run.story()
    assert (tmp_path / "stuck").exists()
    assert (tmp_path / "ended-1").exists()
    result = run.result()
    assert result["state"] == "done"
    assert [(item["kind"], item["rank"], item["node"]) for item in result["incidents"]] == [("hang", 1, "")]
    assert "does not end after the program's end" in result["incidents"][0]["text"]
    assert run.gone(5.0) == []


def test_error_before_the_first_step_stops_at_once_with_its_traceback(launch: Callable[..., Run], tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import nothing_of_this_name\n")
    run = launch("--local", "2", "--nproc-per-node", "1", str(script))
    assert run.wait() == 1
    outcome = run.result()["outcome"]
    assert "nothing_of_this_name" in outcome["traceback"]
    assert outcome["rank"] in (0, 1)
    assert run.result()["generation"] == 1
    assert "nothing_of_this_name" in run.log.read_text() or "nothing_of_this_name" in json.dumps(run.result())
    assert run.gone(5.0) == []


def kill_pid(run: Run, word: str) -> None:
    os.kill(run.pids(word)[0], signal.SIGKILL)


KILLS: dict[str, Callable[[Run], object]] = {
    "worker": lambda run: run.inject("n0", "kill_worker"),
    "agent": lambda run: run.inject("n1", "kill_agent"),
    "shim": lambda run: run.inject("n1", "kill_shim"),
    "writer": lambda run: run.inject("n0", "kill_writer"),
    "supervisor": lambda run: kill_pid(run, "regrow supervisor"),
    "etcd": lambda run: kill_pid(run, "--name=etcd"),
}
KEEPS_TRAINING = {"agent", "supervisor", "etcd", "writer"}
"""What may die without a step being lost."""


@pytest.mark.parametrize("part", sorted(KILLS))
def test_kill_of_any_part(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float], part: str) -> None:
    steps = 120
    run = launch(*toy(tmp_path, steps))
    run.until(lambda: (run.job("toy").get("checkpoint") or {}).get("step"), "a committed checkpoint")
    committed = run.job("toy")["checkpoint"]["step"]
    KILLS[part](run)
    assert run.wait() == 0, run.story()
    assert_like_twin(lineage(tmp_path), twin, steps)
    restored = [log[0]["restored"] for log in lines(tmp_path)[1:]]
    assert all(step >= committed for step in restored)
    if part in KEEPS_TRAINING:
        assert not restored, f"{part} restarted the workers: {run.story()}"
    assert run.gone(5.0) == []


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 22))])
def test_random_kills_of_any_process(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float], seed: int) -> None:
    """One process after another, whichever it is, at random moments: nothing committed is lost, nothing hangs, nothing is left."""
    chance = random.Random(seed)
    steps = 400
    run = launch(*toy(tmp_path, steps, "--max-restarts", "50"))
    run.until(lambda: (run.job("toy").get("checkpoint") or {}).get("step"), "a committed checkpoint")
    story: list[str] = []
    floors: list[tuple[int, int]] = []
    for _ in range(6):
        least = (run.job("toy").get("step") or 0) + chance.randint(5, 25)
        document = run.until(partial(run_beyond, run, least), f"step {least} after {story}")
        floors.append((len(lines(tmp_path)), document["checkpoint"]["step"]))
        pid = chance.choice(sorted(set(marked(TEST_MARK, run.mark)) - {run.process.pid}))
        story.append(f"{pid} {command_of(pid)}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, f"{story}\n{run.story()}"
    assert_like_twin(lineage(tmp_path), twin, steps)
    logs = lines(tmp_path)
    for num_generations, committed in floors:
        assert all(log[0]["restored"] >= committed for log in logs[num_generations:]), story
    assert run.gone(5.0) == []


def run_beyond(run: Run, least: int) -> dict[str, Any] | None:
    """The job's document once it is at this step."""
    document = run.job("toy")
    return document if (document.get("step") or 0) >= least else None


def command_of(pid: int) -> str:
    """The command line of a process, for messages."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    except OSError:
        return "gone"


def test_killed_launcher_leaves_nothing_and_the_next_run_resumes(
    launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]
) -> None:
    steps = 150
    run = launch(*toy(tmp_path, steps))
    run.until(lambda: ((run.job("toy").get("checkpoint") or {}).get("step") or 0) > 3, "a committed checkpoint")
    committed = run.job("toy")["checkpoint"]["step"]
    run.process.kill()
    run.process.wait()
    assert run.gone(2.0) == []
    again = launch(*toy(tmp_path, steps))
    assert again.wait() == 0, again.story()
    assert lines(tmp_path)[-1][0]["restored"] >= committed
    assert_like_twin(lineage(tmp_path), twin, steps)


def test_ctrl_c_saves_and_stops_and_the_same_command_goes_on(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]) -> None:
    steps = 150
    run = launch(*toy(tmp_path, steps))
    run.until(lambda: (run.job("toy").get("step") or 0) > 5, "some steps")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.story()
    reached = run.result()["step"]
    assert 5 < reached < steps
    assert run.gone(5.0) == []
    again = launch(*toy(tmp_path, steps))
    assert again.wait() == 0, again.story()
    assert lines(tmp_path)[-1][0]["restored"] == max(lineage_before(tmp_path))
    assert_like_twin(lineage(tmp_path), twin, steps)


def lineage_before(tmp_path: Path) -> list[int]:
    """Steps of the generations before the last one."""
    return [line["step"] for log in lines(tmp_path)[:-1] for line in log[1:]]


def test_only_damaged_checkpoints_are_an_error_and_fresh_starts_at_zero(launch: Callable[..., Run], tmp_path: Path) -> None:
    run = launch(*toy(tmp_path, 12, "--keep-last", "1"))
    assert run.wait() == 0, run.story()
    folder = tmp_path / "r" / "checkpoints"
    for entry in catalog.scan(folder):
        for file in Path(entry.directory).glob("rank-*"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(bytes(data))
    run = launch(*toy(tmp_path, 24, "--job", "toy2", "--checkpoint-dir", str(folder)))
    assert run.wait() == 1, run.story()
    assert "checkpoint" in json.dumps(run.result()["outcome"])
    foreign = launch(*toy(tmp_path, 24, "--job", "toy3", "--checkpoint-dir", str(folder), "--fresh"))
    assert foreign.wait() == 2, foreign.story()
    assert "holds checkpoints of job toy" in foreign.story()
    fresh = launch(*toy(tmp_path, 24, "--checkpoint-dir", str(folder), "--fresh"))
    assert fresh.wait() == 0, fresh.story()
    assert fresh.result()["step"] == 24


def test_second_run_in_one_folder_is_refused(launch: Callable[..., Run], tmp_path: Path) -> None:
    first = launch(*toy(tmp_path, 2000))
    first.until(
        lambda: (tmp_path / "r" / "lock").exists() and (tmp_path / "r" / "supervisor" / "supervisor.json").exists(), "the first run"
    )
    second = launch(*toy(tmp_path, 10))
    assert second.wait() == 2
    assert "in use" in second.log.read_text()
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert first.gone(2.0) == []


def test_checkpoint_folder_that_cannot_be_written_is_refused_at_once(launch: Callable[..., Run], tmp_path: Path) -> None:
    run = launch(*toy(tmp_path, 5, "--checkpoint-dir", "/proc/regrow"))
    assert run.wait() == 2
    assert "/proc/regrow: the checkpoint folder cannot be written" in run.log.read_text()
    assert not run.root.exists()


def test_wrong_arguments_of_the_script_are_not_restarted(launch: Callable[..., Run]) -> None:
    run = launch("--local", "1", "--nproc-per-node", "2", "--job", "usage", str(PLAIN), "--no-such-flag")
    assert run.wait() == 1
    assert run.result()["generation"] == 1, run.story()
    assert "wrong usage" in run.result()["outcome"]["reason"]
