"""Progress words: what a reader sees while writers run, are killed in mid-write, or never wrote."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regrow.agent import progress


def test_a_word_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    progress.create_progress(path, 3)
    writer = progress.ProgressWriter(path, 1, generation=7)
    writer.publish(phase="step", started_step=5, applied_step=4)
    writer.publish(applied_step=5)
    words = progress.read_progress(path)
    assert [word.slot for word in words] == [0, 1, 2]
    assert words[0].sequence == 0
    assert words[0].phase == "start"
    assert (words[1].generation, words[1].started_step, words[1].applied_step, words[1].phase) == (7, 5, 5, "step")
    assert words[1].pid == os.getpid()
    assert 0 <= words[1].age_seconds() < 60
    writer.close()


def test_a_missing_file_has_no_words(tmp_path: Path) -> None:
    assert progress.read_progress(tmp_path / "none") == []


def test_a_word_that_was_cut_off_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    writer = progress.ProgressWriter(path, 0, generation=2)
    writer.publish(phase="save", applied_step=9)
    with path.open("r+b") as file:
        file.write((3).to_bytes(8, "little"))
    word = progress.read_progress(path)[0]
    assert (word.sequence, word.applied_step, word.phase) == (3, 9, "save")
    again = progress.ProgressWriter(path, 0, generation=3)
    again.publish(phase="step")
    assert progress.read_progress(path)[0].sequence % 2 == 0


def test_unknown_phase_and_location_are_refused(tmp_path: Path) -> None:
    writer = progress.ProgressWriter(tmp_path / "progress", 0)
    with pytest.raises(ValueError, match="phase 'dance'"):
        writer.publish(phase="dance")
    with pytest.raises(ValueError, match="is not <path>:<slot>"):
        progress.parse_location("/no/slot")
    assert progress.parse_location("/a:b/progress:3") == ("/a:b/progress", 3)


def test_words_are_whole_under_load(tmp_path: Path) -> None:
    path = tmp_path / "progress"
    script = (
        "import sys\n"
        "from regrow.agent.progress import ProgressWriter\n"
        "writer = ProgressWriter(sys.argv[1], 0, generation=1)\n"
        "for step in range(1, 1 << 40):\n"
        "    writer.publish(started_step=step, applied_step=step)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", script, str(path)])
    try:
        seen = 0
        deadline = time.monotonic() + 30
        while seen < 2_000 and time.monotonic() < deadline:
            words = progress.read_progress(path)
            if not words or words[0].sequence == 0:
                continue
            assert words[0].started_step == words[0].applied_step or words[0].sequence % 2
            seen += 1
        assert seen == 2_000
    finally:
        child.kill()
        child.wait()
