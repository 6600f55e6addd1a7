"""C sources of ours are compiled at first use, with the machine's compiler or the one in the ziglang package."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from regrow.errors import OperationalError

_COMPILE_SECONDS = 120


def compiler() -> tuple[str, ...] | None:
    """Command of a C compiler: $CC, cc, gcc, clang, else ziglang's; None when there is none."""
    named = os.environ.get("CC", "").split()
    if named and shutil.which(named[0]):
        return tuple(named)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    return None


def cache_folder(name: str) -> Path:
    """regrow/NAME in the user's cache folder, else in the folder of temporary files; made if need be."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "regrow" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / f"regrow-{os.getuid()}" / name


def compile_library(source: Path, target: Path, flags: tuple[str, ...], where: str, extra: tuple[tuple[str, str, str], ...] = ()) -> None:
    """Compile one C file to a shared library that appears under its name when it is complete.

    Args:
        source: The C file.
        target: The library; its folder is there.
        flags: For the compiler.
        where: What it is for, for messages.
        extra: (flag, file name, text): a flag that names a file with this text; `{}` in it stands for the path.

    Raises:
        OperationalError: no compiler, or it failed.
    """
    command = compiler()
    if command is None:
        raise OperationalError("there is no C compiler", where=where, hint="install gcc (apt install gcc), or pip install ziglang")
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        arguments = [*command, *flags, str(source), "-o", str(made)]
        for flag, name, text in extra:
            (Path(folder) / name).write_text(text, encoding="utf-8")
            arguments.append(flag.format(Path(folder) / name))
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        if done.returncode:
            raise OperationalError(f"{command[0]} failed: {done.stderr[-600:]}", where=where, hint="set CC to a working C compiler")
        made.replace(target)
