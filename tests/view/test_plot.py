"""plot_attention: cells, borders, labels, colours, and errors."""

import io
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import cattn

plt = pytest.importorskip("matplotlib.pyplot")

TOKENS = ["Your", "journey", "starts", "with", "one", "step"]


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    plt.close("all")  # tests of other files may have left some open
    yield
    plt.close("all")


def causal_weights(*batch: int, n: int = 6, n_q: int | None = None) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((*batch, n, 4))
    return cattn.attention_weights(x[..., -(n_q or n) :, :], x, is_causal="lower_right")


def drawn(ax: Any) -> np.ma.MaskedArray:
    return ax.images[0].get_array()


def texts(labels: Any) -> list[str]:
    return [label.get_text() for label in labels]


@pytest.mark.promise("pictures")
def test_cells_hold_the_weights_and_the_future_is_blank() -> None:
    weights = causal_weights()
    ax = cattn.plot_attention(weights, TOKENS, titles="causal")
    np.testing.assert_array_equal(drawn(ax).filled(0), weights)
    np.testing.assert_array_equal(np.ma.getmaskarray(drawn(ax)), np.triu(np.ones((6, 6), bool), 1))
    assert texts(ax.get_xticklabels()) == texts(ax.get_yticklabels()) == TOKENS
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title()) == ("key", "query", "causal")
    assert texts(ax.texts) == [f"{w:.2f}" for w in weights[np.tri(6, dtype=bool)]]


def border(ax: Any) -> list[tuple[float, float]] | None:
    """Return the points of the stepped border line, or None if there is no such line."""
    lines = [line for line in ax.lines if line.get_linestyle() == "-"]
    return list(zip(*lines[0].get_data(), strict=True)) if lines else None


def test_the_border_follows_the_causal_mask() -> None:
    two = cattn.plot_attention(causal_weights(n=2))
    assert border(two) == [(0.5, -0.5), (0.5, 0.5), (1.5, 0.5), (1.5, 1.5)]
    cached = cattn.plot_attention(causal_weights(n=4, n_q=2))
    assert border(cached) == [(2.5, -0.5), (2.5, 0.5), (3.5, 0.5), (3.5, 1.5)]
    assert border(cattn.plot_attention(np.full((3, 3), 1 / 3))) is None
    assert border(cattn.plot_attention(causal_weights(n=4, n_q=1))) is None, "the last query sees every key"
    full, causal = cattn.plot_attention(np.stack([np.full((2, 2), 0.5), causal_weights(n=2)]))
    assert border(full) is None
    assert border(causal) == border(two)


def test_heads_share_one_scale_and_one_colour_bar() -> None:
    weights = causal_weights(5)
    weights[3] *= 2  # as dropout does
    axes = cattn.plot_attention(weights, TOKENS)
    assert axes.shape == (5,)
    assert [ax.get_title() for ax in axes] == [f"head {h}" for h in range(5)]
    assert {(ax.images[0].norm.vmin, ax.images[0].norm.vmax) for ax in axes} == {(0.0, 2.0)}
    visible = [ax for ax in axes[0].figure.axes if ax.get_visible()]
    assert len(visible) == 5 + 1
    assert visible[-1].get_ylabel() == "weight"
    for ax, panel in zip(axes, weights, strict=True):
        np.testing.assert_array_equal(drawn(ax).filled(0), panel)


def test_the_labels_of_a_saved_figure_are_inside_it() -> None:
    ax: Any = cattn.plot_attention(np.tri(6) / 6, ["the", "cat", "sat", "on", "the", "mat"])
    ax.figure.canvas.draw()
    inside = ax.figure.bbox
    for label in (ax.xaxis.label, ax.yaxis.label):
        box = label.get_window_extent()
        assert inside.x0 <= box.x0 < box.x1 <= inside.x1
        assert inside.y0 <= box.y0 < box.y1 <= inside.y1


def test_leading_dimensions_of_size_one_are_dropped() -> None:
    assert cattn.plot_attention(causal_weights(1, 1, 3)).shape == (3,)
    assert cattn.plot_attention(causal_weights(1)).shape == (1,)


BATCH = np.linspace(0.1, 1, 2 * 3 * 3 * 3).reshape(2, 3, 3, 3)


def test_one_entry_of_a_batch_is_drawn_and_named() -> None:
    for entry in (None, 1):
        axes = cattn.plot_attention(BATCH, entry=entry)
        assert [ax.get_title() for ax in axes] == [f"entry {entry or 0} of 2, head {h}" for h in range(3)]
        np.testing.assert_array_equal(drawn(axes[2]), BATCH[entry or 0, 2])


def test_given_axes_are_used() -> None:
    figure, grid = plt.subplots(2, 2)
    axes = cattn.plot_attention(causal_weights(4), ax=grid, titles=list("abcd"), annotate=False, vmax=0.5, label="w")
    assert all(a is b for a, b in zip(axes, grid.ravel(), strict=True))
    assert axes[2].get_title() == "c"
    assert axes[0].images[0].norm.vmax == 0.5
    assert not axes[0].texts
    assert plt.get_fignums() == [figure.number]
    ax = plt.figure().add_subplot()
    assert cattn.plot_attention(causal_weights(), ax=ax) is ax


def test_hidden_scores_are_blank_and_non_finite_ones_are_crossed() -> None:
    scores = np.array([[1.0, -np.inf, np.nan], [-2.0, 0.0, np.inf]])
    ax = cattn.plot_attention(scores, query_tokens=["a", "b"], label="score")
    assert ax.images[0].norm.vmin == -2
    np.testing.assert_array_equal(np.ma.getmaskarray(drawn(ax)), [[False, True, True], [False, True, True]])
    (crosses,) = [line for line in ax.lines if line.get_marker() == "x"]
    assert sorted(zip(*crosses.get_data(), strict=True)) == [(2, 0), (2, 1)]
    assert texts(ax.get_yticklabels()) == ["a", "b"]


def test_weights_of_zero_and_many_tokens_are_drawn() -> None:
    assert cattn.plot_attention(np.zeros((2, 2))).images[0].norm.vmax == 1
    n = 60
    ax = cattn.plot_attention(causal_weights(n=n), [f"t{i}" for i in range(n)])
    assert not ax.texts
    assert "t1" not in texts(ax.get_xticklabels())
    assert all(tick == int(tick) for tick in ax.get_xticks())


def test_queries_are_the_last_tokens() -> None:
    ax = cattn.plot_attention(causal_weights(n=6, n_q=2), TOKENS)
    assert texts(ax.get_yticklabels()) == ["one", "step"]
    assert texts(ax.get_xticklabels()) == TOKENS


def test_numbers_contrast_with_the_colours_of_their_cells() -> None:
    ax = cattn.plot_attention(np.array([[1.0, 0.1]]), query_tokens=["q"])
    assert [text.get_color() for text in ax.texts] == ["white", "black"]


def test_lists_and_tensors_are_plotted() -> None:
    torch = pytest.importorskip("torch")
    for weights in ([[1, 0], [0.5, 0.5]], torch.tensor([[1, 0], [0.5, 0.5]])):
        np.testing.assert_array_equal(drawn(cattn.plot_attention(weights)).filled(0), [[1, 0], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"weights must have shape .* got \(3,\)", {"weights": np.ones(3)}),
        (ValueError, "entry must be from 0 to 1 for weights of shape .*, got 2", {"weights": BATCH, "entry": 2}),
        (ValueError, "entry must be from 0 to 0 for weights of shape .*, got 1", {"entry": 1}),
        (TypeError, "entry must be an int, got str", {"weights": BATCH, "entry": "0"}),
        (ValueError, "weights must not be empty", {"weights": np.ones((0, 3))}),
        (TypeError, "weights", {"weights": [["a", "b"]]}),
        (TypeError, "tokens must be a sequence of str, got one str", {"tokens": "abc"}),
        (ValueError, "tokens must name 3 tokens, got 2", {"tokens": ["a", "b"]}),
        (ValueError, "query_tokens must name 3 tokens, got 1", {"query_tokens": ["a"]}),
        (ValueError, "query_tokens must be given where T_q > T_k", {"weights": np.ones((3, 2)), "tokens": ["a", "b"]}),
        (ValueError, "titles must have one str for each of 1 heads, got 2", {"titles": ["a", "b"]}),
        (ValueError, "not a valid value for cmap|nope", {"cmap": "nope"}),
        (TypeError, "ax must be a matplotlib Axes, or an array of them, got str", {"ax": "here"}),
    ],
)
def test_wrong_arguments_are_refused(error: type[Exception], message: str, call: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        cattn.plot_attention(**({"weights": np.ones((3, 3))} | call))
    assert not plt.get_fignums(), "a refused call leaves no figure behind"


def test_a_wrong_number_of_axes_is_refused() -> None:
    _, axes = plt.subplots(1, 3)
    with pytest.raises(ValueError, match="ax must have one Axes for each of 2 heads, got 3"):
        cattn.plot_attention(np.ones((2, 3, 3)), ax=axes)


def test_the_error_names_the_extra_if_matplotlib_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'cattn\[plot\]'"):
        cattn.plot_attention(np.ones((2, 2)))


def test_importing_cattn_does_not_import_matplotlib() -> None:
    code = "import sys, cattn; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bfloat16_and_tokens_with_dollar_signs_are_drawn() -> None:
    """matplotlib does not support bfloat16, and typesets text between dollar signs as mathematics."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tokens = ["$$", "c$ $x^", "$b$"]
    ax = cattn.plot_attention(np.eye(3, dtype=ml_dtypes.bfloat16), tokens)
    ax.figure.canvas.draw()
    assert [label.get_text() for label in ax.get_yticklabels()] == tokens
    assert not any(label.get_parse_math() for label in (*ax.get_xticklabels(), *ax.get_yticklabels()))
    plt.close("all")


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
@pytest.mark.parametrize("fonttype", ["none", "path"])
def test_a_picture_can_be_read_whatever_the_tokens_hold(kind: str, fonttype: str) -> None:
    tokens = [
        "\0",
        "\x1b[31m",
        "\ud800",
        "\ufffe",
        "a\u202eb",
        "<b>&amp;--",
        "\n",
        "x" * 5000,
        chr(0x1FFFF),
        "\x85\x7f",
    ]
    title = "a\x01\nb"
    with plt.rc_context({"svg.fonttype": fonttype}):
        ax = cattn.plot_attention(np.eye(10), tokens, titles=title, label="\x02")
        file = io.BytesIO()
        ax.figure.savefig(file, format=kind)
    shown = texts(ax.get_xticklabels())
    assert shown[:7] == ["�", "�[31m", "�", "�", "a�b", "<b>&amp;--", "↵"]
    assert len(shown[7]) == 40
    assert ax.get_title() == "a�\nb"
    if kind == "svg":
        ElementTree.fromstring(file.getvalue())


@pytest.mark.parametrize("vmax", [float("nan"), float("inf")])
def test_vmax_must_be_finite(vmax: float) -> None:
    with pytest.raises(ValueError, match=f"vmax must be finite, got {vmax}"):
        cattn.plot_attention(np.eye(2), vmax=vmax)
