"""The short path of a run folder that lies too deep for Unix sockets."""

from pathlib import Path

import pytest

from regrow.local import cluster


def test_links_of_run_folders_that_are_gone_are_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher killed by SIGKILL cannot remove its link: the next one does, and touches nothing that is in use."""
    temp = tmp_path / "t"
    temp.mkdir()
    monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: str(temp))
    folders = [tmp_path / name / ("deep" * 20) for name in ("gone", "kept", "new")]
    plans = [cluster.LocalCluster(cluster.ClusterPlan(root=folder, nodes=1, slots=1)) for folder in folders]
    shorts = [plan.short_root for plan in plans]
    assert all(short.parent == temp for short in shorts)
    for folder, short in zip(folders[:2], shorts[:2], strict=True):
        folder.mkdir(parents=True)
        cluster.link_short(short, folder)
    other = temp / "regrow-of-somebody"
    other.symlink_to(tmp_path / "nowhere")
    folders[0].rmdir()
    folders[2].mkdir(parents=True)
    cluster.link_short(shorts[2], folders[2])
    assert {path.name for path in temp.iterdir()} == {shorts[1].name, shorts[2].name, other.name}
    assert shorts[2].resolve() == folders[2].resolve()
