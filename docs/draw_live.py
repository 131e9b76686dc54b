"""Write the live page of the site: one file with the core for browsers, a tiny GPT and the scripts of the views.

The build of the site calls `write`. `examples/train_gpt.py --page docs/live_gpt.npz` trains the model; `nox -s live`
compiles the core.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from cattn._view._page import LIVE_SCRIPTS, core, fill

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "examples"))
MODEL = HERE / "live_gpt.npz"

from small_gpt import LINE, WORD, load  # noqa: E402 - in examples/

START = 'showPage(state, await packed("model"), await packed("core"), document.getElementById("view"));'


def model() -> tuple[dict[str, Any], bytes]:
    """Return the description of the model and its tokens, and the bytes of its arrays."""
    gpt, pieces = load(str(MODEL))
    with np.load(MODEL) as file:
        read = dict(file)
    arrays: dict[str, Any] = {}
    data = b""

    def place(array: Any) -> int:
        """Append an array; return where it starts."""
        nonlocal data
        start = len(data)
        part = array.astype(array.dtype.newbyteorder("<")).tobytes()
        data += part + bytes(-len(part) % 4)
        return start

    for name in gpt.weights:
        arrays[name] = {"start": place(read[name]), "shape": list(read[name].shape)}
        if f"{name} scale" in read:
            arrays[name]["scales"] = place(read[f"{name} scale"])
    state = {
        "heading": "Attention, live",
        "model": {
            "heads": gpt.heads,
            "layers": gpt.layers,
            "context": gpt.context,
            "arrays": arrays,
        },
        "tokenizer": {
            "pieces": [piece.decode("latin-1") for piece in pieces],
            "merges": [[a, b, pieces.index(pieces[a] + pieces[b])] for a, b in pieces.merges],
            "pattern": WORD,
            "line": LINE,
        },
    }
    return state, data


def write(folder: Path) -> None:
    """Compile the core if it is not up to date, and write the page."""
    subprocess.run([sys.executable, HERE.parent / "tools" / "live"], check=True)
    state, data = model()
    more = "\n".join((HERE / "live" / name).read_text(encoding="utf-8") for name in ("gpt.js", "story.js"))
    page = fill(state["heading"], state, {"model": data, "core": core()}, LIVE_SCRIPTS, START, more)
    (folder / "live.html").write_text(page, encoding="utf-8")
