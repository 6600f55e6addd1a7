"""Network adapters: is a link that was up down now? Read from sysfs; virtual interfaces are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from regrow.agent.health.findings import Finding

_NET = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


def read_links(net: Path = _NET, infiniband: Path = _INFINIBAND) -> dict[str, bool]:
    """Physical adapters and InfiniBand ports by name: True when the link is up."""
    links: dict[str, bool] = {}
    for interface in _children(net):
        if (interface / "device").exists():
            state = _word(interface / "operstate")
            if state in ("up", "down", "lowerlayerdown", "dormant"):
                links[interface.name] = state == "up"
    for adapter in _children(infiniband):
        for port in _children(adapter / "ports"):
            state = _word(port / "state")
            if state:
                links[f"{adapter.name}:{port.name}"] = "ACTIVE" in state
    return links


def findings(baseline: Mapping[str, bool], now: Mapping[str, bool]) -> Iterator[Finding]:
    """Links that were up when the agent started and are not now: watched, since a flap mends itself."""
    down = sorted(name for name, up in baseline.items() if up and not now.get(name, False))
    if down:
        yield Finding(kind="nic_link_down", action="watch", state="degraded", reason=f"link down: {', '.join(down)}")


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _word(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
