"""Routes of the page: three files from the package, and the feed. Nothing is loaded from elsewhere."""

from __future__ import annotations

import hashlib
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from regrow.supervisor.web.feed import Feed

_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'"
_FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "nodes.js": "text/javascript; charset=utf-8",
    "panels.js": "text/javascript; charset=utf-8",
}


class Page:
    """Handlers."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def index(self, request: Request) -> Response:
        """The page."""
        return _file(request, "page.html")

    async def asset(self, request: Request) -> Response:
        """Its style and scripts."""
        return _file(request, request.path_params["name"])

    async def follow(self, _request: Request) -> Response:
        """The feed."""
        return StreamingResponse(self._feed.follow(), media_type="text/event-stream", headers={"cache-control": "no-store"})


def _file(request: Request, name: str) -> Response:
    kind = _FILES.get(name)
    if kind is None:
        return Response(f"the page has no file {name!r}\n", status_code=404, media_type="text/plain")
    content = resources.files("regrow.supervisor.web").joinpath(name).read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    headers = {
        "content-security-policy": _POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
        "etag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)
