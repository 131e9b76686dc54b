"""view_attention without a browser: what is sent and saved, what notebooks get, and errors."""

from __future__ import annotations

import base64
import html
import json
import re
import struct
import sys
import tomllib
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn._view import _page
from cattn._view._contents import Rectangle, Statistics, Weights, to_bytes
from support import ROOT
from support.processes import run_command

TOKENS = ["Your", "journey", "starts"]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
statistics = cattn.AttentionStatistics


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


def random(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).random(shape).astype(dtype)


def unpack(info: dict[str, Any], data: bytes) -> np.ndarray:
    """Return the array that the bytes hold."""
    dtype = ml_dtypes.bfloat16 if info["dtype"] == "bfloat16" else info["dtype"]
    cells = [-(-info[name] // info["block"]) for name in ("T_q", "T_k")]
    return np.frombuffer(data, dtype).reshape(info["n_layers"], info["heads"], *cells)


def state_of(page: str) -> dict[str, Any]:
    text = re.search(r'<script type="application/json" id="state">(.*?)</script>', page, re.DOTALL)
    assert "<" not in text[1], "a browser may end the script there, or read the rest of the page as part of it"
    return json.loads(text[1])


# ---- what is sent ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5, 2, 3, 4), (1, 5, 2, 3, 4), (5, 1, 2, 3, 4)])
def test_the_bytes_are_the_array(shape: tuple[int, ...], dtype: Any) -> None:
    weights = random(*shape, dtype=dtype)
    for given in (weights, np.asfortranarray(weights), np.repeat(weights, 2, -1)[..., ::2]):
        info, data = Weights(given, None, None, None).pack(2**20)
        assert info["block"] == 1
        assert data == np.ascontiguousarray(weights).tobytes()
        assert [info["n_layers"], info["heads"], info["T_q"], info["T_k"]] == [1] * (4 - weights.ndim) + list(
            weights.shape if weights.ndim < 5 else (5, 2, 3, 4)
        )


def test_other_numbers_become_float64() -> None:
    info, data = Weights([[0, 1], [True, 0]], None, None, None).pack(100)
    assert info["dtype"] == "float64"
    np.testing.assert_array_equal(unpack(info, data), [[[[0, 1], [1, 0]]]])


def test_big_endian_weights_are_converted() -> None:
    weights = random(3, 3).astype(">f4")
    info, data = Weights(weights, None, None, None).pack(100)
    np.testing.assert_array_equal(unpack(info, data)[0, 0], weights)


def test_a_sequence_has_one_layer_each() -> None:
    """As the attentions of a model of transformers: (B, H, T_q, T_k) with one entry of the batch."""
    layers = random(4, 2, 3, 3)
    for given in ([*layers], tuple(layers[:, None])):
        info, data = Weights(given, None, None, None).pack(1000)
        np.testing.assert_array_equal(unpack(info, data), layers)


def test_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    layers = random(2, 1, 2, 3, 3)
    info, data = Weights(tuple(map(torch.from_numpy, layers)), None, None, None).pack(1000)
    np.testing.assert_array_equal(unpack(info, data), layers[:, 0])


def test_the_weights_of_an_output_are_taken() -> None:
    x = random(2, 3, 4)
    result = cattn.causal_attention(x, x, x, return_weights=True)
    assert repr(cattn.view_attention(result)) == "AttentionView(float32 (1, 2, 3, 3))"


def test_one_entry_of_a_batch_is_shown_and_named() -> None:
    batch = random(3, 2, 4, 4)  # three entries, two heads
    output = cattn.AttentionOutput(batch, batch)
    layers = random(5, 3, 2, 4, 4)
    for given, entry, wanted in (
        (output, None, batch[:1]),
        (output, 2, batch[2:]),
        (batch, 1, batch[1:2]),
        (layers, 1, layers[:, 1]),
        ([*layers], None, layers[:, 0]),
        ([*layers], 2, layers[:, 2]),
    ):
        contents = cattn.view_attention(given, entry=entry)._contents
        info, data = contents.pack(10000)
        np.testing.assert_array_equal(unpack(info, data), wanted)
        assert info["entry"] == f"entry {entry or 0} of 3"
    assert cattn.view_attention(batch)._contents.info["entry"] == "", "four axes are layers"
    found = cattn.attention_statistics(random(3, 2, 4, 8), random(3, 2, 4, 8), top_k=2)
    shown = cattn.view_attention(found, entry=1)._contents
    assert shown.shape == (1, 2)
    np.testing.assert_array_equal(shown.fields["entropy"][0], found.entropy[1])


def test_a_title_heads_the_view_and_names_the_page(tmp_path: Path) -> None:
    view = cattn.view_attention(random(3, 3), title="My <model>")
    assert view._contents.info["heading"] == "My <model>"
    view.save(tmp_path / "file.html")
    assert "<title>My &lt;model&gt;</title>" in (tmp_path / "file.html").read_text("utf-8")
    view.save(tmp_path / "file.html", title="other")
    assert "<title>other</title>" in (tmp_path / "file.html").read_text("utf-8")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_large_weights_are_reduced_to_the_number_farthest_from_0(dtype: Any) -> None:
    weights = (random(2, 7, 5, dtype=np.float64) - 0.5).astype(dtype)
    weights[1, 6, 4] = np.nan
    weights[0, 0, 0] = -np.inf
    info, data = Weights(weights, None, None, None).pack(2 * 4 * 3 * weights.itemsize)
    assert info["block"] == 2
    got = unpack(info, data)[0].astype(np.float64)
    for head, q, k in np.ndindex(2, 4, 3):
        cells = weights[head, 2 * q : 2 * q + 2, 2 * k : 2 * k + 2].astype(np.float64).ravel()
        cells = cells[~np.isneginf(cells)]
        wanted = np.nan if np.isnan(cells).any() else cells[abs(cells).argmax()]
        np.testing.assert_array_equal(got[head, q, k], wanted)


def test_the_range_is_that_of_the_finite_numbers() -> None:
    info, _ = Weights([[-np.inf, 2.0], [np.nan, -3.0]], None, None, None).pack(100)
    assert (info["low"], info["high"]) == (-3.0, 2.0)
    info, _ = Weights([[0.25, 0.5]], None, None, None).pack(100)
    assert (info["low"], info["high"]) == (0.0, 0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_a_window_has_the_arrays_numbers(dtype: Any) -> None:
    weights = random(3, 2, 8, 9, dtype=dtype)
    part = Weights(weights, None, None, None).window(Rectangle(2, 1, 3, 6, 0, 4))
    assert to_bytes(part) == np.ascontiguousarray(weights[2, 1, 3:6, :4]).tobytes()


def test_statistics_are_sent_in_their_dtype() -> None:
    entropy, received = random(2, 3, 5), random(2, 3, 7, dtype=np.float64)
    top_keys, top_weights = np.arange(60).reshape(2, 3, 5, 2), random(2, 3, 5, 2)
    given = statistics(entropy=entropy, received=received, top_keys=top_keys, top_weights=top_weights)
    info, data = Statistics(given, list("abcdefg"), None, None, None).pack(10_000)
    assert (info["n_layers"], info["heads"], info["T_q"], info["T_k"], info["offset"]) == (2, 3, 5, 7, 2)
    found = {field["name"]: field for field in info["fields"]}
    assert list(found) == ["entropy", "received"]
    for where, array in [
        (found["entropy"], entropy),
        (found["received"], received),
        (info["top"]["keys"], top_keys.astype(np.int32)),
        (info["top"]["weights"], top_weights),
    ]:
        assert where["start"] % 8 == 0
        assert data[where["start"] : where["start"] + where["bytes"]] == array.tobytes()
        assert where["dtype"] == array.dtype.name
    assert found["entropy"]["offset"] == 2
    assert found["received"]["offset"] == 0


def test_statistics_of_queries_alone_take_the_number_of_keys_from_the_tokens() -> None:
    info, _ = Statistics(statistics(entropy=random(2, 3)), list("abcde"), None, None, None).pack(1000)
    assert (info["T_q"], info["T_k"], info["offset"], info["length"]) == (3, 5, 2, 5)
    info, _ = Statistics(statistics(received=random(3)), None, None, None, None).pack(1000)
    assert (info["n_layers"], info["heads"], info["T_q"], info["T_k"]) == (1, 1, 3, 3)


def test_a_batch_of_one_is_taken() -> None:
    given = statistics(
        entropy=random(1, 4, 2, 3), top_keys=np.zeros((1, 4, 2, 3, 1), int), top_weights=ones(1, 4, 2, 3, 1)
    )
    view = cattn.view_attention(given, layers=["a", "b", "c", "d"])
    assert view._contents.shape == (4, 2)
    assert repr(view) == "AttentionView(entropy=<float32 (4, 2, 3)>)"


def test_queries_of_another_text_are_not_the_keys() -> None:
    for tokens, queries, same in [
        (TOKENS, TOKENS[1:], True),
        (TOKENS, None, True),
        (TOKENS, ["x", "y"], False),
        (None, ["x", "y"], False),
        (None, None, False),
    ]:
        info = Weights(ones(2, 3), tokens, queries, None).info
        assert info["shared"] == same
        assert info["query_tokens"] == (None if same else queries)


def test_large_statistics_are_reduced_to_means() -> None:
    entropy = random(2, 10, dtype=np.float64)
    given = statistics(entropy=entropy, top_keys=np.zeros((2, 10, 1), int), top_weights=ones(2, 10, 1))
    info, data = Statistics(given, None, None, None, None).pack(2 * 3 * 8)
    assert info["fields"][0]["block"] == 4
    assert info["top"] is None
    wanted = [[row[:4].mean(), row[4:8].mean(), row[8:].mean()] for row in entropy]
    np.testing.assert_allclose(np.frombuffer(data).reshape(2, 3), wanted, rtol=1e-15)


def test_sinks_that_are_not_there_have_no_strip() -> None:
    for sinks, wanted in (([0.5], True), (None, False)):
        x = np.random.default_rng(0).standard_normal((1, 5, 4))
        given = cattn.attention_statistics(x, x, enable_gqa=True, sinks=sinks)
        assert ("sink_weight" in Statistics(given, None, None, None, None).fields) == wanted
    assert list(Statistics(statistics(sink_weight=np.zeros(3)), None, None, None, None).fields) == ["sink_weight"]


def test_a_window_of_statistics_is_what_weights_of_computes() -> None:
    query, key = np.random.default_rng(0).standard_normal((2, 2, 3, 20, 4))

    def weights_of(layer: int, head: int, queries: slice) -> np.ndarray:
        return cattn.attention_weights(query[layer, head, queries], key[layer, head])

    contents = Statistics(statistics(entropy=random(2, 3, 20)), None, None, None, weights_of)
    wanted = cattn.attention_weights(query, key)[1, 2, 5:9, 4:12]
    np.testing.assert_array_equal(contents.window(Rectangle(1, 2, 5, 9, 4, 12)), wanted)


# ---- the page --------------------------------------------------------------------------------------------------------
def test_the_module_is_small_and_fetches_nothing() -> None:
    module, style = _page.module(), _page.style()
    assert len(module.encode()) < 100_000
    outside = r"^import|\bimport\(|\bfetch\(|XMLHttpRequest|https?://|\beval\(|@import|url\("
    assert re.findall(outside, module + style, re.MULTILINE) == []
    assert re.findall(r"^export .*$", module, re.MULTILINE) == ["export default { render };"]
    for rule in re.findall(r"^([^@{}/\n ][^{}\n]*) \{", style, re.MULTILINE):
        assert all(part.strip().startswith(".cattn-") for part in re.sub(r"\([^)]*\)", "", rule).split(",")), rule


def test_every_script_of_the_folder_is_in_the_module() -> None:
    folder = ROOT / "python" / "cattn" / "_view"
    assert sorted(path.stem for path in folder.glob("*.js")) == sorted({*_page.SCRIPTS, *_page.LIVE_SCRIPTS})


def test_wheels_and_source_distributions_have_every_file() -> None:
    package = ROOT / "python" / "cattn"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["cattn"]
    packed = {path for pattern in patterns for path in package.glob(pattern)}
    others = {path for path in (package / "_view").iterdir() if path.is_file() and path.suffix != ".py"}
    assert len(others) > 5
    assert others <= packed
    (line,) = [line for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line.startswith("recursive-include")]
    assert {f"*{path.suffix}" for path in others} - {"*.wasm"} <= set(line.split())  # only wheels have what is compiled


def test_a_saved_page_is_one_file_with_everything(tmp_path: Path) -> None:
    weights = random(2, 4, 4)
    tokens = ["Your", "</script>", "<!--", "<script"]
    view = cattn.view_attention(weights, tokens)
    path = tmp_path / "a <page>.html"
    path.write_text("older")
    view.save(path)
    text = path.read_text("utf-8")
    assert "<title>a &lt;page&gt;</title>" in text
    assert [item.name for item in tmp_path.iterdir()] == [path.name]
    assert state_of(text)["info"]["tokens"] == tokens
    data = re.search(r'id="weights">(.*?)</script>', text)[1]
    assert zlib.decompress(base64.b64decode(data)) == weights.tobytes()
    assert re.findall(r'(?:src|href)="(?!data:)', text) == []
    view.save(str(path), title="other")
    assert "<title>other</title>" in path.read_text("utf-8")


def test_what_cannot_be_weights_is_said() -> None:
    query, key = np.random.default_rng(0).standard_normal((2, 2, 5, 4))
    for scores in (query, query @ key.swapaxes(-1, -2), query.astype(ml_dtypes.bfloat16)):
        with pytest.warns(UserWarning, match="rows do not sum to 1: these are scores or queries") as caught:
            view = cattn.view_attention(scores)
        assert caught[0].filename == __file__
        assert "Rows do not sum to 1" in state_of(view.to_html())["info"]["note"]
    for weights in (cattn.dropout(cattn.attention_weights(query, key), 0.5, rng=0), random(3, 3), ones(3, 3)):
        assert "Rows do not sum to 1" in state_of(cattn.view_attention(weights).to_html())["info"]["note"]
    masked = np.where(np.tri(5, dtype=bool), query @ key.swapaxes(-1, -2), -np.inf)
    assert "Rows do not" in state_of(cattn.view_attention(masked).to_html())["info"]["note"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_not_called_something_else(dtype: Any) -> None:
    query, key = np.random.default_rng(0).standard_normal((2, 2, 700, 4), dtype=np.float32)
    weights = cattn.attention_weights(query, key, is_causal=True).astype(dtype)
    weights[0, 3] = 0  # a query of padding
    weights[1, 4] = np.nan
    assert state_of(cattn.view_attention(weights).to_html())["info"]["note"] == ""


def test_the_first_axis_of_one_array_is_a_batch_unless_its_layers_are_named() -> None:
    weights = cattn.attention_weights(random(2, 3, 4, 5), random(2, 3, 4, 5))
    for given, options, word in (
        (weights, {}, "entry"), (list(weights), {}, "layer"), (weights, {"layers": range(2)}, "layer"),
        (weights[:, None], {}, "layer"), (cattn.attention_statistics(*random(2, 2, 3, 4, 5)), {}, "entry"),
    ):  # fmt: skip
        assert state_of(cattn.view_attention(given, **options).to_html())["info"]["axis"] == word


@pytest.mark.parametrize("name", ["x.png", "x.svg", "x.PDF", "x.npy", "x.html.gz"])
def test_a_name_that_is_no_page_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: a view is a page, so its name must end in \.html; plot_attention"):
        cattn.view_attention(ones(3, 3)).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    for page in ("x.html", "x.HTM", "x"):
        cattn.view_attention(ones(3, 3)).save(tmp_path / page)


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    view = cattn.view_attention(ones(3, 3))
    with pytest.raises(OSError, match=r"nowhere.a\.html"):
        view.save(tmp_path / "nowhere" / "a.html")


def test_the_import_of_cattn_does_not_bring_the_view() -> None:
    code = (
        "import sys, cattn; before = set(sys.modules); "
        "assert not {'cattn._view', 'anywidget', 'json', 'base64'} & before, before; "
        "import numpy as np; cattn.view_attention(np.eye(2)).to_html(); "
        "assert not {'anywidget', 'traitlets', 'matplotlib'} & set(sys.modules)"
    )
    run_command([sys.executable, "-c", code], check=True)


# ---- notebooks -------------------------------------------------------------------------------------------------------
def test_a_notebook_gets_the_widget_and_a_picture() -> None:
    pytest.importorskip("anywidget")
    pytest.importorskip("matplotlib")
    data, metadata = cattn.view_attention(random(2, 3, 3), TOKENS)._repr_mimebundle_()
    width, height = struct.unpack(">II", base64.b64decode(data["image/png"])[16:24])
    assert np.allclose([width, height], 2 * np.array(list(metadata["image/png"].values())), atol=1)
    assert set(data) == {"text/plain", "application/vnd.jupyter.widget-view+json", "image/png"}
    assert base64.b64decode(data["image/png"]).startswith(b"\x89PNG")
    assert data["text/plain"] == "AttentionView(float32 (1, 2, 3, 3))"


def test_without_anywidget_a_notebook_gets_the_page_in_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.delitem(sys.modules, "cattn._view._widget", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    view = cattn.view_attention(random(2, 3, 3), TOKENS)
    with pytest.raises(ImportError, match=r"^the widget needs anywidget: pip install 'cattn\[widget\]'$"):
        _ = view.widget
    data, metadata = view._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html", "image/png"}
    assert set(metadata) == {"image/png"}
    frame = re.match(r'<iframe srcdoc="([^"]*)"', data["text/html"])
    assert state_of(html.unescape(frame[1]))["info"]["tokens"] == TOKENS
    assert f'src="data:image/png;base64,{data["image/png"]}"' in data["text/html"]


def test_without_matplotlib_there_is_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "cattn._view._widget", raising=False)
    monkeypatch.setitem(sys.modules, "anywidget", None)
    data, _ = cattn.view_attention(random(3, 3))._repr_mimebundle_()
    assert set(data) == {"text/plain", "text/html"}
    assert "<img" not in data["text/html"]


@pytest.mark.filterwarnings("ignore:weights has negative numbers")
@pytest.mark.parametrize(
    "view",
    [
        lambda: cattn.view_attention(random(3, 3), TOKENS),
        lambda: cattn.view_attention(random(2, 60, 300) - 0.5),
        lambda: cattn.view_attention(random(5, 3, 4), [*TOKENS, "."], layers=["only"]),
        lambda: cattn.view_attention(random(3, 5, 9, 7, dtype=np.float16), layers=["a", "$b", "c"]),
        lambda: cattn.view_attention(random(11, 70, 70), [str(i) for i in range(70)]),
        lambda: cattn.view_attention(random(2, 3, 3, dtype=ml_dtypes.bfloat16), TOKENS, query_tokens=list("abc")),
        lambda: cattn.view_attention(statistics(entropy=random(2, 5, dtype=np.float16), received=random(2, 7))),
    ],
)
def test_the_picture_is_not_left_to_pyplot(view: Any) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    before = plt.get_fignums()
    image, _ = _page.picture(view()._contents)
    assert image.startswith(b"\x89PNG")
    assert plt.get_fignums() == before


class Sent(list):
    """Records what a widget sends."""

    def __call__(self, content: Any, buffers: Any = None) -> None:
        self.append((content, buffers))


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that asks a view for a window and returns what its widget sends."""
    pytest.importorskip("anywidget")

    def ask(view: cattn.AttentionView, **question: int) -> Any:
        sent = Sent()
        monkeypatch.setattr(view.widget, "send", sent)
        view.widget._answer(None, {"kind": "window", "id": "x", **question}, [])
        assert len(sent) == 1
        return sent[0]

    return ask


def test_the_widget_sends_windows(answer: Any) -> None:
    weights = random(2, 3, 8, 8)
    content, buffers = answer(cattn.view_attention(weights), layer=1, head=2, q0=2, q1=5, k0=1, k1=3)
    assert content == {"id": "x", "dtype": "float32"}
    assert buffers == [np.ascontiguousarray(weights[1, 2, 2:5, 1:3]).tobytes()]


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (
            lambda: ones(2, 2),
            "ValueError: weights_of(...) must return the shape (queries, T_k) = (3, 8), got (2, 2)",
        ),
        (lambda: 1 / 0, "ZeroDivisionError: division by zero"),
        (None, "ValueError: the view was made without weights_of"),
    ],
)
def test_an_error_of_weights_of_reaches_the_page(answer: Any, result: Any, says: str) -> None:
    weights_of = None if result is None else lambda *_: result()
    view = cattn.view_attention(statistics(entropy=random(2, 8)), weights_of=weights_of)
    content, buffers = answer(view, layer=0, head=1, q0=2, q1=5, k0=1, k1=3)
    assert content == {"id": "x", "error": says}
    assert buffers is None


def test_marimo_gets_the_widget_and_other_messages_are_ignored() -> None:
    pytest.importorskip("anywidget")
    view = cattn.view_attention(random(3, 3))
    assert view._display_() is view.widget
    assert view.widget._answer(None, {"kind": "other"}, []) is None


def test_the_widget_checks_the_chosen_heads() -> None:
    traitlets = pytest.importorskip("traitlets")
    pytest.importorskip("anywidget")
    widget = cattn.view_attention(random(2, 3, 4, 4)).widget
    widget.heads = [[1, 2], [0, 0]]
    with pytest.raises(traitlets.TraitError, match=r"layer < 2 and head < 3, got \[0, 3\]"):
        widget.heads = [[0, 3]]
    with pytest.raises(traitlets.TraitError):
        widget.scale = "cubic"


# ---- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"weights": None}, TypeError, "weights must be an array of real numbers, got NoneType"),
        ({"weights": "text"}, TypeError, "weights has dtype <U4"),
        ({"weights": ones(3, 3) * 1j}, TypeError, "weights has dtype complex"),
        ({"weights": ones(3)}, ValueError, r"weights must have shape \(T_q, T_k\), .* got \(3,\)"),
        (
            {"weights": ones(2, 2, 2, 3, 3)},
            ValueError,
            r"weights must have shape .*, got \(2, 2, 2, 3, 3\): choose",
        ),
        ({"weights": ones(2, 0, 3)}, ValueError, r"weights must not be empty, got shape \(2, 0, 3\)"),
        ({"weights": ones(0, 3, 3)}, ValueError, r"weights must not be empty, got shape \(0, 3, 3\)"),
        ({"weights": ones(0, 2, 3, 3)}, ValueError, r"weights must not be empty, got shape \(0, 2, 3, 3\)"),
        (
            {"weights": [ones(2, 3, 3), ones(2, 3, 4)]},
            ValueError,
            r"weights\[1\] must have the shape .* weights\[0\]",
        ),
        ({"weights": [ones(2, 2, 3, 3)], "entry": 2}, ValueError, r"entry must be from 0 to 1 for weights\[0\] of"),
        ({"title": 3}, TypeError, "title must be a str, got int"),
        ({"query": ones(4, 2)}, ValueError, r"query must have shape \(1, 3, 'D'\)|query must have shape \(1, 3, D\)"),
        ({"query": ones(3, 2), "key": ones(3, 4)}, ValueError, "query and key must have one head_dim, got 2 and 4"),
        ({"weights": statistics(entropy=ones(2, 3)), "value": ones(3, 3)}, TypeError, "value is for weights: stat"),
        ({"weights": cattn.AttentionOutput(ones(3, 3))}, TypeError, "weights is an AttentionOutput without weights"),
        ({"tokens": ["a"]}, ValueError, "tokens must name 3 tokens, got 1"),
        ({"tokens": "abc"}, TypeError, "tokens must be a sequence of str, got one str"),
        ({"tokens": 3}, TypeError, "tokens must be a sequence of str, got int"),
        ({"query_tokens": ["a"]}, ValueError, "query_tokens must name 3 tokens, got 1"),
        ({"weights": ones(1, 4, 3), "tokens": TOKENS}, ValueError, "query_tokens must be given where T_q > T_k"),
        ({"layers": ["a", "b"]}, ValueError, "layers must name 1 layers, got 2"),
        ({"layers": "a"}, TypeError, "layers must be a sequence of str, got one str"),
        ({"weights_of": print}, TypeError, "weights_of is for statistics"),
        (
            {"weights": statistics(entropy=ones(2, 3)), "weights_of": 1},
            TypeError,
            "weights_of must be callable, got ",
        ),
        (
            {"weights": statistics()},
            ValueError,
            "weights is an AttentionStatistics without a statistic for",
        ),
        (
            {"weights": statistics(entropy=ones(2, 3), distance=ones(2, 4))},
            ValueError,
            "weights.entropy must have shape",
        ),
        ({"weights": statistics(entropy=np.float64(1))}, ValueError, "weights.entropy must have at least 1 axes"),
        ({"weights": statistics(entropy=ones(2, 0))}, ValueError, "weights must not be empty"),
        (
            {"weights": statistics(entropy=ones(2, 2, 2, 3))},
            ValueError,
            "weights.entropy must have the shape of one",
        ),
        (
            {"weights": statistics(entropy=ones(2, 3), top_keys=ones(2, 4, 1).astype(int), top_weights=ones(2, 4, 1))},
            ValueError,
            r"weights.top_keys must have shape",
        ),
        ({"labels": TOKENS}, TypeError, r".*unexpected keyword argument 'labels': did you mean 'tokens'\?"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}"):
        cattn.view_attention(**{"weights": ones(1, 3, 3), **arguments})
