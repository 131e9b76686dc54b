"""Pages that the documentation build generates: gallery, help of the commands, promises, errors, views and pictures.

Their sources are elsewhere: the notebooks, the command, the tests, benchmarks/results. Git ignores the generated files.
"""

import base64
import contextlib
import io
import json
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import _promises
import draw_live
import draw_pictures
import draw_views
from benchmarks import accuracy

from cattn import __main__ as command

HERE = Path(__file__).parent
NOTEBOOKS = HERE.parent / "examples"
GALLERY = HERE / "examples"
GENERATED = HERE / "api" / "generated"
VIEWS = HERE / "_views"

HEADER = """\
# Notebooks

They run from top to bottom, and are shown with their committed outputs. Their sources are in `examples/` of a clone of
the repository, in which `pip install '.[examples]'` installs the packages that they need. The notebooks on masking,
dropout and training also need PyTorch: `pip install '.[examples,torch]'`. [Exercises](../exercises.md) for a class are
on one page. Nothing to install: the [live page](../live.md) computes attention in the browser.
"""
LIVE = """\
<iframe class="cattn-live" src="../_static/{name}.html" title="All heads of the model" loading="lazy"></iframe>
<p>On the <a href="../live.html">live page</a> you change the mask, and the numbers follow.</p>"""


def write_pages(*_: Any) -> None:
    """Write the gallery, the help text, the tables of promises and errors, the views and the pictures."""
    GALLERY.mkdir(exist_ok=True)
    notebooks = sorted(NOTEBOOKS.glob("*.ipynb"))
    stale = {path.name for path in GALLERY.iterdir()} - {path.name for path in notebooks} - {"index.md"}
    cards = [_card(path, stale) for path in notebooks]
    for name in stale:
        (GALLERY / name).unlink()
    names = "\n".join(path.stem for path in notebooks)
    gallery = "\n".join(["::::{grid} 1 2 2 3", ":gutter: 3", "", *cards, "::::"])
    toctree = f":::{{toctree}}\n:hidden:\n\n{names}\n:::\n"
    _write(GALLERY / "index.md", "\n".join([HEADER, gallery, "", toctree]) if notebooks else HEADER)

    GENERATED.mkdir(parents=True, exist_ok=True)
    for name in command.COMMANDS:
        text = io.StringIO()
        with mock.patch.dict(os.environ, COLUMNS="90", NO_COLOR="1"), contextlib.redirect_stdout(text):
            command.main([name, "--help"])
        _write(GENERATED / f"{name}.txt", text.getvalue())
    _write(GENERATED / "promises.txt", _promises.tables())
    _write(GENERATED / "accuracy.txt", accuracy.markdown())
    VIEWS.mkdir(exist_ok=True)
    draw_views.write(VIEWS)
    draw_live.write(VIEWS)
    draw_pictures.write()


def _write(path: Path, text: str) -> None:
    """Write text unless the file has it already, because Sphinx rebuilds every page whose source file is newer."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _card(path: Path, stale: set[str]) -> str:
    """Copy a notebook and its first picture into the gallery; return a card with title, first sentence and picture."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    cells = notebook["cells"]
    title, _, rest = "".join(cells[0]["source"]).lstrip("# ").partition("\n")
    sentence = re.split(r"(?<=[.:])\s", rest.strip().partition("\n\n")[0])[0].rstrip(":") + "."
    sentence = sentence.replace("..", ".")
    lines = [f":::{{grid-item-card}} {title}", f":link: {path.stem}", ":link-type: doc"]
    pictures = (  # a view is the best one
        (output["data"]["image/png"], cell["metadata"]["mystnb"]["image"]["alt"])
        for cell in sorted(cells, key=lambda cell: "live_view" not in cell["metadata"])
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    )
    if found := next(pictures, None):
        picture, words = found
        thumbnail = GALLERY / f"{path.stem}.png"
        thumbnail.write_bytes(base64.b64decode("".join(picture)))
        stale.discard(thumbnail.name)
        lines += [f":img-top: {thumbnail.name}", f":img-alt: {words}"]
    for cell in cells:  # a view is live on the site
        if (name := cell["metadata"].get("live_view")) is not None:
            html = {"text/html": LIVE.format(name=name), "text/plain": ""}
            cell["outputs"] = [{"output_type": "display_data", "data": html, "metadata": {}}]
    _write(GALLERY / path.name, json.dumps(notebook, ensure_ascii=False, indent=1) + "\n")
    return "\n".join([*lines, "", sentence, ":::"])
