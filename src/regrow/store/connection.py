"""Calls to etcd: channels, endpoint rotation, login, time limits, and the map from etcd's errors to ours.

grpc must never be loaded in a process that forks afterwards (its children hang): spawn by exec only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from regrow.store import etcd_rpc_pb2 as pb
from regrow.store.base import AuthFailed, Compacted, LeaseLost, NoSpace, RequestTooLarge, StoreError, StoreUnavailable

log = logging.getLogger("regrow.store")

Request = TypeVar("Request")
Response = TypeVar("Response")

RECEIVE_BYTES = 64 * 1024 * 1024
"""grpc's default of 4 MiB breaks a watch with a big backlog."""

CONNECT_MILLISECONDS = 2_500
"""grpc's min_reconnect_backoff is its connect timeout too: below 2,000 it fails under load."""

_OPTIONS = (
    ("grpc.max_receive_message_length", RECEIVE_BYTES),
    ("grpc.max_send_message_length", RECEIVE_BYTES),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MILLISECONDS),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", CONNECT_MILLISECONDS),
    # etcd refuses pings closer than 5 s (--grpc-keepalive-min-time)
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_NEVER_SENT = ("failed to connect", "connection refused", "dns resolution failed", "no leader", "connections to all backends")
_LOGIN_AGAIN = ("invalid auth token", "revision of auth store is old")


@dataclasses.dataclass(frozen=True)
class Method(Generic[Request, Response]):
    """One rpc of etcd: its path and messages."""

    path: str
    encode: Callable[[Request], bytes]
    decode: Callable[[bytes], Response]


def _method(path: str, request: type[Request], response: type[Response]) -> Method[Request, Response]:
    message: Any = request
    answer: Any = response
    return Method(f"/etcdserverpb.{path}", message.SerializeToString, answer.FromString)


RANGE = _method("KV/Range", pb.RangeRequest, pb.RangeResponse)
PUT = _method("KV/Put", pb.PutRequest, pb.PutResponse)
DELETE_RANGE = _method("KV/DeleteRange", pb.DeleteRangeRequest, pb.DeleteRangeResponse)
TXN = _method("KV/Txn", pb.TxnRequest, pb.TxnResponse)
COMPACT = _method("KV/Compact", pb.CompactionRequest, pb.CompactionResponse)
WATCH = _method("Watch/Watch", pb.WatchRequest, pb.WatchResponse)
LEASE_GRANT = _method("Lease/LeaseGrant", pb.LeaseGrantRequest, pb.LeaseGrantResponse)
LEASE_REVOKE = _method("Lease/LeaseRevoke", pb.LeaseRevokeRequest, pb.LeaseRevokeResponse)
LEASE_KEEP_ALIVE = _method("Lease/LeaseKeepAlive", pb.LeaseKeepAliveRequest, pb.LeaseKeepAliveResponse)
STATUS = _method("Maintenance/Status", pb.StatusRequest, pb.StatusResponse)
ALARM = _method("Maintenance/Alarm", pb.AlarmRequest, pb.AlarmResponse)
DEFRAGMENT = _method("Maintenance/Defragment", pb.DefragmentRequest, pb.DefragmentResponse)
AUTHENTICATE = _method("Auth/Authenticate", pb.AuthenticateRequest, pb.AuthenticateResponse)

_NOT_YET = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
_ABOUT_ONE_MEMBER = (STATUS.path, DEFRAGMENT.path)


@dataclasses.dataclass(frozen=True)
class Access:
    """How to reach etcd and as whom. Certificates are PEM bytes; no ca_certificate: no TLS."""

    endpoints: tuple[str, ...]
    """host:port of each member."""
    ca_certificate: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    user: str = ""
    password: str = ""
    tls: bool = False


class Connection:
    """Channels to all endpoints, one of which is in use until it fails.

    Args:
        access: where and as whom.
        timeout: default limit of a call with all its attempts, in seconds.
    """

    def __init__(self, access: Access, *, timeout: float) -> None:
        self.access = access
        self.timeout = timeout
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._current = 0
        self._token = ""
        self._login_lock = asyncio.Lock()
        self._closed = False

    @property
    def endpoint(self) -> str:
        """The endpoint in use."""
        return self.access.endpoints[self._current]

    def give_up_on(self, endpoint: str) -> None:
        """An endpoint failed: use the next one, unless somebody rotated already."""
        if endpoint == self.endpoint and len(self.access.endpoints) > 1:
            self._current = (self._current + 1) % len(self.access.endpoints)
            log.info("endpoint=%s failed, next=%s", endpoint, self.endpoint)

    async def close(self) -> None:
        """Close all channels. Calls fail from now on."""
        self._closed = True
        channels, self._channels = tuple(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def call(
        self, method: Method[Request, Response], request: Request, *, timeout: float | None = None, retry: bool = False
    ) -> Response:
        """One unary call, with rotation over the endpoints and one new login when the token is not accepted.

        Args:
            timeout: seconds for everything; None takes the default.
            retry: also try again when an attempt may have been applied (reads, and writes that can be repeated).

        Raises:
            StoreUnavailable: nobody answered in time.
            StoreError: or a subclass, for what etcd answered.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self.timeout if timeout is None else timeout)
        logins, pause, uncertain = 1, 0.05, False
        while True:
            endpoint = self.endpoint
            try:
                return await self._attempt(method, request, endpoint, deadline - loop.time(), ready_first=not retry)
            except grpc.aio.AioRpcError as error:
                problem = translate(error, endpoint)
                if is_stale_login(error) and self.access.user and logins:
                    logins -= 1
                    self._token = ""
                    continue
            except StoreError as error:
                problem = error
            if not isinstance(problem, StoreUnavailable):
                raise problem
            uncertain = uncertain or problem.maybe_applied
            self.give_up_on(endpoint)
            if (problem.maybe_applied and not retry) or loop.time() + pause >= deadline:
                raise StoreUnavailable(problem.what, where=problem.where, hint=problem.hint, maybe_applied=uncertain)
            await asyncio.sleep(pause)
            pause = min(0.5, pause * 2) * random.uniform(0.8, 1.0)  # noqa: S311  (spreads load, hides nothing)

    async def _attempt(
        self, method: Method[Request, Response], request: Request, endpoint: str, remaining: float, *, ready_first: bool
    ) -> Response:
        begin = asyncio.get_running_loop().time()
        limit = self._share(remaining)
        if ready_first:
            await self._reach(endpoint, limit)
        try:
            metadata = await self.metadata(endpoint, limit, require_leader=method.path not in _ABOUT_ONE_MEMBER)
        except grpc.aio.AioRpcError as error:
            problem = translate(error, endpoint)
            if isinstance(problem, StoreUnavailable):
                problem.maybe_applied = False  # only the login was sent
            raise problem from error
        left = max(0.05, limit - (asyncio.get_running_loop().time() - begin))
        return await self._unary(method, request, endpoint, left, metadata)

    async def _reach(self, endpoint: str, limit: float) -> None:
        """Have the connection made, or known to be impossible, before a write is sent: a host that is gone answers nothing,
        and then only this tells a write that was never sent from one that may have been applied."""
        channel = self._channel(endpoint)
        try:
            async with asyncio.timeout(limit):
                while (state := channel.get_state(try_to_connect=True)) in _NOT_YET:
                    await channel.wait_for_state_change(state)
        except TimeoutError as error:
            raise StoreUnavailable("no connection in time", where=f"etcd {endpoint}", hint=_hint("")) from error

    def _share(self, remaining: float) -> float:
        """Limit of one attempt: a silent endpoint must leave time for the others."""
        if len(self.access.endpoints) == 1:
            return max(0.05, remaining)
        return max(0.05, min(remaining, max(1.0, self.timeout / len(self.access.endpoints))))

    async def _unary(
        self, method: Method[Request, Response], request: Request, endpoint: str, limit: float, metadata: tuple[tuple[str, str], ...]
    ) -> Response:
        call = self._channel(endpoint).unary_unary(method.path, request_serializer=method.encode, response_deserializer=method.decode)
        return await call(request, timeout=limit, metadata=metadata)

    async def stream(
        self, method: Method[Request, Response], endpoint: str, *, limit: float
    ) -> grpc.aio.StreamStreamCall[Request, Response]:
        """Open a stream on one endpoint. Cancelling a pending read or write of it cancels the stream.

        Args:
            limit: seconds that a login may take.
        """
        metadata = await self.metadata(endpoint, limit, require_leader=True)
        call = self._channel(endpoint).stream_stream(method.path, request_serializer=method.encode, response_deserializer=method.decode)
        return call(metadata=metadata)

    async def metadata(self, endpoint: str, remaining: float, *, require_leader: bool) -> tuple[tuple[str, str], ...]:
        """What goes with each call. A member without a leader then refuses at once instead of holding us up."""
        metadata: tuple[tuple[str, str], ...] = (("hasleader", "true"),) if require_leader else ()
        if self.access.user:
            async with self._login_lock:
                if not self._token:
                    request = pb.AuthenticateRequest(name=self.access.user, password=self.access.password)
                    answer = await self._unary(AUTHENTICATE, request, endpoint, max(0.05, remaining), metadata)
                    self._token = answer.token
            metadata += (("token", self._token),)
        return metadata

    def forget_login(self) -> None:
        """The next call logs in again."""
        self._token = ""

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if self._closed:
            raise StoreError("this client is closed", where=f"etcd {endpoint}")
        channel = self._channels.get(endpoint)
        if channel is None:
            if self.access.tls:
                credentials = grpc.ssl_channel_credentials(self.access.ca_certificate, self.access.key, self.access.certificate)
                channel = grpc.aio.secure_channel(endpoint, credentials, options=_OPTIONS)
            else:
                channel = grpc.aio.insecure_channel(endpoint, options=_OPTIONS)
            self._channels[endpoint] = channel
        return channel


def is_stale_login(error: grpc.aio.AioRpcError) -> bool:
    """True when a new login will help: the member restarted, or the token expired."""
    details = (error.details() or "").lower()
    return any(text in details for text in _LOGIN_AGAIN)


def translate(error: grpc.aio.AioRpcError, endpoint: str) -> StoreError:
    """Our error for one of grpc's or etcd's."""
    code, details = error.code(), error.details() or ""
    lowered = details.lower()
    where = f"etcd {endpoint}"
    if "compacted" in lowered:
        return Compacted(details, where=where)
    if "database space exceeded" in lowered:
        return NoSpace("the quota is used up, writes are refused", where=where, hint="compact, defragment, then `etcdctl alarm disarm`")
    if "lease not found" in lowered:
        return LeaseLost("the lease is gone", where=where, hint="grant a new one and write its keys again")
    if any(text in lowered for text in ("too large", "too many operations", "larger than max")):
        return RequestTooLarge(details, where=where, hint="store it in smaller pieces")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED) or _is_login_problem(lowered):
        return AuthFailed(details, where=where, hint="check user, password and the role's permissions")
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
        return StoreError(details, where=where)
    if code in (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.UNIMPLEMENTED):
        return StoreError(details, where=where)
    return StoreUnavailable(_story(code, details), where=where, hint=_hint(lowered), maybe_applied=_was_sent(lowered))


def _was_sent(lowered: str) -> bool:
    return not any(text in lowered for text in (*_NEVER_SENT, "too many requests"))


def _is_login_problem(lowered: str) -> bool:
    return "authentication failed" in lowered or "user name is empty" in lowered or "authentication is not enabled" in lowered


def _story(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "no answer in time"
    return details or code.name.lower()


def _hint(lowered: str) -> str:
    if "handshake" in lowered or "certificate" in lowered or "ssl" in lowered:
        return "the TLS handshake failed: check cacert, cert, key, and that the address is in the server's certificate"
    return "check that etcd runs and that the endpoints are right"
