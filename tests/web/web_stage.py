"""One tab of a real browser."""

from __future__ import annotations

from typing import Any

from playwright.async_api import Page


class Screen:
    """One tab, and all that went wrong in it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.requests: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))

    async def open(self, address: str) -> None:
        await self.page.goto(f"http://{address}/")
        await self.page.wait_for_selector("#link[data-state=on]", timeout=20_000)

    async def text(self, selector: str) -> str:
        return await self.page.inner_text(selector)

    async def until(self, expression: str, argument: Any = None) -> None:
        """A condition in the page; one generous deadline."""
        await self.page.wait_for_function(expression, arg=argument, timeout=20_000)
