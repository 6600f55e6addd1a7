"""Section [actuators] of the supervisor's settings."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from regrow import security, settings
from regrow.errors import ConfigurationError
from regrow.supervisor.actuators import kubernetes
from regrow.supervisor.actuators.command import Command
from regrow.supervisor.actuators.port import Actuator
from regrow.supervisor.actuators.slurm import Slurm

KINDS = ("slurm", "kubernetes", "command")
MODES = ("off", "dry-run", "on")
_TAINT = re.compile(r"([a-z0-9]([a-z0-9.-]{0,250}[a-z0-9])?/)?[A-Za-z0-9]([\w.-]{0,50}[A-Za-z0-9])?", re.ASCII)
"""A label's key of Kubernetes, with room for "-reason"."""


@dataclasses.dataclass(frozen=True)
class ActuatorConfig:
    """Section [actuators]; environment REGROW_ACTUATORS_<FIELD>."""

    mode: str = "off"
    """off; dry-run: what would be done is written down, nothing is done; on."""
    use: str = ""
    """Which ones, comma separated: slurm, kubernetes, command."""
    per_hour: int = 10
    """Nodes that may be taken out in an hour by each of them. Nodes that come back are not counted."""
    timeout_seconds: float = 30.0
    """Longest time of one attempt."""
    slurm_scontrol: str = "scontrol"
    """The program: a path, or a name in PATH."""
    kubernetes_url: str = ""
    """URL of the API server; empty: that of the cluster in which the supervisor runs."""
    kubernetes_token_file: str = ""
    """File with a bearer token; empty: the pod's account (no token when kubernetes_url is given)."""
    kubernetes_ca: str = ""
    """PEM file of the API server's authority; empty: the pod's account, or the system's when kubernetes_url is given."""
    kubernetes_taint: str = "regrow/quarantined"
    """Key of taint and label."""
    kubernetes_effect: str = "NoSchedule"
    """NoSchedule, PreferNoSchedule or NoExecute."""
    command_out: tuple[str, ...] = ()
    """Arguments of the program that is told that a node is out; places: {node} {reason} {hardware} {id} {direction}."""
    command_in: tuple[str, ...] = ()
    """Arguments of the program that is told that a node is back; empty: nobody is told."""

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names in `use`."""
        return tuple(dict.fromkeys(word.strip() for word in self.use.split(",") if word.strip()))


def load(file: Path | None) -> tuple[ActuatorConfig, list[settings.Provenance]]:
    """Read and check.

    Raises:
        ConfigurationError: unknown key, wrong value, something that is used is not set up.
    """
    config, story = settings.load(ActuatorConfig, section="actuators", file=file)
    check(config)
    return config, story


def check(config: ActuatorConfig) -> None:
    """What belongs together.

    Raises:
        ConfigurationError: it does not fit.
    """
    where = "[actuators]"
    if config.mode not in MODES:
        raise ConfigurationError(f"mode = {config.mode!r} is not known", where=where, hint=f"known: {', '.join(MODES)}")
    for kind in config.kinds:
        if kind not in KINDS:
            raise ConfigurationError(f"use = {kind!r} is not known", where=where, hint=f"known: {', '.join(KINDS)}")
    if config.mode != "off" and not config.kinds:
        raise ConfigurationError(f"mode = {config.mode!r} and none is used", where=where, hint='for example use = "slurm"')
    if config.per_hour < 1 or config.timeout_seconds <= 0:
        raise ConfigurationError("per_hour must be at least 1, timeout_seconds above 0", where=where)
    if config.kubernetes_effect not in kubernetes.EFFECTS:
        raise ConfigurationError(
            f"kubernetes_effect = {config.kubernetes_effect!r} is not known", where=where, hint=f"known: {', '.join(kubernetes.EFFECTS)}"
        )
    if not _TAINT.fullmatch(config.kubernetes_taint):
        raise ConfigurationError(f"kubernetes_taint = {config.kubernetes_taint!r} is not a key of a label", where=where)
    if "command" in config.kinds:
        make("command", config)
    for name in ("kubernetes_ca", "kubernetes_token_file"):
        path = getattr(config, name)
        if path and "kubernetes" in config.kinds:
            security.check_readable(path, f"{where} {name}")


def build(config: ActuatorConfig) -> tuple[Actuator, ...]:
    """Those that are used; none when the mode is off.

    Raises:
        ConfigurationError: one cannot be set up.
    """
    return tuple(make(kind, config) for kind in config.kinds) if config.mode != "off" else ()


def make(kind: str, config: ActuatorConfig) -> Actuator:
    """One of them.

    Raises:
        ConfigurationError: it cannot be set up.
    """
    if kind == "slurm":
        return Slurm(config.slurm_scontrol, config.timeout_seconds)
    if kind == "command":
        return Command(config.command_out, config.command_in, config.timeout_seconds)
    return kubernetes.Kubernetes(
        config.kubernetes_url,
        token_file=config.kubernetes_token_file,
        ca_file=config.kubernetes_ca,
        taint=config.kubernetes_taint,
        effect=config.kubernetes_effect,
        timeout_seconds=config.timeout_seconds,
    )
