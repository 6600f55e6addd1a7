"""Configuration: frozen dataclasses filled from file < environment < flag, with the story of what won.

Each field of a settings class carries its description and unit in ``field(metadata={"help": ...})`` or its docstring.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import shlex
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from regrow.errors import ConfigurationError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where one value came from: default, file PATH, environment NAME, flag --name."""

    field: str
    value: Any
    source: str


def load(
    cls: type[T],
    *,
    section: str,
    file: Path | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
) -> tuple[T, list[Provenance]]:
    """Fill `cls`. Flags that are None were not given. Environment names are REGROW_<SECTION>_<FIELD>.

    Raises:
        ConfigurationError: unknown key (with the nearest match), value of a wrong type, unreadable file.
    """
    hints = get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    chosen: dict[str, tuple[Any, str]] = {}
    for key, value in _from_file(file, section).items():
        chosen[_known(key, names, str(file))] = (value, f"file {file}")
    for name in names:
        variable = f"REGROW_{section}_{name}".upper()
        raw = (os.environ if environ is None else environ).get(variable)
        if raw is not None:
            chosen[name] = (raw, f"environment {variable}")
    for key, value in (flags or {}).items():
        if value is not None:
            chosen[_known(key, names, "flags")] = (value, f"flag --{key.replace('_', '-')}")
    values = {name: _convert(value, hints[name], name, source) for name, (value, source) in chosen.items()}
    made = cls(**values)
    story = [Provenance(name, getattr(made, name), chosen[name][1] if name in chosen else "default") for name in names]
    return made, story


def _from_file(file: Path | None, section: str) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        document = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot be read: {error.strerror}", where=str(file), hint="check --config") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"is not TOML: {error}", where=str(file), hint="see docs/operations.md for an example") from error
    table = document.get(section, {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"[{section}] must be a table", where=str(file))
    return table


def _known(key: str, names: list[str], where: str) -> str:
    name = key.replace("-", "_")
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(names)}"
    raise ConfigurationError(f"unknown key {key!r}", where=where, hint=hint)


def _convert(value: Any, kind: Any, name: str, source: str) -> Any:
    try:
        if kind is bool and isinstance(value, str):
            lowered = value.lower()
            if lowered not in ("1", "0", "true", "false", "yes", "no", "on", "off"):
                raise ValueError("not a yes or no")
            return lowered in ("1", "true", "yes", "on")
        if kind == tuple[str, ...]:
            return _words(value)
        if kind in (int, float, str, Path):
            return kind(value)
    except (TypeError, ValueError) as error:
        wanted = "list of texts" if kind == tuple[str, ...] else f"{kind.__name__}"
        raise ConfigurationError(f"{name} = {value!r} is not a {wanted}", where=source) from error
    return value


def _words(value: Any) -> tuple[str, ...]:
    """A list of a file as it is; a text (from the environment) split into words as a shell would, with its quotes and nothing else."""
    if isinstance(value, str):
        return tuple(shlex.split(value))
    if not isinstance(value, (list, tuple)) or not all(isinstance(word, str) for word in value):
        raise TypeError("not texts")
    return tuple(value)
