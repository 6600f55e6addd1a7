"""Taint and label of a Kubernetes node, over its API: one GET and one PATCH that the node's resourceVersion guards."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from regrow.errors import ConfigurationError
from regrow.supervisor.actuators.port import MARK, ActuatorError, Call, Done, LeftAlone, safe_reason

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONFLICT = 409
_TRIES = 5


class Kubernetes:
    """One API server. The token is read anew for each call: the kubelet renews it."""

    name = "kubernetes"

    def __init__(self, url: str, *, token_file: str, ca_file: str, taint: str, effect: str, timeout_seconds: float) -> None:
        """`url` empty: that of the cluster this runs in, with the account's token and authority.

        Raises:
            ConfigurationError: this does not run in a cluster and no URL is given, or a file cannot be used.
        """
        self._url = (url or _in_cluster()).rstrip("/")
        self._token_file = token_file or ("" if url else str(_ACCOUNT / "token"))
        self._ca_file = ca_file or ("" if url else str(_ACCOUNT / "ca.crt"))
        self._taint = taint
        self._effect = effect
        self._timeout_seconds = timeout_seconds
        self._trust()

    def preview(self, call: Call) -> str:
        """The request."""
        if call.direction == "in":
            return f"PATCH {self._path(call.node)}: without the taint and the label {self._taint}"
        return f"PATCH {self._path(call.node)}: taint {self._taint}=true:{self._effect}, label {self._taint}=true"

    async def act(self, call: Call) -> Done | LeftAlone:
        """Read the node, write it back with or without our taint; again when somebody else changed it in between.

        Raises:
            ActuatorError: the API refused, or does not answer.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds), self._client() as client:
                for _ in range(_TRIES):
                    node = await self._request(client, "GET", call.node)
                    change = self._change(node, call)
                    if change is None:
                        return Done("has the taint" if call.direction == "out" else "has no taint of ours")
                    changed = await self._request(client, "PATCH", call.node, change)
                    if changed is not None:
                        return Done("tainted and labelled" if call.direction == "out" else "taint and label removed")
        except TimeoutError as error:
            raise ActuatorError(f"the API did not answer within {self._timeout_seconds:g} s", where=self._url) from error
        except (httpx.HTTPError, OSError) as error:
            raise ActuatorError(f"the API does not answer: {error or type(error).__name__}", where=self._url) from error
        raise ActuatorError(f"the node was changed by somebody else {_TRIES} times in a row", where=call.node)

    def _change(self, node: dict[str, Any], call: Call) -> dict[str, Any] | None:
        """A merge patch; None: it is so already. All taints of others stay."""
        metadata, spec = node.get("metadata") or {}, node.get("spec") or {}
        taints: list[dict[str, Any]] = list(spec.get("taints") or [])
        ours = [item for item in taints if item.get("key") == self._taint]
        others = [item for item in taints if item.get("key") != self._taint]
        labelled = self._taint in (metadata.get("labels") or {})
        wanted = [{"key": self._taint, "value": "true", "effect": self._effect}] if call.direction == "out" else []
        plain = [{name: item.get(name) for name in ("key", "value", "effect")} for item in ours]
        if plain == wanted and labelled == bool(wanted):
            return None
        value = "true" if wanted else None
        reason = f"{MARK}{safe_reason(call.reason)}" if wanted else None
        return {
            "metadata": {
                "resourceVersion": metadata.get("resourceVersion"),
                "labels": {self._taint: value},
                "annotations": {f"{self._taint}-reason": reason},
            },
            "spec": {"taints": [*others, *wanted]},
        }

    async def _request(self, client: httpx.AsyncClient, method: str, node: str, body: dict[str, Any] | None = None) -> Any:
        """The document of the answer; None: the node was changed in between."""
        headers = {"accept": "application/json"}
        if self._token_file:
            headers["authorization"] = f"Bearer {self._token()}"
        if body is not None:
            headers["content-type"] = "application/merge-patch+json"
        answer = await client.request(method, self._path(node), headers=headers, json=body)
        if answer.status_code == _CONFLICT and method == "PATCH":
            return None
        try:
            document = answer.json()
        except ValueError as error:
            raise ActuatorError(f"{method} answered {answer.status_code} without JSON", where=self._url) from error
        if answer.is_error:
            said = document.get("message", "") if isinstance(document, dict) else ""
            raise ActuatorError(
                f"{method} {self._path(node)} answered {answer.status_code}: {said}"[:400], where=self._url, hint=_hint(answer)
            )
        if not isinstance(document, dict) or document.get("kind") != "Node":
            raise ActuatorError("the answer is not a Node", where=self._url, hint="is this the API server?")
        return document

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, verify=self._trust(), trust_env=False, timeout=self._timeout_seconds)

    def _trust(self) -> ssl.SSLContext | bool:
        if not self._ca_file:
            return True
        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"{self._ca_file} cannot be used: {error}", where="[actuators] kubernetes_ca") from error

    def _token(self) -> str:
        try:
            return Path(self._token_file).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ActuatorError("the token cannot be read", where=self._token_file) from error

    def _path(self, node: str) -> str:
        return f"/api/v1/nodes/{quote(node, safe='')}"


def _hint(answer: httpx.Response) -> str:
    return {
        401: "is the token valid?",
        403: "the account needs get and patch on nodes: deploy/kubernetes/taints",
        404: "is the node named in Kubernetes as in Regrow?",
    }.get(answer.status_code, "")


def _in_cluster() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigurationError(
            "this process does not run in a Kubernetes cluster", where="[actuators] kubernetes_url", hint="give the URL of the API server"
        )
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
