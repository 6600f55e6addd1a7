"""Serves writers of other nodes: takes copies of their arenas, and gives out what is in memory here. Threads, no event loop."""

from __future__ import annotations

import logging
import os
import socket
import threading
from pathlib import Path

from regrow import security
from regrow.ckpt.arenas import Contents
from regrow.ckpt.copies import Copies, RefusedError
from regrow.ckpt.peer_wire import PeerSocket, Pull, Pulled, Push, Pushed, Request

MAX_CONNECTIONS = 64
HANDSHAKE_SECONDS = 5.0
_READ_BYTES = 1 << 20
log = logging.getLogger("regrow.ckpt.copies")


class CopyServer:
    """One listening port, a thread for each connection."""

    def __init__(self, copies: Copies, contents: Contents) -> None:
        self._copies = copies
        self._contents = contents
        self._listener: socket.socket | None = None
        self._room = threading.Semaphore(MAX_CONNECTIONS)
        self._tls: security.Tls | None = None
        self.port = 0
        """0: not listening."""

    def start(self, host: str, tls: security.Tls | None) -> None:
        """Listen on a free port of `host`.

        Raises:
            OSError: this host has no such address.
        """
        self._tls = tls
        self._listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._listener,), name="copies", daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
            self.port = 0

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self._room.acquire()
            threading.Thread(target=self._serve, args=(sock,), name="copy", daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        peer: PeerSocket | None = None
        try:
            sock.settimeout(HANDSHAKE_SECONDS)
            if self._tls is not None:
                sock = self._tls.listening.wrap_socket(sock, server_side=True)
            peer = PeerSocket(sock)
            while True:
                message = peer.receive(Request)
                if isinstance(message, Push):
                    self._take(peer, message)
                else:
                    self._give(peer, message)
        except OSError as error:
            log.debug("peer connection ended: %s", error)
        finally:
            sock.close()
            self._room.release()

    def _take(self, peer: PeerSocket, push: Push) -> None:
        try:
            if peer.node and peer.node != push.node:
                raise RefusedError(f"the certificate is that of node {peer.node}")
            arena = self._copies.begin(push)
        except RefusedError as refusal:
            log.info("copy refused node=%s step=%d reason=%s", push.node, push.step, refusal)
            peer.send(Pushed(outcome="refused", reason=str(refusal)))
            raise ConnectionAbortedError("refused") from refusal
        peer.send(Pushed(outcome="held", reason="go on"))
        try:
            peer.receive_into(memoryview(arena.memory)[: push.manifest.size_bytes])
        except OSError:
            self._copies.abandon(arena)
            raise
        try:
            self._copies.finish(push, arena)
        except RefusedError as refusal:
            log.warning("copy damaged node=%s step=%d reason=%s", push.node, push.step, refusal)
            peer.send(Pushed(outcome="refused", reason=str(refusal)))
            return
        log.info("copy held node=%s file=%s step=%d bytes=%d", push.node, push.manifest.file, push.step, push.manifest.size_bytes)
        peer.send(Pushed(outcome="held"))

    def _give(self, peer: PeerSocket, message: Pull) -> None:
        """What is sent may have been replaced meanwhile: the reader verifies all of it."""
        for wanted in message.files:
            handle = self._contents.open(Path(message.directory) / wanted.name)
            peer.send(Pulled(name=wanted.name, is_held=handle >= 0))
            if handle < 0:
                continue
            try:
                for start, end in wanted.ranges:
                    _send_range(peer, handle, start, end)
            finally:
                os.close(handle)


def _send_range(peer: PeerSocket, handle: int, start: int, end: int) -> None:
    for at in range(start, end, _READ_BYTES):
        data = os.pread(handle, min(_READ_BYTES, end - at), at)
        if len(data) < min(_READ_BYTES, end - at):
            raise ConnectionAbortedError("more was asked for than the file has")
        peer.send_bytes(memoryview(data))
