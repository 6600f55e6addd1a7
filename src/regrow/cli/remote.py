"""How commands find and ask the supervisor: --supervisor, REGROW_SUPERVISOR, the leader record in the store, a local run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from regrow import security
from regrow.errors import ConfigurationError, OperationalError, RegrowError

Address = Annotated[str, typer.Option("--supervisor", help="URL of the supervisor.", envvar="REGROW_SUPERVISOR")]
StoreUrl = Annotated[str, typer.Option("--store", help="Store URL: the leader's address is read from it.", envvar="REGROW_STORE")]
Cluster = Annotated[str, typer.Option("--cluster", help="Cluster name in the store.", envvar="REGROW_CLUSTER")]

_AGAIN_SECONDS = 1.0


def find(supervisor: str, store: str, cluster: str) -> str:
    """Base URL of the supervisor.

    Raises:
        ConfigurationError: nothing says where it is.
    """
    if supervisor:
        return url(supervisor.rstrip("/"))
    if store:
        return _from_store(store, cluster)
    candidates = sorted(Path("runs").glob("*/supervisor/supervisor.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in candidates:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            os.kill(int(document["pid"]), 0)
        except (OSError, ValueError, KeyError):
            continue
        return url(str(document["http"]))
    raise ConfigurationError(
        "no supervisor is known",
        where="--supervisor",
        hint="give --supervisor URL or --store URL, set REGROW_SUPERVISOR, or call from the folder of a `regrow run` that goes on",
    )


def url(address: str) -> str:
    """A URL from host:port, or as it is."""
    return address if "://" in address else f"http://{address}"


def _from_store(store: str, cluster: str) -> str:
    import asyncio

    import msgspec

    from regrow import wire
    from regrow.store.open import open_store

    async def read() -> str:
        opened = open_store(store)
        try:
            item = await opened.get(f"/regrow/{cluster}/leader")
        finally:
            await opened.close()
        if item is None:
            raise OperationalError(f"nobody leads cluster {cluster!r}", where=store, hint="start `regrow supervisor`, or check --cluster")
        return url(msgspec.json.decode(item.value, type=wire.LeaderRecord).http_address)

    return asyncio.run(read())


def writer(text: str) -> Callable[[], None]:
    """Prints `text` for people, when called."""

    def write() -> None:
        sys.stdout.write(text)

    return write


def get(base: str, path: str, **params: Any) -> Any:
    """GET a document."""
    return _request("GET", base, path, params=params)


def post(base: str, path: str, content: bytes = b"") -> Any:
    """POST and read the answer."""
    return _request(
        "POST", base, path, content=content, headers={"content-type": "application/json", "x-regrow-user": os.environ.get("USER", "")}
    )


def _request(method: str, base: str, path: str, **arguments: Any) -> Any:
    import httpx

    headers = {**arguments.pop("headers", {}), **security.operator_headers()}
    try:
        with httpx.Client(timeout=httpx.Timeout(10.0), trust_env=False, verify=security.operator_verify()) as client:
            response = client.request(method, base + path, headers=headers, **arguments)
    except httpx.HTTPError as error:
        raise OperationalError(
            f"the supervisor does not answer: {error or type(error).__name__}", where=base, hint="is it running? is the address right?"
        ) from error
    return _answer(response.status_code, response.text, base + path)


def _answer(status: int, text: str, where: str) -> Any:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise OperationalError(f"the answer is not JSON: {text[:200]}", where=where, hint="is this a regrow supervisor?") from error
    if status < 400:
        return document
    found = document.get("error", {}) if isinstance(document, dict) else {}
    kind = ConfigurationError if status < 500 else OperationalError
    raise kind(str(found.get("what", text[:200])), where=str(found.get("where", where)), hint=str(found.get("hint", "")))


def follow(find: Callable[[], str], path: str, *, patience_seconds: float = 60.0, **params: Any) -> Iterator[dict[str, Any]]:
    """`stream` of journal entries over the end of a connection: the leader may move. Each entry comes once.

    Raises:
        OperationalError: nobody answered for `patience_seconds`.
        ConfigurationError: nothing says where the supervisor is.
    """
    import time

    last: tuple[int, int] | None = None
    lost_at: float | None = None
    told = False
    while True:
        again = last
        try:
            for entry in stream(find(), path, **params):
                lost_at, told = None, False
                if again is not None and (entry["epoch"], entry["id"]) <= again:
                    continue
                again, last = None, (entry["epoch"], entry["id"])
                yield entry
            raise OperationalError("the connection ended", where=path)
        except RegrowError as error:
            lost_at = lost_at or time.monotonic()
            if last is None or time.monotonic() - lost_at > patience_seconds:
                raise
            if not told:
                sys.stderr.write(f"regrow: {error.what}; asking again\n")
                told = True
            time.sleep(_AGAIN_SECONDS)
        params |= {"after": 0, "limit": ""}  # another leader counts anew


def stream(base: str, path: str, **params: Any) -> Iterator[dict[str, Any]]:
    """Server-sent events, one document each, until the connection ends."""
    import httpx

    try:
        with (
            httpx.Client(timeout=httpx.Timeout(10.0, read=60.0), trust_env=False, verify=security.operator_verify()) as client,
            client.stream("GET", base + path, params=params, headers=security.operator_headers()) as response,
        ):
            if response.status_code >= 400:
                response.read()
                _answer(response.status_code, response.text, base + path)
            for line in response.iter_lines():
                if line.startswith("data:"):
                    yield json.loads(line[5:])
    except httpx.HTTPError as error:
        raise OperationalError(f"the connection ended: {error or type(error).__name__}", where=base, hint="ask again") from error
