"""Configuration of the supervisor: file < environment < flag, with the story of what won."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from regrow import security, settings
from regrow.errors import ConfigurationError
from regrow.supervisor import archive
from regrow.supervisor.core import observe
from regrow.supervisor.core.policy import Policy


@dataclasses.dataclass(frozen=True)
class SupervisorConfig:
    """Section [supervisor]; environment REGROW_SUPERVISOR_<FIELD>."""

    cluster: str = "local"
    """Name of the cluster: prefix of everything in the store."""
    store: str = ""
    """URL of the store: etcd://host:port[,host:port] or memory://."""
    state: str = ""
    """Folder for the journal and supervisor.json."""
    beat: str = "127.0.0.1:0"
    """HOST:PORT on which agents connect; port 0: a free one."""
    http: str = "127.0.0.1:0"
    """HOST:PORT of the API and /metrics; port 0: a free one."""
    advertise: str = ""
    """Host under which agents reach this supervisor; empty: the host of `beat`."""
    name: str = ""
    """Name of this supervisor; empty: host name and pid."""
    ttl: float = 5.0
    """Lease of the leader, seconds: a standby takes over within it."""
    beat_seconds: float = 0.5
    """How often agents beat."""
    silence_seconds: float = 2.0
    """Without a beat for this long a node is suspect."""
    observe_only: str = ""
    """Automatic actions that are only written down, comma separated: quarantine, growth, drain, recovery."""
    archive: str = ""
    """URL of a PostgreSQL that gets every journal entry once: postgresql://USER@HOST:PORT/DATABASE. Empty: only the state folder."""
    adopt: bool = False
    """Rebuild a store that was emptied, or restored from an older snapshot, from what agents run and from storage."""
    tls_certificate: str = ""
    """PEM file: the beat server speaks TLS."""
    tls_key: str = ""
    """PEM file of the certificate's key."""
    tls_client_ca: str = ""
    """PEM file: agents must show a certificate of this authority."""
    tokens: str = ""
    """File of tokens with roles for the API (`regrow certs token`); empty: the API answers on loopback only."""
    http_tls: bool = False
    """The API speaks HTTPS, with tls_certificate."""


def _policy_class() -> type[Any]:
    """A dataclass with the fields of `Policy`: section [policy], environment REGROW_POLICY_<FIELD>."""
    defaults = Policy()
    names = [name for name in Policy.__struct_fields__ if name != "observe_only"]
    return dataclasses.make_dataclass(
        "PolicyConfig",
        [(name, type(getattr(defaults, name)), dataclasses.field(default=getattr(defaults, name))) for name in names],
        frozen=True,
    )


def load(file: Path | None, flags: dict[str, Any]) -> tuple[SupervisorConfig, Policy, list[settings.Provenance]]:
    """Read everything and check what belongs together.

    Raises:
        ConfigurationError: unknown key, wrong value, fields that contradict each other.
    """
    config, story = settings.load(SupervisorConfig, section="supervisor", file=file, flags=flags)
    numbers, more = settings.load(_policy_class(), section="policy", file=file)
    only = frozenset(word.strip() for word in config.observe_only.split(",") if word.strip())
    for word in only - set(observe.KINDS):
        raise ConfigurationError(f"observe_only = {word!r} is not known", where="[supervisor]", hint=f"known: {', '.join(observe.KINDS)}")
    policy = Policy(**dataclasses.asdict(numbers), observe_only=only)
    _check(config)
    return config, policy, story + more


def _check(config: SupervisorConfig) -> None:
    if not config.store:
        raise ConfigurationError("no store is given", where="--store", hint="use --store etcd://HOST:PORT, or REGROW_SUPERVISOR_STORE")
    if not config.state:
        raise ConfigurationError("no state folder is given", where="--state", hint="use --state DIR")
    if config.ttl < 2:
        raise ConfigurationError(f"ttl = {config.ttl} is below etcd's least lease of 2 s", where="--ttl", hint="use 2 or more")
    if config.silence_seconds < 2 * config.beat_seconds:
        raise ConfigurationError(
            f"silence_seconds = {config.silence_seconds} is less than two beats (beat_seconds = {config.beat_seconds})",
            where="[supervisor]",
            hint="a single late beat must not make a node suspect",
        )
    if bool(config.tls_certificate) != bool(config.tls_key):
        raise ConfigurationError("tls_certificate and tls_key belong together", where="[supervisor]")
    if config.http_tls and not config.tls_certificate:
        raise ConfigurationError("http_tls needs tls_certificate and tls_key", where="[supervisor]", hint="see docs/security.md")
    if config.tls_key:
        security.check_readable(config.tls_key, "[supervisor] tls_key")
        security.check_private(config.tls_key, "[supervisor] tls_key")
    if config.archive:
        archive.driver(config.archive)
    for name in ("beat", "http"):
        parse_address(getattr(config, name), f"--{name}")


def parse_address(text: str, where: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT.

    Raises:
        ConfigurationError: it is not one.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigurationError(f"{text!r} is not HOST:PORT", where=where, hint="for example 0.0.0.0:7070")
    return host.strip("[]"), int(port)
