"""Secrets and certificates of this process: TLS contexts that follow their files, names in certificates, the operator's token.

A certificate of ours names its holder in a URI of its subjectAltName: ``regrow:node:NAME`` or ``regrow:supervisor:NAME``.
Files are looked at again at every handshake, so that a renewed certificate or authority is used without a restart.
"""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any, Literal

import msgspec

from regrow.errors import ConfigurationError
from regrow.syncing import sync_directory

Role = Literal["node", "supervisor"]
TOKEN_VARIABLE = "REGROW_TOKEN"  # noqa: S105  # a name, not a secret
TOKEN_FILE_VARIABLE = "REGROW_TOKEN_FILE"  # noqa: S105  # a name, not a secret
CA_VARIABLE = "REGROW_CA"


class Files(msgspec.Struct, frozen=True):
    """PEM files of one process: its certificate, the key of it, and the authority that peers must be signed by."""

    certificate: str = ""
    key: str = ""
    ca: str = ""

    @property
    def lists(self) -> str:
        """Where a list of revoked certificates is looked for: ca.crl beside ca.pem. It need not be there."""
        return str(Path(self.ca).with_suffix(".crl")) if self.ca else ""

    def check(self, where: str) -> None:
        """All three or none; each can be read; the key only by its owner.

        Raises:
            ConfigurationError: it is not so.
        """
        named = {"tls_certificate": self.certificate, "tls_key": self.key, "tls_ca": self.ca}
        missing = [name for name, path in named.items() if not path]
        if len(missing) == len(named):
            return
        if missing:
            raise ConfigurationError(
                f"{', '.join(missing)} not given: certificate, key and authority belong together", where=where, hint="see docs/security.md"
            )
        for name, path in named.items():
            check_readable(path, f"{where} {name}")
        check_private(self.key, f"{where} tls_key")


def check_readable(path: str, where: str) -> None:
    """The file can be read.

    Raises:
        ConfigurationError: it cannot.
    """
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", where=where, hint="see `regrow certs --help`") from error


def check_private(path: str, where: str, *, mask: int = 0o077) -> None:
    """Nobody but the owner has the rights in `mask` on a file with a secret.

    Raises:
        ConfigurationError: others have.
    """
    found = Path(path).stat()
    mode = found.st_mode & 0o777
    if found.st_uid == 0 and os.geteuid() != 0:
        mask &= ~0o040  # root lends it to our group, as container platforms do
    if mode & mask:
        raise ConfigurationError(f"{path} is open to others (mode {mode:03o})", where=where, hint=f"chmod {mode & ~mask:03o} {path}")


def write_whole(path: Path, content: bytes, *, mode: int, where: str) -> None:
    """Write a file so that others see the old content or the new one, never a part, and at no time with more rights than `mode`.

    Raises:
        ConfigurationError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}", where=where, hint="check the path") from error


def _stamp(files: Files, *, lists: bool) -> tuple[int, ...]:
    named = (files.certificate, files.key, files.ca, files.lists if lists else "")
    return tuple(Path(path).stat().st_mtime_ns for path in named if path)


def _context(files: Files, side: Literal["server", "client"], *, clients_show: bool, lists: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side == "server" else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the name is in the URI and is compared by `peer_name`
    try:
        context.load_cert_chain(files.certificate, files.key)
        if files.ca:
            context.load_verify_locations(files.ca)
        if lists:
            context.load_verify_locations(files.lists)
            context.verify_flags |= ssl.VerifyFlags.VERIFY_CRL_CHECK_LEAF
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"TLS files cannot be used: {error}", where=files.certificate, hint="see docs/security.md") from error
    context.verify_mode = ssl.CERT_REQUIRED if side == "client" or (clients_show and files.ca) else ssl.CERT_NONE
    return context


class Tls:
    """TLS of one listener or of one client, from files that may be renewed at any time."""

    def __init__(self, files: Files, side: Literal["server", "client"], *, clients_show: bool = True) -> None:
        """`clients_show`: a server asks for certificates of its clients.

        Raises:
            ConfigurationError: the files cannot be used.
        """
        self._files = files
        self._side: Literal["server", "client"] = side
        self._clients_show = clients_show
        self._lists = bool(files.lists) and Path(files.lists).exists()
        """A list of revoked certificates that was there once must be there: without it nothing is trusted."""
        self._made_at = _stamp(files, lists=self._lists)
        self._current = _context(files, side, clients_show=clients_show, lists=self._lists)
        self._first = self._current
        self.num_reloads = 0
        if side == "server":
            self._first.sni_callback = self._handshake

    @property
    def listening(self) -> ssl.SSLContext:
        """For a server to listen with: each handshake uses the newest files."""
        return self._first

    def connecting(self) -> ssl.SSLContext:
        """For a client, anew before each connection."""
        return self._refreshed()

    def _refreshed(self) -> ssl.SSLContext:
        """Half-written files are no reason to fail: what worked stays until all of them fit together."""
        try:
            stamp = _stamp(self._files, lists=self._lists)
            if stamp != self._made_at:
                self._current = _context(self._files, self._side, clients_show=self._clients_show, lists=self._lists)
                self._made_at = stamp
                self.num_reloads += 1
        except (OSError, ConfigurationError):
            return self._current
        return self._current

    def _handshake(self, connection: Any, _server_name: Any, _context_found: ssl.SSLContext) -> None:
        connection.context = self._refreshed()


def peer_name(transport: Any) -> tuple[str, str]:
    """(role, name) in the certificate of the other side of an asyncio transport or stream writer; ("", "") without one of ours."""
    certificate = transport.get_extra_info("peercert") or {}
    for kind, value in certificate.get("subjectAltName", ()):
        words = str(value).split(":", 2)
        if kind == "URI" and len(words) == 3 and words[0] == "regrow" and words[1] in ("node", "supervisor"):
            return words[1], words[2]
    return "", ""


def expect_role(transport: Any, role: Role) -> None:
    """The other side shows a certificate of this role. Without TLS there is nothing to compare.

    Raises:
        ConnectionRefusedError: it is another role, or a certificate that is not ours.
    """
    if transport.get_extra_info("ssl_object") is None:
        return
    found, name = peer_name(transport)
    if found != role:
        raise ConnectionRefusedError(f"the certificate of the other side is not that of a {role}: {found or 'no role'} {name}".rstrip())


def operator_token() -> str:
    """The token that commands send: REGROW_TOKEN, else the content of the file REGROW_TOKEN_FILE, else nothing. Never from argv.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    path = os.environ.get(TOKEN_FILE_VARIABLE, "")
    if token or not path:
        return token
    check_readable(path, TOKEN_FILE_VARIABLE)
    return Path(path).read_text(encoding="utf-8").strip()


def operator_headers() -> dict[str, str]:
    """Headers that commands send with every request."""
    token = operator_token()
    return {"authorization": f"Bearer {token}"} if token else {}


def operator_verify() -> ssl.SSLContext | bool:
    """What commands trust: the authority in the file REGROW_CA, else the system's.

    Raises:
        ConfigurationError: the file cannot be used.
    """
    path = os.environ.get(CA_VARIABLE, "")
    if not path:
        return True
    try:
        return ssl.create_default_context(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{path} cannot be used: {error}", where=CA_VARIABLE, hint="give the ca.pem of `regrow certs`") from error
