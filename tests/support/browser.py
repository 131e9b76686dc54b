"""A browser for the tests of the views: Playwright (PyPI) with the system's Chromium (Debian: chromium)."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
PLAYWRIGHT = importlib.util.find_spec("playwright") is not None

needs_browser = pytest.mark.skipif(
    not (PLAYWRIGHT and CHROMIUM), reason="needs playwright (PyPI) and Chromium (Debian's package chromium)"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Tab:
    """A page that records what it fetches and what goes wrong in it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.problems: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.problems.append(message.text))

    def open(self, path: Path) -> Any:
        """Show a saved view, and wait until it is drawn."""
        self.context.set_offline(True)
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(".cattn-view[data-theme]")
        return self.page
