"""A small client of the supervisor's HTTP API, for launchers and commands: finds the leader again when it moved."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from regrow import security
from regrow.errors import ConfigurationError, OperationalError, RegrowError

_AGAIN_SECONDS = 0.5


class SupervisorClient:
    """Requests to whatever address `find` gives at the moment; connection errors are retried until a deadline."""

    def __init__(self, find: Callable[[], str | None], *, retry_seconds: float = 20.0) -> None:
        self._find = find
        self._retry_seconds = retry_seconds
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(5.0, read=30.0),
            trust_env=False,
            headers=security.operator_headers(),
            verify=security.operator_verify(),
        )

    async def close(self) -> None:
        """Release connections."""
        await self._client.aclose()

    async def get(self, path: str, **params: Any) -> Any:
        """GET a JSON document."""
        return await self._request("GET", path, params=params)

    async def text(self, path: str) -> str:
        """GET plain text, as /metrics is.

        Raises:
            OperationalError: no answer, or an error.
        """
        base = self._find()
        if base is None:
            raise OperationalError("no address of the supervisor is known yet", where=path)
        try:
            response = await self._client.get(base + path)
            response.raise_for_status()
        except httpx.HTTPError as error:
            raise OperationalError(f"the supervisor does not answer: {error or type(error).__name__}", where=path) from error
        return response.text

    async def post(self, path: str, content: bytes = b"") -> Any:
        """POST and read the JSON answer. All POSTs of the API are idempotent, so they are retried like GETs."""
        return await self._request("POST", path, content=content, headers={"content-type": "application/json"})

    async def _request(self, method: str, path: str, **arguments: Any) -> Any:
        deadline = time.monotonic() + self._retry_seconds
        problem = "no address is known yet"
        while True:
            base = self._find()
            if base is not None:
                try:
                    response = await self._client.request(method, base + path, **arguments)
                except httpx.TransportError as error:
                    problem = f"{base}: {error or type(error).__name__}"
                else:
                    if response.status_code != 503:
                        return _read(response)
                    problem = _text(response)
            if time.monotonic() > deadline:
                raise OperationalError(
                    f"the supervisor does not answer: {problem}",
                    where=path,
                    hint="is it running? `regrow doctor` checks this machine; logs are in the run folder",
                )
            await asyncio.sleep(0.05)

    async def events(self, after: int = 0, **params: Any) -> AsyncIterator[dict[str, Any]]:
        """The supervisor's events as they happen, from the one after `after`; resumes over reconnections for ever. Another supervisor has a
        journal of its own, and is heard from its beginning.

        Args:
            params: as of GET /v1/events (job, limit, without).
        """
        heard = None
        while True:
            base = self._find()
            if base is None:
                await asyncio.sleep(0.05)
                continue
            if heard not in (None, base):
                after = 0
            heard = base
            try:
                async with self._client.stream("GET", f"{base}/v1/events", params={"follow": 1, "after": after} | params) as response:
                    if response.is_error:
                        await asyncio.sleep(_AGAIN_SECONDS)
                    async for line in response.aiter_lines():
                        if line.startswith("id:"):
                            after = max(after, int(line[3:]))
                        elif line.startswith("data:"):
                            yield json.loads(line[5:])
            except httpx.TransportError:
                await asyncio.sleep(0.05)


def _text(response: httpx.Response) -> str:
    try:
        document = response.json()
    except ValueError:
        return response.text[:300]
    error = document.get("error", document) if isinstance(document, dict) else document
    return error.get("what", str(error)) if isinstance(error, dict) else str(error)


def _read(response: httpx.Response) -> Any:
    if response.is_success:
        return response.json()
    error: type[RegrowError] = ConfigurationError if response.status_code in (400, 404, 409, 422) else OperationalError
    hint = ""
    try:
        document = response.json()
        if isinstance(document, dict) and isinstance(document.get("error"), dict):
            hint = str(document["error"].get("hint", ""))
    except ValueError:
        hint = ""
    raise error(_text(response), where=f"supervisor, {response.request.url.path}", hint=hint)
