import json
import subprocess
import sys

import pytest


def regrow(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "regrow", *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_help_fits_one_screen() -> None:
    done = regrow("--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 50


def test_version() -> None:
    from regrow import __version__

    assert regrow("--version").stdout == f"regrow {__version__}\n"


@pytest.mark.parametrize("arguments", [("nonsense",), ("plan", "--no-such-flag")])
def test_wrong_usage_is_exit_two_with_a_message(arguments: tuple[str, ...]) -> None:
    done = regrow(*arguments)
    assert done.returncode == 2
    assert done.stderr.strip()


def test_what_is_not_built_says_so_and_is_no_stub() -> None:
    from regrow.cli.app import MODULES, module_of
    from regrow.cli.pending import NotBuilt

    for name in MODULES:
        if isinstance(module_of(name), NotBuilt):
            done = regrow(name, "--json")
            assert done.returncode == 2
            assert json.loads(done.stdout)["error"]["kind"] == "NotBuiltError"
