"""``python -m cattn plot``: the pictures that it writes, the weights that it chooses, and what it refuses."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import leftovers, save

import cattn
from cattn.__main__ import main
from cattn.nn._files import save_arrays
from support.processes import run_command

plt = pytest.importorskip("matplotlib.pyplot")

TOKENS = "Your journey starts with one step"
SIGNATURES = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def causal_weights(*batch: int) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((*batch, 6, 4)).astype(np.float32)
    return cattn.attention_weights(x, x, is_causal=True)


@pytest.fixture(autouse=True)
def _no_figures() -> None:
    """Close the figures of other tests."""
    plt.close("all")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, dict[str, Any]]]:
    """The arguments of each call of plot_attention, which draws as always."""
    calls: list[tuple[np.ndarray, dict[str, Any]]] = []
    plot = cattn.plot_attention

    def record(weights: np.ndarray, tokens: Any, **options: Any) -> Any:
        calls.append((weights, {"tokens": tokens, **options}))
        return plot(weights, tokens, **options)

    monkeypatch.setattr(cattn, "plot_attention", record)
    return calls


@pytest.mark.promise("pictures")
@pytest.mark.parametrize("suffix", SIGNATURES)
def test_plot_writes_a_picture_of_the_weights(
    folder: Path, capsys: pytest.CaptureFixture[str], drawn: list, suffix: str
) -> None:
    weights = causal_weights()
    np.save("weights.npy", weights)
    assert main(["plot", "weights.npy", "-o", f"heat{suffix}", "--tokens", TOKENS, "--title", "a $ title"]) == 0
    assert capsys.readouterr() == (f"heat{suffix}: 6 queries, 6 keys\n", "")
    assert Path(f"heat{suffix}").read_bytes().startswith(SIGNATURES[suffix])
    np.testing.assert_array_equal(drawn[0][0], weights)
    assert drawn[0][1]["tokens"] == TOKENS.split()
    assert leftovers(folder) == []
    assert plt.get_fignums() == []


def test_plot_takes_the_weights_that_attend_writes(folder: Path, drawn: list) -> None:
    save((2, 3, 6, 4), (2, 3, 6, 4), (2, 3, 6, 4))
    for name in ("w.npy", "w.npz", "w.safetensors"):
        if name.endswith("safetensors"):
            pytest.importorskip("safetensors")
        assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy", "--causal", "--weights", name]) == 0
        assert main(["plot", name, "-o", "heat.png", "--entry", "1", "--quiet"]) == 0
        q, k = np.load("q.npy"), np.load("k.npy")
        np.testing.assert_array_equal(drawn[-1][0], cattn.attention_weights(q, k, is_causal=True)[1])


def test_plot_chooses_entries_heads_and_arrays(folder: Path, drawn: list) -> None:
    weights = causal_weights(2, 2, 4)
    np.savez("several.npz", first=weights, second=weights[0, :1])
    np.savez("one.npz", anything=weights[0, 0, 0])
    assert main(["plot", "several.npz:first", "-o", "a.png", "--entry", "3", "--heads", "2,0"]) == 0
    assert main(["plot", "several.npz:second", "-o", "a.png"]) == 0, "an entry need not be chosen from one"
    assert main(["plot", "one.npz", "-o", "a.png"]) == 0
    for (array, options), expected, titles in zip(
        drawn, [weights[1, 1, [2, 0]], weights[0, 0], weights[0, 0, 0]], [["head 2", "head 0"], None, None], strict=True
    ):
        np.testing.assert_array_equal(array, expected)
        assert options["titles"] == titles


def test_plot_reads_tokens_from_files(folder: Path, drawn: list) -> None:
    np.save("w.npy", causal_weights()[4:])
    Path("tokens.txt").write_text("Your\n journey\nstarts\nwith\n\none\n", encoding="utf-8")
    assert main(["plot", "w.npy", "-o", "a.png", "--tokens", "@tokens.txt", "--query-tokens", "x y"]) == 0
    assert drawn[0][1]["tokens"] == ["Your", " journey", "starts", "with", "", "one"]
    assert drawn[0][1]["query_tokens"] == ["x", "y"]


def test_plot_prints_a_warning_of_matplotlib_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("w.npy", np.eye(1))
    assert main(["plot", "w.npy", "-o", "a.png", "--tokens", "\U000f0000"]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match("cattn: warning: Glyph .* missing from", line)


WRONG: dict[str, tuple[Callable[[], object] | None, list[str], str]] = {
    "tokens": (None, ["--tokens", "too few"], r"tokens must name 6 tokens, got 2 \(weights: w\.npy\)"),
    "token file": (None, ["--tokens", "@none.txt"], "--tokens: none.txt: No such file"),
    "token bytes": (lambda: Path("t").write_bytes(b"\xff"), ["--query-tokens", "@t"], "--query-tokens: t: it is not"),
    "entry": (None, ["--entry", "1"], "--entry must be 0 for shape .*, which has no batch, got 1"),
    "far entry": (lambda: np.save("w.npy", causal_weights(2, 3)), ["--entry", "2"], "--entry must be .* got 2"),
    "heads of none": (None, ["--heads", "0"], "--heads must be numbers of heads of weights of three dimensions"),
    "far head": (lambda: np.save("w.npy", causal_weights(3)), ["--heads", "0,3"], "--heads .* from 0 to 2, got 0,3"),
    "no head": (lambda: np.save("w.npy", causal_weights(3)), ["--heads", "x"], "--heads .* got x"),
    "dpi": (None, ["--dpi", "0"], "--dpi must be from 10 to 1200, got 0"),
    "vector": (lambda: np.save("w.npy", np.ones(3)), [], "weights must have shape"),
    "empty": (lambda: np.save("w.npy", np.ones((0, 3))), [], "weights must not be empty"),
    "words": (lambda: np.save("w.npy", np.full((2, 2), "x")), [], "weights"),
    "damaged": (lambda: Path("w.npy").write_bytes(b"\x93NUMPY"), [], "w.npy is truncated or damaged"),
    "archive": (lambda: save_arrays("w.npz", {"a": np.eye(2), "b": np.eye(2)}) or os.replace("w.npz", "w.npy"), [],
                "w.npy has no array weights; it has a, b. Name arrays weights; or say which"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_plot_refuses_wrong_arguments_and_leaves_the_output(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    prepare, words, message = WRONG[what]
    np.save("w.npy", causal_weights())
    if prepare:
        prepare()
    Path("heat.png").write_text("as it was")
    assert main(["plot", "w.npy", "-o", "heat.png", *words]) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert "Traceback" not in captured.err
    assert Path("heat.png").read_text() == "as it was"
    assert leftovers(folder) == []
    assert plt.get_fignums() == []


def test_plot_refuses_names_that_no_picture_can_have(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("w.npy", np.eye(2))
    np.save("w.png", np.eye(2))
    os.replace("w.png.npy", "w.png")
    for arguments, message in (
        (["w.npy", "-o", "heat.txt"], "heat.txt: the name must end in .*, .png, "),
        (["w.npy", "-o", "heat"], "heat: the name must end in "),
        (["w.npy", "-o", "none/heat.png"], "none/heat.png: there is no such directory"),
        (
            ["w.png", "-o", "w.png"],
            r"--output: w\.png is the input file of weights; write to another file, or .*--force",
        ),
    ):
        assert main(["plot", *arguments]) == 2
        assert re.search(message, capsys.readouterr().err)
    assert main(["plot", "w.png", "-o", "w.png", "--force"]) == 0
    assert Path("w.png").read_bytes().startswith(SIGNATURES[".png"])


def test_plot_names_the_extra_if_matplotlib_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save("w.npy", np.eye(2))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plot", "w.npy", "-o", "heat.png"]) == 2
    assert capsys.readouterr().err == "cattn: error: cattn plot needs matplotlib: pip install 'cattn[plot]'\n"


def test_plot_needs_no_display(folder: Path) -> None:
    np.save("w.npy", np.eye(2))
    variables = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    variables |= {"MPLBACKEND": "tkagg", "PYTHONPATH": str(Path(cattn.__file__).parents[1])}
    done = run_command(
        [sys.executable, "-m", "cattn", "plot", "w.npy", "-o", "heat.png"],
        env=variables, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert Path("heat.png").stat().st_size > 0
