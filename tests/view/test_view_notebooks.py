"""The widget where people use it: JupyterLab runs a notebook, marimo runs an app, and a browser looks at both."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.processes import Tab, chromium, needs_browser, run_command

pytestmark = [needs_browser, pytest.mark.long]

SETUP = """\
import numpy as np
import cattn
rng = np.random.default_rng(0)
query, key = rng.standard_normal((2, 2, 3, {n}, 8), dtype=np.float32)
weights = cattn.attention_weights(query, key, is_causal=True)
tokens = [f"t{{i}}" for i in range({n})]
"""
SMALL = SETUP.format(n=12) + "view = cattn.view_attention(weights, tokens)\nview"
LARGE = (
    SETUP.format(n=200)
    + "import cattn._view\ncattn._view.MOST_BYTES_SENT = 100_000\n"
    + "view = cattn.view_attention(weights, tokens)\nview"
)
STATISTICS = (
    SETUP.format(n=3000)
    .replace("weights =", "weights_of = lambda layer, head, rows:")
    .replace(
        "(query, key, is_causal=True)",
        "(query[layer, head, rows], key[layer, head], is_causal=True, query_offset=rows.start)",
    )
    + "statistics = cattn.attention_statistics(query, key, is_causal=True)\n"
    + "view = cattn.view_attention(statistics, tokens, weights_of=weights_of)\nview"
)


def arrays(code: str) -> dict[str, Any]:
    """Return what the cell computes, without the view."""
    names: dict[str, Any] = {}
    exec(code.partition("view =")[0], names)
    return names


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def server(folder: Path, url: str, *command: str, **environment: str) -> Iterator[None]:
    """Run a server until it answers, and stop it at the end."""
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=folder, env={**os.environ, **environment}, stdout=log, stderr=log
        )
        try:
            for _ in range(240):
                with contextlib.suppress(urllib.error.URLError, ConnectionError):
                    urllib.request.urlopen(url, timeout=5).close()
                    break
                assert process.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.25)
            else:
                pytest.fail((folder / "server.log").read_text())
            yield
        finally:
            process.terminate()
            process.wait(30)


def write_notebook(path: Path, code: str) -> None:
    cell = {"cell_type": "code", "id": "one", "metadata": {}, "source": code, "outputs": [], "execution_count": None}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    path.write_text(json.dumps({"cells": [cell], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))


@contextlib.contextmanager
def jupyterlab(browser: Any, folder: Path, code: str, *, dark: bool = False, **options: Any) -> Iterator[Any]:
    """Run the code as the cell of a notebook in JupyterLab."""
    if not all(map(importlib.util.find_spec, ("jupyterlab", "anywidget"))):
        pytest.skip("jupyterlab or anywidget is not installed")
    write_notebook(folder / "view.ipynb", code)
    themes = folder / "settings" / "@jupyterlab" / "apputils-extension"
    themes.mkdir(parents=True)
    theme = {"theme": "JupyterLab Dark" if dark else "JupyterLab Light"}
    (themes / "themes.jupyterlab-settings").write_text(json.dumps(theme))
    port = free_port()
    command = ["jupyterlab", "--no-browser", f"--port={port}", "--ServerApp.port_retries=0", "--allow-root"]
    command += ["--IdentityProvider.token=t", f"--ServerApp.root_dir={folder}", "--LabApp.news_url=None"]
    settings = {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    with server(folder, f"http://127.0.0.1:{port}/api", *command, **settings):
        tab = Tab(browser, **options)
        page = tab.page
        page.goto(f"http://127.0.0.1:{port}/lab/tree/view.ipynb?token=t&reset")
        page.locator(".jp-Notebook-cell").first.wait_for(timeout=60_000)
        prompt = page.locator(".jp-InputPrompt").first
        for _ in range(20):  # JupyterLab drops a cell that is run before the kernel is connected
            page.locator(".jp-Notebook-cell .cm-content").first.click()
            page.keyboard.press("Shift+Enter")
            page.wait_for_timeout(1500)
            if prompt.inner_text().strip("[]: "):
                break
        page.wait_for_selector(".cattn-view[data-theme]", timeout=60_000)
        yield page
        assert [url for url in tab.requests if "//127.0.0.1" not in url and url.startswith("http")] == []
        tab.context.close()


@contextlib.contextmanager
def marimo(browser: Any, folder: Path, code: str, *, dark: bool = False, **options: Any) -> Iterator[Any]:
    """Run the code as a cell of a marimo app."""
    if not all(map(importlib.util.find_spec, ("marimo", "anywidget"))):
        pytest.skip("marimo or anywidget is not installed")
    header = f'# /// script\n# [tool.marimo.display]\n# theme = "{"dark" if dark else "light"}"\n# ///\n'
    body = "".join(f"    {line}\n" for line in code.splitlines())
    app = f"{header}import marimo\napp = marimo.App(width='full')\n\n@app.cell\ndef _():\n{body}    return\n"
    (folder / "view.py").write_text(app)
    port = free_port()
    command = ["marimo", "run", "view.py", "--headless", f"--port={port}", "--no-token"]
    with server(folder, f"http://127.0.0.1:{port}/health", *command):
        tab = Tab(browser, **options)
        tab.page.goto(f"http://127.0.0.1:{port}/")
        tab.page.wait_for_selector(".cattn-view[data-theme]", timeout=60_000)
        yield tab.page
        tab.context.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


HOSTS = [jupyterlab, marimo]


def settle(page: Any) -> None:
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def value_of(page: Any) -> tuple[int, int, str, int]:
    settle(page)
    data = page.locator(".cattn-status").evaluate("node => ({...node.dataset})")
    return int(data["query"]), int(data["key"]), data["value"], int(data.get("block", 1))


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_widget_shows_the_numbers_in_the_theme_of_its_host(
    host: Any, dark: bool, browser: Any, tmp_path: Path
) -> None:
    weights = arrays(SMALL)["weights"]
    with host(browser, tmp_path, SMALL, dark=dark) as page:
        page.wait_for_selector(f".cattn-view[data-theme='{'dark' if dark else 'light'}']")
        page.get_by_role("gridcell", name="layer 1, head 2").click()
        for at in (3, 11):
            page.locator(".cattn-lane").nth(1).locator(f"[data-at='{at}']").hover()
            q, k, value, _ = value_of(page)
            assert (q, k) == (at, at)
            assert np.float32(value) == weights[1, 2, at, at]
        page.locator(".cattn-map").focus()
        page.keyboard.press("Home")
        q, k, value, _ = value_of(page)
        assert (q, k) == (11, 0)
        assert np.float32(value) == weights[1, 2, 11, 0]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_the_kernel_sends_what_the_page_lacks(host: Any, browser: Any, tmp_path: Path) -> None:
    """Weights that were reduced are exact once a head is open, also in the difference of two heads."""
    weights = arrays(LARGE)["weights"]
    with host(browser, tmp_path, LARGE) as page:
        page.get_by_role("gridcell", name="layer 1, head 1").click()
        page.wait_for_selector(".cattn-status[data-block='1']")
        page.locator(".cattn-map").focus()
        page.keyboard.press("ArrowUp")
        page.keyboard.press("ArrowLeft")
        q, k, value, _ = value_of(page)
        assert (q, k) == (198, 198)
        assert np.float32(value) == weights[1, 1, q, k]
        page.get_by_role("gridcell", name="layer 0, head 2").click(modifiers=["Shift"])
        page.locator(".cattn-title", has_text="−").wait_for()
        page.wait_for_selector(".cattn-status[data-block='1']")
        q, k, value, _ = value_of(page)
        assert float(value) == np.float64(weights[1, 1, q, k]) - weights[0, 2, q, k]


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.__name__)
def test_weights_of_a_window_are_computed_where_one_zooms_in(host: Any, browser: Any, tmp_path: Path) -> None:
    names = arrays(STATISTICS)
    with host(browser, tmp_path, STATISTICS) as page:
        page.locator(".cattn-strips").focus()
        for _ in range(5):
            page.keyboard.press("+")
        page.wait_for_selector(".cattn-near:not(.cattn-without-map) .cattn-map")
        page.locator(".cattn-lane").nth(1).locator("[data-at='2980']").click()
        q, k, value, _ = value_of(page)
        assert (q, k) == (2980, 2980)
        wanted = names["weights_of"](0, 0, slice(2980, 2981))[0, 2980]
        assert np.float32(value) == pytest.approx(wanted, rel=1e-6)


def test_python_and_the_page_follow_each_other(browser: Any, tmp_path: Path) -> None:
    """A second view of the same widget shows what is chosen in the first."""
    with jupyterlab(browser, tmp_path, f"{SMALL.removesuffix('view')}display(view)\ndisplay(view)") as page:
        page.wait_for_function("() => document.querySelectorAll('.cattn-view[data-theme]').length === 2")
        page.locator(".cattn-view").nth(0).get_by_role("gridcell", name="layer 1, head 2").click()
        page.wait_for_function("() => document.querySelectorAll('.cattn-title')[1].textContent === 'layer 1, head 2'")


@pytest.mark.parametrize("installed", [True, False], ids=["anywidget", "no anywidget"])
def test_nbconvert_shows_a_picture_or_the_page(browser: Any, tmp_path: Path, installed: bool) -> None:
    """With anywidget the notebook keeps a picture, as for GitHub; without it, the page itself."""
    if not all(map(importlib.util.find_spec, ("nbconvert", "anywidget", "matplotlib"))):
        pytest.skip("nbconvert, anywidget or matplotlib is not installed")
    start = "" if installed else "import sys\nsys.modules['anywidget'] = None\n"
    write_notebook(tmp_path / "view.ipynb", start + SMALL)
    command = [sys.executable, "-m", "nbconvert", "--execute", "--to", "html", "--embed-images", "view.ipynb"]
    # as JupyterLab saves notebooks; with the state, nbconvert would load a manager of widgets from the network
    command += ["--ExecutePreprocessor.store_widget_state=False"]
    run_command(command, cwd=tmp_path, check=True, capture_output=True)
    tab = Tab(browser, offline=True)
    tab.page.goto((tmp_path / "view.html").as_uri())
    pictures = tab.page.locator("img[src^='data:image/png']:visible")
    if installed:
        pictures.first.wait_for()
        assert pictures.first.evaluate("node => node.naturalWidth") > 500
        assert tab.page.locator("iframe").count() == 0
    else:
        tab.page.frame_locator("iframe").locator(".cattn-view[data-theme] .cattn-map").wait_for()
        assert pictures.count() == 0
    tab.context.close()
