"""What checkpoint writers say to each other: length-prefixed JSON messages and raw bytes over TCP, with TLS where nodes have it.

writer -> writer of its buddy     Push, then the file's bytes; answered by Pushed once they are verified
restoring writer -> writer        Pull; answered for each file by Pulled, then the bytes of its ranges
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, Literal, TypeVar

import msgspec

from regrow import security
from regrow.ckpt.manifest import Note, RankManifest

T = TypeVar("T")

IDLE_SECONDS = 5.0
"""A peer that moves no byte for so long is given up."""
MAX_HEADER_BYTES = 1 << 27
_SEND_BYTES = 1 << 20


class Push(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="push"):
    """A rank's file of one step follows. The bytes are kept when they have the digests of `manifest`."""

    job: str
    epoch: int
    generation: int
    step: int
    node: str
    """Whose ranks wrote it."""
    incarnation: str
    """One start of the sending writer."""
    sequence: int
    """Grows with each push of an incarnation: what is repeated or comes late is refused."""
    directory: str
    manifest: RankManifest
    note: Note | None = None
    """Given: the file is on no storage."""


class Pushed(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="pushed"):
    """What became of a push. A refusal may come before the bytes have been read."""

    outcome: Literal["held", "refused"]
    reason: str = ""


class PullFile(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of a file."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    """(start, end) in bytes, ascending."""


class Pull(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="pull"):
    """Send what is in memory of these files of a checkpoint."""

    directory: str
    files: tuple[PullFile, ...]


class Pulled(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="pulled"):
    """The ranges of a file follow, unless it is not held here."""

    name: str
    is_held: bool


Request = Push | Pull


class _Shown:
    """A blocking socket as `security.expect_role` asks of a transport."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def get_extra_info(self, name: str) -> Any:
        if not isinstance(self._sock, ssl.SSLSocket):
            return None
        return self._sock.getpeercert() if name == "peercert" else self._sock


class PeerSocket:
    """A blocking connection to another writer. All calls raise OSError when the other side is gone, or silent for `IDLE_SECONDS`."""

    def __init__(self, sock: socket.socket) -> None:
        """`sock`: connected, after the TLS handshake if there is one.

        Raises:
            ConnectionRefusedError: the certificate of the other side is not a node's.
        """
        sock.settimeout(IDLE_SECONDS)
        security.expect_role(_Shown(sock), "node")
        self.node = security.peer_name(_Shown(sock))[1] if isinstance(sock, ssl.SSLSocket) else ""
        """Name in the certificate of the other side; empty without TLS."""
        self._sock = sock

    @classmethod
    def connect(cls, address: str, tls: security.Tls | None) -> PeerSocket:
        """Connect to host:port.

        Raises:
            OSError: nobody there, or not one of us.
        """
        host, _, port = address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=IDLE_SECONDS)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                sock = tls.connecting().wrap_socket(sock)
            return cls(sock)
        except BaseException:
            sock.close()
            raise

    def send(self, message: msgspec.Struct) -> None:
        """Send a message."""
        data = msgspec.json.encode(message)
        self._sock.sendall(len(data).to_bytes(4, "big") + data)

    def send_bytes(self, data: memoryview) -> None:
        """Send raw bytes; the limit of silence holds for each MiB."""
        for at in range(0, len(data), _SEND_BYTES):
            self._sock.sendall(data[at : at + _SEND_BYTES])

    def receive(self, kind: type[T] | Any, *, patience_seconds: float = IDLE_SECONDS) -> T | Any:
        """The next message; `patience_seconds` for its first byte.

        Raises:
            OSError: the connection has ended, or what came is no message.
        """
        head = bytearray(4)
        self._sock.settimeout(patience_seconds)
        self.receive_into(memoryview(head))
        self._sock.settimeout(IDLE_SECONDS)
        size = int.from_bytes(head, "big")
        if size > MAX_HEADER_BYTES:
            raise ConnectionAbortedError(f"a peer announces a message of {size} bytes")
        body = bytearray(size)
        self.receive_into(memoryview(body))
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.MsgspecError as error:
            raise ConnectionAbortedError(f"a peer sent what is no message: {error}") from error

    def receive_into(self, target: memoryview) -> None:
        """Fill `target`."""
        at = 0
        while at < len(target):
            count = self._sock.recv_into(target[at:])
            if not count:
                raise ConnectionResetError("the peer closed the connection")
            at += count

    def abort(self) -> None:
        """Make calls of other threads end with an error."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close."""
        self._sock.close()
