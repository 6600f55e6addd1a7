"""A supervisor with stub agents (of tests/supervisor) and a real Chromium in front of its page."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, async_playwright


def _load(path: Path, name: str) -> Any:
    """Import a helper by a name that tests can use (pytest runs with importlib mode)."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_supervisor = _load(Path(__file__).parents[1] / "supervisor" / "conftest.py", "supervisor_conftest")
Screen = _load(Path(__file__).with_name("web_stage.py"), "web_stage").Screen
store = _supervisor.store
cluster = _supervisor.cluster


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path is not None, "Chromium is missing: tools/system.sh installs it"
    async with async_playwright() as driver:
        started = await driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield started
        await started.close()


@pytest.fixture
async def screen(browser: Browser) -> AsyncIterator[Any]:
    context = await browser.new_context(viewport={"width": 1200, "height": 900})
    made = Screen(await context.new_page())
    yield made
    await context.close()
