"""The protocol as 0.1.0 spoke it, from its recorded shapes: what it did not know it neither sent nor read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

_RECORDED = Path(__file__).parents[1] / "data" / "upgrade" / "0.1.0" / "messages.json"

Side = Literal["from_agent", "to_agent"]


class OldProtocol:
    """Lines as that version would have written, or understood, them."""

    def __init__(self) -> None:
        document: dict[str, Any] = json.loads(_RECORDED.read_text(encoding="utf-8"))
        self._types: dict[str, Any] = document["types"]
        self._sides: dict[str, dict[str, Any]] = {side: self._tags(document[side]) for side in ("from_agent", "to_agent")}

    def tags(self, side: Side) -> set[str]:
        """Messages that it knew."""
        return set(self._sides[side])

    def translate(self, line: bytes, side: Side) -> bytes:
        """The line without what it did not know; empty: a message that it did not know.

        Raises:
            AssertionError: something is missing that it could not do without.
        """
        message = json.loads(line)
        shape = self._sides[side].get(message["type"])
        return json.dumps(self._prune(message, shape)).encode() + b"\n" if shape is not None else b""

    def _tags(self, union: dict[str, Any]) -> dict[str, Any]:
        shapes = [self._types[item["$ref"].removeprefix("#/")] for item in union["anyOf"]]
        return {shape["properties"]["type"]["enum"][0]: shape for shape in shapes}

    def _prune(self, value: Any, shape: dict[str, Any]) -> Any:
        if "$ref" in shape:
            return self._prune(value, self._types[shape["$ref"].removeprefix("#/")])
        if "anyOf" in shape:
            return None if value is None else self._prune(value, next(item for item in shape["anyOf"] if item.get("type") != "null"))
        if isinstance(value, dict) and "properties" in shape:
            missing = set(shape.get("required", ())) - value.keys()
            assert not missing, f"0.1.0 cannot do without {sorted(missing)} in {value}"
            return {name: self._prune(item, shape["properties"][name]) for name, item in value.items() if name in shape["properties"]}
        if isinstance(value, dict) and isinstance(shape.get("additionalProperties"), dict):
            return {name: self._prune(item, shape["additionalProperties"]) for name, item in value.items()}
        if isinstance(value, list) and "prefixItems" in shape:
            assert len(value) >= shape["minItems"], f"0.1.0 cannot do without {shape['minItems']} items in {value}"
            return [self._prune(item, one) for item, one in zip(value, shape["prefixItems"], strict=False)]
        if isinstance(value, list) and "items" in shape:
            return [self._prune(item, shape["items"]) for item in value]
        return value
