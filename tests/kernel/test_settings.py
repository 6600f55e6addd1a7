import dataclasses
from pathlib import Path

import pytest

from regrow import settings
from regrow.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Example:
    """A settings class."""

    ttl_seconds: float = 5.0
    """Lease."""
    observe_only: bool = False
    """Switch."""
    state: Path = Path()
    """Folder."""


def test_flag_beats_environment_beats_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[part]\nttl_seconds = 1\nobserve-only = true\nstate = '/a'\n")
    made, story = settings.load(
        Example,
        section="part",
        file=file,
        environ={"REGROW_PART_TTL_SECONDS": "2", "REGROW_PART_STATE": "/b"},
        flags={"state": "/c", "ttl_seconds": None},
    )
    assert made == Example(2.0, True, Path("/c"))
    assert [item.source for item in story] == ["environment REGROW_PART_TTL_SECONDS", f"file {file}", "flag --state"]


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[part]\nttl_second = 1\n")
    with pytest.raises(ConfigurationError) as caught:
        settings.load(Example, section="part", file=file, environ={})
    assert "ttl_seconds" in caught.value.hint


@pytest.mark.parametrize(("name", "text"), [("TTL_SECONDS", "soon"), ("OBSERVE_ONLY", "maybe")])
def test_wrong_type_says_where_it_came_from(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        settings.load(Example, section="part", environ={f"REGROW_PART_{name}": text})
    assert name in caught.value.where


@pytest.mark.parametrize("content", ["not toml [", "part = 3"])
def test_bad_file(tmp_path: Path, content: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError):
        settings.load(Example, section="part", file=file, environ={})


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        settings.load(Example, section="part", file=tmp_path / "none.toml", environ={})
