"""Who may do what over HTTP: tokens with roles, deny by default, a rate limit, and a journal entry for each operator action.

The token file has one token a line, by its digest, so that reading the file lets nobody in::

    alice operate sha256:9f86d081...

Without a token file the API answers on loopback only, to programs of this machine; with one, every request needs a token.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regrow import security
from regrow.errors import ConfigurationError
from regrow.ids import check_name
from regrow.supervisor.pacing import Buckets

log = logging.getLogger("regrow.supervisor.auth")

Role = Literal["view", "operate", "admin"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Each may do what those before it may."""
OPEN_PATHS = ("/", "/healthz", "/favicon.ico")
"""Liveness and the page's own files hold no data."""
OPEN_PREFIX = "/page/"
WHOAMI = "/v1/whoami"
_PREFIX = "sha256:"
_LOOPBACK_NAMES = ("localhost", "testserver")
_SAFE = ("GET", "HEAD", "OPTIONS")


class Identity(msgspec.Struct, frozen=True):
    """Who asks."""

    name: str
    role: Role

    def may(self, role: Role) -> bool:
        """True when this identity has `role` or a higher one."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Denied(msgspec.Struct, frozen=True):
    """A request that is not served."""

    status: int
    what: str
    hint: str
    retry_after_seconds: float = 0.0


def digest(token: str) -> str:
    """How a token is written in the file. Tokens have 256 random bits, so a plain hash is enough."""
    return _PREFIX + hashlib.sha256(token.encode()).hexdigest()


def required_role(method: str, path: str) -> Role:
    """Reading needs view; orders to jobs and nodes need operate; what runs programs or switches automation off needs admin."""
    if method in _SAFE:
        return "view"
    words = path.strip("/").split("/")
    return "operate" if len(words) == 4 and words[:2] in (["v1", "jobs"], ["v1", "nodes"]) else "admin"


class Tokens:
    """The token file; read again when it changes, so that tokens come and go without a restart."""

    def __init__(self, path: Path) -> None:
        """Read it.

        Raises:
            ConfigurationError: it cannot be read, others may write it, or a line is not a token.
        """
        self._path = path
        self._stamp, self._known = self._read()

    def _read(self) -> tuple[int, dict[str, Identity]]:
        security.check_readable(str(self._path), "[supervisor] tokens")
        security.check_private(str(self._path), "[supervisor] tokens", mask=0o022)
        stamp = self._path.stat().st_mtime_ns
        known: dict[str, Identity] = {}
        for number, line in enumerate(self._path.read_text(encoding="utf-8").splitlines(), start=1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            if len(words) != 3 or words[1] not in ROLES or not words[2].startswith(_PREFIX) or len(words[2]) != len(_PREFIX) + 64:
                raise ConfigurationError(
                    "is not NAME ROLE sha256:DIGEST",
                    where=f"{self._path}:{number}",
                    hint=f"roles: {', '.join(ROLES)}; `regrow certs token`",
                )
            known[words[2]] = Identity(words[0], words[1])  # type: ignore[arg-type]
        return stamp, known

    def find(self, token: str) -> Identity | None:
        """Whose token it is. Takes the same time for every wrong token: all digests are compared, each in constant time."""
        self._refresh()
        shown = digest(token)
        found: Identity | None = None
        for known, identity in self._known.items():
            if hmac.compare_digest(known, shown):
                found = identity
        return found

    def _refresh(self) -> None:
        try:
            if self._path.stat().st_mtime_ns != self._stamp:
                self._stamp, self._known = self._read()
                log.info("tokens=%d read again", len(self._known))
        except FileNotFoundError:
            if self._known:
                log.warning("the token file %s is gone: nobody gets in", self._path)
            self._known = {}
        except (OSError, ConfigurationError) as error:
            log.warning("the token file keeps its old content: %s", error)


def make_token(path: Path, name: str, role: Role) -> str:
    """A new token for `name`, in place of an older one. The file keeps its digest only.

    Raises:
        ConfigurationError: a bad name, or the file cannot be used.
    """
    check_name("operator", name)
    token = secrets.token_urlsafe(32)
    _rewrite(path, name, f"{name} {role} {digest(token)}")
    return token


def remove_token(path: Path, name: str) -> None:
    """Take the token of `name` away.

    Raises:
        ConfigurationError: there is none, or the file cannot be used.
    """
    Tokens(path)
    if not any(line.split()[:1] == [name] for line in path.read_text(encoding="utf-8").splitlines()):
        raise ConfigurationError(f"{name!r} has no token", where=str(path), hint="the first word of a line is the name")
    _rewrite(path, name, "")


def _rewrite(path: Path, name: str, line: str) -> None:
    try:
        before = path.read_text(encoding="utf-8").splitlines() if path.exists() else ["# NAME ROLE sha256:DIGEST"]
        mode = path.stat().st_mode & 0o755 if path.exists() else 0o600
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}", where="--file", hint="check the path") from error
    kept = [old for old in before if old.split()[:1] != [name]]
    content = "\n".join([*kept, *([line] if line else [])]) + "\n"
    security.write_whole(path, content.encode(), mode=mode, where="--file")


def is_loopback(host: str) -> bool:
    """True for addresses of this machine's loopback and for its usual names."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in _LOOPBACK_NAMES


Audit = Callable[[Identity | None, str, str, str, int], None]
"""(who, client's host, method, path, status) of an order, served or denied."""


class Guard:
    """ASGI middleware around the whole API."""

    def __init__(
        self, app: ASGIApp, tokens: Tokens | None, audit: Audit, clock: Callable[[], float], *, own_hosts: tuple[str, ...] = ()
    ) -> None:
        """`clock` is monotonic; `own_hosts` are names under which this supervisor advertises itself."""
        self._app = app
        self._tokens = tokens
        self._audit = audit
        self._own_hosts = own_hosts
        self._failures = Buckets(clock, burst=10, per_second=0.2)
        self._orders = Buckets(clock, burst=30, per_second=5.0)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, or say why not."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if method in _SAFE and (path in OPEN_PATHS or path.startswith(OPEN_PREFIX)):
            await self._app(scope, receive, send)
            return
        host = (scope.get("client") or ("", 0))[0]
        found = self._judge(scope, host)
        if isinstance(found, Denied):
            if method not in _SAFE and found.status != 429:
                self._audit(None, host, method, path, found.status)
            await _refuse(send, found, path)
            return
        if path == WHOAMI:
            await _answer(send, 200, {"name": found.name, "role": found.role, "tokens": self._tokens is not None})
            return
        if self._tokens is not None:
            MutableHeaders(scope=scope)["x-regrow-user"] = found.name
        await self._app(scope, receive, send if method in _SAFE else self._audited(send, found, host, scope))

    def _audited(self, send: Send, who: Identity, host: str, scope: Scope) -> Send:
        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._audit(who, host, scope["method"], scope["path"], message["status"])
            await send(message)

        return sending

    def _judge(self, scope: Scope, host: str) -> Identity | Denied:
        headers = Headers(scope=scope)
        found = self._by_place(headers, host) if self._tokens is None else self._by_token(self._tokens, headers, host)
        if isinstance(found, Denied):
            return found
        needed = required_role(scope["method"], scope["path"])
        if not found.may(needed):
            return Denied(403, f"{found.name!r} has role {found.role}, this needs {needed}", "ask who keeps the token file")
        if scope["method"] not in _SAFE:
            pause = self._orders.take(found.name or host)
            if pause:
                return Denied(429, "too many orders", "wait", pause)
        return found

    def _by_place(self, headers: Headers, host: str) -> Identity | Denied:
        """No tokens: programs of this machine only, and no web page that happens to be open in its browser."""
        if not is_loopback(host):
            return Denied(403, "this supervisor answers on loopback only", "give it a token file: docs/security.md")
        named = headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else headers["host"]
        if named and not is_loopback(named) and named not in self._own_hosts:
            return Denied(403, f"asked as host {named!r}, which is not this machine's loopback", "use http://127.0.0.1:PORT")
        origin = headers.get("origin", "")
        if origin and origin.partition("://")[2] != headers.get("host", ""):
            return Denied(403, f"a page of {origin!r} may not ask this supervisor", "use the supervisor's own page")
        return Identity((headers.get("x-regrow-user") or host)[:64], "admin")

    def _by_token(self, tokens: Tokens, headers: Headers, host: str) -> Identity | Denied:
        pause = self._failures.peek(host)
        if pause:
            return Denied(429, "too many wrong tokens from this address", "wait", pause)
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            return Denied(401, "no token was sent", "set REGROW_TOKEN or REGROW_TOKEN_FILE; `regrow certs token` makes one")
        found = tokens.find(token.strip())
        if found is None:
            self._failures.take(host)
            return Denied(401, "this token is not known", "was it replaced? ask who keeps the token file")
        return found


async def _refuse(send: Send, denied: Denied, path: str) -> None:
    document = {"error": {"kind": "Denied", "what": denied.what, "where": path, "hint": denied.hint}}
    extra = [(b"www-authenticate", b'Bearer realm="regrow"')] if denied.status == 401 else []
    if denied.retry_after_seconds:
        extra.append((b"retry-after", str(int(denied.retry_after_seconds) + 1).encode()))
    await _answer(send, denied.status, document, extra)


async def _answer(send: Send, status: int, document: object, extra: list[tuple[bytes, bytes]] | None = None) -> None:
    body = msgspec.json.encode(document)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
