"""What a build of the documentation writes into its own source tree: the notebooks, the command's help, the promises.

Each has its source elsewhere. Everything written here is ignored by git.
"""

import base64
import contextlib
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import _promises

from cattn import __main__ as command

HERE = Path(__file__).parent
NOTEBOOKS = HERE.parent / "examples"
GALLERY = HERE / "examples"
GENERATED = HERE / "api" / "generated"

HEADER = """\
# Examples

Notebooks that run from top to bottom, shown with the outputs they were committed with. Their sources are in
`examples/`; `pip install 'cattn[examples]'` installs what they need.
"""


def write_pages(*_: Any) -> None:
    """Write the gallery, the help text and the tables of promises."""
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
    text = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="90", NO_COLOR="1"), contextlib.redirect_stdout(text):
        command.main(["attend", "--help"])
    _write(GENERATED / "attend.txt", text.getvalue())
    _write(GENERATED / "promises.txt", _promises.tables())


def _write(path: Path, text: str) -> None:
    """Write text unless it is there already: Sphinx reads again what is newer than its last build."""
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _card(path: Path, stale: set[str]) -> str:
    """Copy a notebook and its first picture, and return its card: title, first paragraph, picture."""
    shutil.copy2(path, GALLERY)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title, _, rest = "".join(cells[0]["source"]).lstrip("# ").partition("\n")
    paragraph = rest.strip().partition("\n\n")[0]
    lines = [f":::{{grid-item-card}} {title}", f":link: {path.stem}", ":link-type: doc"]
    pictures = (
        output["data"]["image/png"]
        for cell in cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    )
    picture = next(pictures, None)
    if picture is not None:
        thumbnail = GALLERY / f"{path.stem}.png"
        thumbnail.write_bytes(base64.b64decode("".join(picture)))
        stale.discard(thumbnail.name)
        lines.append(f":img-top: {thumbnail.name}")
    return "\n".join([*lines, "", paragraph, ":::"])
