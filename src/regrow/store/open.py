"""Opening a store by its URL.

    etcd://host:port[,host:port...]     plain, or TLS as soon as a certificate is given
    etcds://host:port[,...]             TLS, by the system's certificate authorities unless `cacert` is given
    memory://                           a new store in this process; memory://NAME: the same one for all who ask in this process

Options after the question mark: cacert, cert, key (PEM files), user, password-file. A password is never part of a URL.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from regrow.errors import ConfigurationError
from regrow.store.base import Store
from regrow.store.memory import MemoryStore

DEFAULT_PORT = 2379
"""etcd's client port."""

_OPTIONS = ("cacert", "cert", "key", "user", "password-file")
_named: dict[str, MemoryStore] = {}


def open_store(url: str, *, timeout: float = 6.0) -> Store:
    """A client for the store at `url`. Connects on first use; call it inside the event loop that will use it.

    Args:
        url: see the module's text.
        timeout: default limit of a call, in seconds.

    Raises:
        ConfigurationError: the URL cannot be used, or a file that it names cannot be read.
    """
    parts = urlsplit(url)
    if parts.scheme == "memory":
        return _open_memory(parts.netloc, timeout)
    if parts.scheme not in ("etcd", "etcds"):
        raise _unusable(url, f"unknown scheme {parts.scheme!r}")
    if parts.path not in ("", "/"):
        raise _unusable(url, f"a path ({parts.path}) has no meaning")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in options:
        if name not in _OPTIONS:
            raise _unusable(url, f"unknown option {name!r}; known: {', '.join(_OPTIONS)}")
    if ("user" in options) != ("password-file" in options):
        raise _unusable(url, "user and password-file belong together")
    if ("cert" in options) != ("key" in options):
        raise _unusable(url, "cert and key belong together")

    from regrow.store.connection import Access  # grpc takes its time to load
    from regrow.store.etcd import EtcdStore

    access = Access(
        endpoints=tuple(_endpoint(url, text) for text in parts.netloc.split(",")),
        ca_certificate=_file(url, options, "cacert"),
        certificate=_file(url, options, "cert"),
        key=_file(url, options, "key"),
        user=options.get("user", ""),
        password=(_file(url, options, "password-file") or b"").decode().rstrip("\r\n"),
        tls=parts.scheme == "etcds" or "cacert" in options or "cert" in options,
    )
    return EtcdStore(access, timeout=timeout)


def _open_memory(name: str, timeout: float) -> MemoryStore:
    if not name:
        return MemoryStore(timeout=timeout)
    if name not in _named:
        _named[name] = MemoryStore(timeout=timeout)
    return _named[name].connect()


def _endpoint(url: str, text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise _unusable(url, f"{text!r} is not host:port")
    return f"{host}:{port}"


def _file(url: str, options: dict[str, str], name: str) -> bytes | None:
    if name not in options:
        return None
    try:
        return Path(options[name]).read_bytes()
    except OSError as error:
        raise _unusable(url, f"{name} {options[name]!r} cannot be read: {error.strerror}") from error


def _unusable(url: str, why: str) -> ConfigurationError:
    shown = url.split("?", 1)[0]
    return ConfigurationError(
        f"store {shown!r} cannot be used: {why}", where="--store", hint="write it like etcd://10.0.0.1:2379,10.0.0.2:2379 or memory://"
    )
