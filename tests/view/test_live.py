"""The live page: its numbers are Python's to the bit, its program runs, and hostile text does no harm."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from cattn._view import _page
from cattn.testing import _vectors
from support import ROOT
from support.processes import Tab, chromium, needs_browser
from support.vectors import ATTENTION, Results, Vector, assert_every_flipped_bit_is_found, differing

STAGES = ["scores", "scaled", "masked", "weights", "dropped", "output"]
TOKENS = ["Your", "journey", "starts", "with", "one", "step"]
# The sentence under the controls, after the page has computed.
PROBLEM = "document.querySelector('[role=alert]').textContent"
# Sets options as the controls do, and returns each stage of a layer, and the program.
ASK = """([options, layer]) => {
    const live = document.getElementById("view").live;
    Object.assign(live.options, options);
    live.update();
    if (live.problem.textContent) throw new Error(live.problem.textContent);
    const attention = live.layers[layer];
    const { tokens } = live.source;
    const found = {program: attention.python(live.stage, 0, 0, tokens), tokens};
    for (const stage of STAGES) found[stage] = Array.from(attention.stage(stage), String);
    return found;
}""".replace("STAGES", str(STAGES))


@pytest.fixture(scope="module")
def core() -> bytes:
    """The compiled core, made by zig if it is installed."""
    if importlib.util.find_spec("ziglang") is not None:
        subprocess.run([sys.executable, ROOT / "tools" / "live"], check=True)
    try:
        return _page.core()
    except RuntimeError:
        pytest.skip("there is no core.wasm: `nox -s live` makes it with the package ziglang")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def page_file(core: bytes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import draw_live
    finally:
        sys.path.remove(str(ROOT / "docs"))
    folder = tmp_path_factory.mktemp("live")
    draw_live.write(folder)
    return folder / "live.html"


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens a page; at the end, nothing was fetched and nothing went wrong."""
    tabs = []

    def open_page(path: Path, **options: Any) -> Any:
        tab = Tab(browser, **options)
        tabs.append((tab, path))
        page = tab.open(path)
        page.wait_for_selector(".cattn-live canvas")
        return page

    yield open_page
    for tab, path in tabs:
        assert [url for url in tab.requests if url != path.as_uri() and not url.startswith("data:")] == []
        assert tab.problems == []
        tab.context.close()


def until(page: Any, condition: str) -> None:
    """Wait until an expression of JavaScript holds; Playwright's own way needs eval(), which the page forbids."""
    for _ in range(200):
        if page.evaluate(f"() => {condition}"):
            return
        page.wait_for_timeout(20)
    raise AssertionError(condition)


def random_options(rng: np.random.Generator, tokens: int, heads: int) -> dict[str, Any]:
    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    method = str(rng.choice(["neg_inf", "renormalize"]))
    cells = [f"{q},{k}" for q, k in rng.integers(0, tokens, (int(rng.integers(0, 6)), 2))]
    return {
        "method": method,
        "causal": bool(rng.random() < 0.7),
        "window": maybe(int(rng.integers(1, 6)), 0),
        "softcap": maybe(int(rng.integers(1, 20)), 0),
        "slopes": maybe([2.0 ** -(i + 1) for i in range(heads)], None),
        "sink": maybe(float(rng.integers(-4, 5) / 2), None),
        "temperature": maybe(round(float(rng.uniform(0.1, 4)), 1), 1),
        "dropout": maybe(round(float(rng.uniform(0, 0.9)), 1), 0),
        "seed": int(rng.integers(0, 2**32)),
        "cells": maybe(sorted(set(cells)), []),
    }


def compare(found: dict[str, Any]) -> None:
    """Run the program of the page, and compare its arrays with the page's numbers."""
    variables: dict[str, Any] = {}
    exec(compile(found["program"], "<program of the page>", "exec"), variables)
    assert variables.get("tokens") == found["tokens"]
    for stage in STAGES:
        numbers = np.array([float(text) for text in found[stage]], np.float32)
        right = variables[stage]
        assert right.dtype == np.float32
        np.testing.assert_array_equal(numbers.reshape(right.shape), right, stage)


@needs_browser
@pytest.mark.parametrize("cases", [12, pytest.param(200, marks=pytest.mark.long)])
def test_the_program_computes_the_numbers_of_the_page(show: Any, page_file: Path, cases: int) -> None:
    page = show(page_file)
    rng = np.random.default_rng(cases)
    for _ in range(cases):
        words = " ".join(rng.choice(["stone", "river", "The", "cat", "sat.", "…", "🙂"], int(rng.integers(1, 7))))
        page.fill("#sentence", words)
        page.evaluate("() => new Promise(requestAnimationFrame)")
        sizes = page.evaluate("() => document.getElementById('view').live.source.sizes")
        pads = int(rng.integers(0, 4))
        page.evaluate(
            """([pads, hidden]) => {
                const { live } = document.getElementById("view");
                live.padding.input.value = pads;
                live.padded.input.checked = hidden;
            }""",
            [pads, bool(rng.random() < 0.7)],
        )
        options = random_options(rng, sizes["T_q"], sizes["heads"])
        compare(page.evaluate(ASK, [options, int(rng.integers(0, 2))]))


def test_the_core_has_the_bits_of_python(core: bytes) -> None:
    """The door of C alone, without a browser: an output with every option, and a layer of the model."""
    wasmtime = pytest.importorskip("wasmtime")
    store = wasmtime.Store()
    exports = wasmtime.Instance(store, wasmtime.Module(store.engine, core), []).exports(store)
    exports["_initialize"](store)

    def place(array: np.ndarray | None) -> int:
        if array is None:
            return 0
        at = exports["allocate"](store, array.nbytes + 8)
        exports["memory"].write(store, array.tobytes(), at)
        return int(at)

    def call(name: str, shape: tuple[int, ...], *given: Any) -> np.ndarray:
        out = np.zeros(shape, np.float32)
        at = place(out)
        words = [place(x) if x is None or isinstance(x, np.ndarray) else x for x in given]
        assert exports[name](store, *words, at) == 0
        return np.frombuffer(exports["memory"].read(store, at, at + out.nbytes), np.float32).reshape(shape)

    x = operands(tokens=9)
    query, key, value = (array[None] for array in x.values())
    slopes, sinks = np.float32([0.5, 0.25, 0.125, 0]), np.float32([0.5] * 4)
    mask = np.random.default_rng(1).random((9, 9)) < 0.8
    for causal in (False, True):
        numbers = np.array([4, 9, 9, 8, 8, 0.3, 5.0, causal, 3, 3, 1, 2, 0.4, 123])
        arrays = (x["query"], x["key"], x["value"], mask.view(np.uint8), slopes, sinks)
        options: dict[str, Any] = {"alibi_slopes": slopes, "sinks": sinks, "window_size": (3, 3), "softcap": 5.0}
        options |= {"scale": 0.3, "is_causal": causal, "query_offset": 1, "key_value_seq_starts": 2, "dropout_p": 0.4}
        for stage, name in ((3, "mask"), (4, "softmax"), (5, "dropout")):
            right = cattn.attention_weights(query, key, mask, **options, rng=cattn.TorchGenerator(123), stage=name)
            np.testing.assert_array_equal(call("attention", (1, 4, 9, 9), numbers, stage, *arrays), right)
        right = cattn.scaled_dot_product_attention(query, key, value, mask, **options, rng=cattn.TorchGenerator(123))
        np.testing.assert_array_equal(call("attention", (1, 4, 9, 8), numbers, 6, *arrays), right)
    rows, weight = x["query"].reshape(-1, 8), x["key"].reshape(-1, 8)[:5]
    bias = x["value"].ravel()[:5]
    linear = cattn.functional.linear(rows, weight, bias)
    np.testing.assert_array_equal(call("linear", linear.shape, 36, 5, 8, rows, weight, bias), linear)
    norm = cattn.functional.layer_norm(rows, bias.repeat(2)[:8])
    np.testing.assert_array_equal(call("layer_norm", rows.shape, 36, 8, rows, bias.repeat(2)[:8]), norm)
    np.testing.assert_array_equal(call("gelu", rows.shape, rows.size, rows), cattn.functional.gelu(rows))


# What the functions of the page's core take.
TAKEN = {
    ATTENTION: {"query", "key", "value", "attn_mask", "is_causal", "scale", "softcap", "alibi_slopes", "sinks"}
    | {"query_offset", "key_value_seq_starts", "window_size"},
    "linear": {"x", "weight", "bias"},
    "layer_norm": {"x", "weight"},
    "gelu": {"x"},
    "dropout": {"x", "p", "rng"},
}


@needs_browser
def test_the_page_has_the_bits_of_the_vectors(show: Any, page_file: Path) -> None:
    """The program in JavaScript reads the file, and has a generator of its own."""
    vectors = []
    for vector in _vectors.read()["vectors"]:
        arrays, rng = vector["arrays"], vector["options"].get("rng")
        fits = {*arrays, *vector["options"]} <= TAKEN.get(vector["function"], set()) and not isinstance(rng, int)
        if fits and arrays.get("attn_mask", ["booleans"])[0] == "booleans":
            vectors.append(vector | {"results": {"float32": vector["results"]["float32"]}})
    assert len(vectors) == 22
    program = (Path(__file__).parent / "vectors.js").read_text("utf-8")
    names = [vector["name"] for vector in vectors]
    found = show(page_file).evaluate(program, [_vectors.FILE.read_text("utf-8"), names])

    def read(vector: Vector, _: str) -> Results:
        results = found[vector["name"]].items()
        return {name: np.frombuffer(bytes.fromhex(digits), ">f4") for name, digits in results}

    assert differing(vectors, read) == []
    assert_every_flipped_bit_is_found(vectors, read)


# ---- view_attention(live=...) ----------------------------------------------------------------------------------------
def operands(seed: int = 0, heads: int = 4, tokens: int = 6) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).standard_normal((3, heads, tokens, 8), np.float32)
    return dict(zip(("query", "key", "value"), x, strict=True))


@needs_browser
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "window_size": (2, 0), "softcap": 3.0, "alibi_slopes": [0.5, 0.25, 0.125, 0]},
        {"attn_mask": np.tri(6, k=1, dtype=bool), "sinks": [0.5] * 4},
        {"is_causal": True, "sinks": [-np.inf] * 4, "softcap": 1e21, "alibi_slopes": [1e22, 1e21, 123.0, 0.5]},
        {"is_causal": "lower_right"},
    ],
)
def test_a_live_view_begins_with_the_weights_of_the_call(
    core: bytes, show: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    arrays = operands()
    weights = cattn.attention_weights(arrays["query"][None], arrays["key"][None], **options)[0]
    known = options in ({}, {"is_causal": True})
    view = cattn.view_attention(weights, TOKENS, **arrays, live=True if known else options)
    view.save(tmp_path / "live.html")
    page = show(tmp_path / "live.html")
    found = page.evaluate(ASK, [{}, 0])
    numbers = np.array([float(text) for text in found["weights"]], np.float32).reshape(weights.shape)
    np.testing.assert_array_equal(numbers, weights)
    compare(found)
    assert "live" not in cattn.view_attention(weights, TOKENS, **arrays).to_html().split("<script")[1]


@needs_browser
def test_layers_grouped_heads_and_fewer_queries_than_keys(core: bytes, show: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, 4, 3, 8), np.float32)
    key, value = rng.standard_normal((2, 2, 2, 6, 8), np.float32)
    weights = cattn.attention_weights(query, key, is_causal="lower_right", enable_gqa=True)
    cattn.view_attention(list(weights), TOKENS, query=query, key=key, value=value, live=True).save(tmp_path / "l.html")
    page = show(tmp_path / "l.html")
    for layer in (0, 1):
        found = page.evaluate(ASK, [{}, layer])
        numbers = np.array([float(text) for text in found["weights"]], np.float32)
        np.testing.assert_array_equal(numbers.reshape(weights.shape[1:]), weights[layer])
        compare(found)
    compare(page.evaluate(ASK, [{"method": "renormalize", "window": 2, "cells": ["0,1"]}, 1]))


def test_a_live_view_needs_what_it_computes_from(core: bytes) -> None:
    arrays = operands()
    query, key = arrays["query"], arrays["key"]
    weights = cattn.attention_weights(query, key)
    with pytest.raises(ValueError, match="live needs query and key"):
        cattn.view_attention(weights, live=True)
    with pytest.raises(ValueError, match="live has no option 'soft_cap': it takes is_causal"):
        cattn.view_attention(weights, query=query, key=key, live={"soft_cap": 3})
    with pytest.raises(
        ValueError, match="live: query, key, scale and the mask that the zeros show do not give these weights"
    ):
        cattn.view_attention(cattn.attention_weights(query, key, softcap=0.1), query=query, key=key, live=True)
    for name, wrong in (
        ("query_offset", np.array([1, 2])), ("query_offset", 1.5), ("window_size", 3), ("softcap", "a"),
        ("alibi_slopes", [1, 2, 3]), ("sinks", "a"),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"{name} (must be|has shape|has dtype)"):
            cattn.view_attention(weights, query=query, key=key, live={name: wrong})
    for options, message in (
        ({"window_size": (2, 1)}, r"as many keys before a query as after it, got \(2, 1\)"),
        ({"attn_mask": np.zeros((6, 6))}, r"attn_mask must be of bool and of shape \(6, 6\), .* got float64 of shape"),
        ({"sinks": [1, 2, 3, 4]}, "one sink for all heads, got 4 different ones"),
    ):
        weights = cattn.attention_weights(query[None], key[None], **options)[0]
        with pytest.raises(ValueError, match=message):
            cattn.view_attention(weights, query=query, key=key, live=options)
    with pytest.raises(TypeError, match="live must be a bool or a mapping of options, got str"):
        cattn.view_attention(weights, query=query, key=key, live="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="live is for weights"):
        cattn.view_attention(cattn.attention_statistics(query, key), live=True)


@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["softcap", "alibi_slopes", "sinks", "query_offset", "window_size", "scale"])
def test_what_is_no_finite_number_is_refused_by_the_name_of_its_option(core: bytes, name: str, number: float) -> None:
    """Such a number would leave a blank page: JSON has none."""
    query, key, _ = operands().values()
    weights = cattn.attention_weights(query, key)
    given = {"alibi_slopes": [number] * 4, "sinks": [number] * 4, "window_size": (number, number)}.get(name, number)
    options = {"scale": given} if name == "scale" else {"live": {name: given}}
    with pytest.raises((TypeError, ValueError), match=f"^{name} must "):
        cattn.view_attention(weights, query=query, key=key, **options)


def test_a_page_is_never_written_with_what_json_does_not_have() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        _page.fill("title", {"options": {"sink": -np.inf}}, {}, (), "")


def test_without_the_core_the_error_says_how_to_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_page, "CORE", "no core.wasm")
    arrays = operands()
    weights = cattn.attention_weights(arrays["query"], arrays["key"])
    with pytest.raises(RuntimeError, match=r"pip install ziglang && python tools/live && pip install \.$"):
        cattn.view_attention(weights, **arrays, live=True)


# ---- the reader ------------------------------------------------------------------------------------------------------
@needs_browser
def test_the_mask_is_edited_by_pointer_and_keyboard(core: bytes, show: Any, tmp_path: Path) -> None:
    arrays = operands()
    weights = cattn.attention_weights(arrays["query"], arrays["key"], is_causal=True)
    cattn.view_attention(weights, TOKENS, **arrays, live=True).save(tmp_path / "live.html")
    page = show(tmp_path / "live.html")
    for group in ("Mask", "Scores"):
        page.locator("summary", has_text=group).click()
    page.get_by_role("button", name="Edit the mask").click()
    page.focus(".cattn-map")
    for key in ("PageDown", "End", "ArrowLeft", "Enter"):  # of the last query
        page.keyboard.press(key)
    until(page, "document.getElementById('view').live.options.cells.includes('5,4')")
    until(page, "document.querySelector('.cattn-status').textContent.includes('hidden by hand, in all heads')")
    for key in ("ArrowUp", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    until(page, "document.querySelector('.cattn-status').textContent.includes('hidden: it comes later')")
    page.get_by_role("button", name="Done").click()
    page.get_by_role("slider", name="temperature").fill("2")
    page.get_by_role("slider", name="softcap").press("ArrowRight")
    page.get_by_label("masked by").select_option("renormalize")
    until(page, "document.getElementById('view').live.layers[0].options.method === 'renormalize'")
    page.get_by_text("The program").click()
    until(page, "document.querySelector('pre').textContent.includes('renormalize')")
    variables: dict[str, Any] = {}
    exec(page.inner_text("pre"), variables)
    mask = np.tri(6, dtype=bool)
    mask[5, 4] = False
    biased = cattn.attention_weights(arrays["query"], arrays["key"], scale=8**-0.5 / 2, softcap=1.0, stage="bias")
    np.testing.assert_array_equal(variables["weights"][0], cattn.masked_softmax(biased, mask, method="renormalize"))
    page.get_by_role("button", name="Start again").click()
    until(page, "document.getElementById('view').live.layers[0].options.method === 'neg_inf'")
    numbers = [float(text) for text in page.evaluate(ASK, [{}, 0])["weights"]]
    np.testing.assert_array_equal(np.array(numbers, np.float32).reshape(weights.shape), weights)


@needs_browser
def test_a_query_without_keys_says_so_and_the_steps_write_out_the_score(core: bytes, show: Any, tmp_path: Path) -> None:
    arrays = operands(heads=1)
    weights = cattn.attention_weights(arrays["query"], arrays["key"], is_causal=True)
    cattn.view_attention(weights, TOKENS, **arrays, live=True).save(tmp_path / "live.html")
    page = show(tmp_path / "live.html")
    page.get_by_role("button", name="step by step").click()
    page.locator(".cattn-steps tbody tr").nth(2).click()
    q = page.evaluate("() => document.getElementById('view').live.view.at.q")
    until(page, "document.querySelectorAll('.cattn-terms').length === 2")
    terms, score = page.locator(".cattn-terms").first.inner_text().replace("−", "-").split(" = ")
    products = [[float(x.strip("()")) for x in term.split(" × ")] for term in terms.split(" + ")]
    np.testing.assert_allclose(products, np.transpose([arrays["query"][0, q], arrays["key"][0, 2]]), atol=6e-3)
    right = arrays["query"][0, q] @ arrays["key"][0, 2]
    assert float(score) == pytest.approx(right, abs=6e-4)
    line = page.locator(".cattn-terms").last.inner_text().replace("−", "-")
    assert f"{right:.3f} / √8 = {right / 8**0.5:.3f}, " in line
    assert line.endswith(f"/ sum = {weights[0, q, 2]:.3f}")
    page.evaluate("() => { const { live } = document.getElementById('view'); live.toggle(0, 0); live.update(); }")
    page.evaluate("() => { const { live } = document.getElementById('view'); live.look([0, 0], 0, 0); }")
    until(page, "document.querySelector('.cattn-status').textContent.includes('this query sees no key')")
    assert "sees no key: all its weights are 0" in page.inner_text(".cattn-steps")


# ---- the page as a lesson --------------------------------------------------------------------------------------------
@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_the_first_screen_shows_title_sentence_text_next_word_and_map(
    show: Any, page_file: Path, width: int, theme: str
) -> None:
    assert page_file.stat().st_size <= 600_000
    page = show(page_file, viewport={"width": width, "height": 800}, color_scheme=theme)
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    words = ["Attention, live", "Each word asks: which earlier words matter to me?", "Next word:"]
    parts = [page.get_by_text(text).first for text in words]
    for part in (*parts, page.locator("#sentence"), page.locator(".cattn-text").first, page.locator(".cattn-map")):
        box = part.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] <= 800
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    assert page.locator("details[open]").count() == 0
    now = page.evaluate(
        "() => { const { view, source } = document.getElementById('view').live; return [source.tokens[view.at.q], "
        "view.current.at(view.at.q, view.at.k), view.at.q !== view.at.k] }"
    )
    assert now[0].strip().isalpha()
    assert now[1] > 0.3
    assert now[2]


ANSWERS = {  # the control that answers the question of a step, the keys that move it, and a part of the answer
    "query and key": ("word", ["ArrowLeft"], "its largest"),
    "scale": ("temperature", ["End"], "stays first"),
    "mask": ("causal", [" "], "no word stands after the last one"),
    "softmax": ("temperature", ["Home"], "Cold"),
    "dropout": ("dropout", ["ArrowRight"] * 5, "Each of the others is divided by 1 − 0.5"),
    "output": ("window", ["ArrowRight"], "Its own value, number for number"),
}


@needs_browser
def test_each_step_is_read_and_answered_by_keyboard_alone(show: Any, page_file: Path) -> None:
    page = show(page_file)
    groups = page.locator(".cattn-controls label").count()
    page.focus("#sentence")
    for number, (name, (control, keys, answer)) in enumerate(ANSWERS.items(), 1):
        while page.evaluate("() => document.activeElement.textContent") != f"{number} {name}":
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        until(page, f"document.querySelector('[aria-current]')?.textContent === '{number} {name}'")
        assert page.url.endswith(f"#step={number}")
        while page.evaluate("() => document.activeElement.name || ''") != control:
            page.keyboard.press("Tab")
        assert page.inner_text(".cattn-step > output") == ""
        for key in keys:
            page.keyboard.press(key)
        until(page, f"document.querySelector('.cattn-step > output').textContent.includes({json.dumps(answer)})")
        page.keyboard.press("Shift+Tab")
        while page.evaluate("() => document.activeElement.tagName") != "A":
            page.keyboard.press("Shift+Tab")
        page.keyboard.press("Shift+Tab")
    page.get_by_role("button", name="End the story").click()
    assert page.locator(".cattn-controls label").count() == groups
    page.get_by_role("link", name="3 mask").click()
    page.get_by_role("button", name="numbers").click()
    assert page.locator(".cattn-controls label").count() == groups
    page.get_by_role("button", name="a sentence").click()
    page.get_by_role("link", name="6 output").click()
    page.get_by_role("button", name="End the story").click()
    assert page.evaluate("() => document.activeElement.textContent") == "6 output"
    assert page.evaluate("() => document.getElementById('view').live.options.window") == 0


@needs_browser
def test_a_link_opens_a_step_or_what_was_shown(show: Any, page_file: Path, browser: Any) -> None:
    page = show(page_file)
    page.fill("#sentence", "Your journey starts with one step & <b>")
    page.evaluate(
        """() => {
            const { live } = document.getElementById("view");
            const { slopes } = live;
            Object.assign(live.options, { temperature: 0.5, causal: false, sink: 1.5, cells: ["2,1", "4,0"], slopes });
            live.showOptions();
            live.padding.input.value = 2;
            live.setStage("dropped");
            live.update();
            live.look([1, 2], 5, 3);
        }"""
    )
    shown = """() => {
        const { live } = document.getElementById("view");
        return [live.options, live.source.text, live.stage, live.view.chosen, live.view.at, live.padding.input.value];
    }"""
    state, link = page.evaluate(shown), page.evaluate("() => document.getElementById('view').live.link")
    again = browser.new_page()
    again.goto(link)
    until(again, "document.getElementById('view').live")
    assert again.evaluate(shown) == state
    again.goto(f"{page_file.as_uri()}#step=3")
    until(again, "document.querySelector('[aria-current]')?.textContent === '3 mask'")
    again.goto(
        f"{page_file.as_uri()}#stage=constructor&temperature=1e999&softcap=abc&seed=-3&method=x&head=9,9&at=999,0"
        "&cells=%3Cb%3E,5e9&form=steps&padding=99&input=toString"
    )
    until(again, "document.getElementById('view').live.view.form === 'steps'")
    options, _, stage, chosen, _, padding = again.evaluate(shown)
    assert (stage, padding) == ("weights", "8")
    assert chosen in ([[0, 0]], [[1, 0]])  # a head that has a name
    assert options["method"] == "neg_inf"
    assert all(0 <= options[name] <= 20 for name in ("temperature", "softcap", "seed"))
    assert again.evaluate(f"() => {PROBLEM}") == ""
    again.close()


@needs_browser
def test_the_focus_stays_on_the_next_word(show: Any, page_file: Path) -> None:
    page = show(page_file)
    for _ in range(2):
        before = page.input_value("#sentence")
        page.locator("p.cattn-next button").first.focus()
        page.keyboard.press("Enter")
        until(page, f"document.getElementById('view').live.source.text !== {json.dumps(before)}")
        assert page.evaluate("() => document.activeElement === document.querySelector('p.cattn-next button')")


@needs_browser
def test_a_screen_reader_finds_the_parts_by_name(show: Any, page_file: Path) -> None:
    page = show(page_file)
    tree = page.locator("body").aria_snapshot()
    for line in (
        'heading "Attention, live" [level=1]', 'textbox "A sentence of at most 128 tokens, which a tiny GPT reads"',
        'navigation "attention in six steps"', 'link "3 mask"', 'group "stage"', 'grid "heads"', 'application "layer',
        "group: Mask which words a word may see", "group: Scores how sharply a word chooses",
    ):  # fmt: skip
        assert line in tree, tree
    for group in ("Mask", "Scores", "Dropout"):
        page.locator("summary", has_text=group).click()
    named = "node.labels?.length || node.textContent.trim() || node.getAttribute('aria-label')"
    every = "document.querySelectorAll('input, select, textarea, button, a')"
    assert page.evaluate(f"() => [...{every}].filter((node) => !({named})).length") == 0


@needs_browser
def test_padding_changes_no_bit_and_hostile_text_does_no_harm(show: Any, page_file: Path) -> None:
    page = show(page_file)
    for text in (
        "<img src=x onerror=alert(1)></script><b>&amp;",
        "\U0001f642\u202e\x00\ud83d e\u0301",
        "",
        " \n\t ",
        "word " * 2000,
    ):
        page.fill("#sentence", text.encode("utf-8", "surrogatepass").decode("utf-8", "replace"))
        page.evaluate("() => new Promise(requestAnimationFrame)")
        assert (
            page.evaluate(
                "() => document.querySelectorAll('.cattn-live img, .cattn-live b:not(:is(output, summary) b)').length"
            )
            == 0
        )
        sizes = page.evaluate("() => document.getElementById('view').live.source.sizes")
        assert 1 <= sizes["T_q"] <= 128
    assert "The model reads 128 tokens" in page.inner_text("[role=alert]")
    page.fill("#sentence", "The cat sat on the mat.")
    rows = []
    for pads in (0, 5):
        page.evaluate("(pads) => { document.getElementById('view').live.padding.input.value = pads }", pads)
        found = page.evaluate(ASK, [{}, 1])
        tokens = page.evaluate("() => document.getElementById('view').live.source.sizes.T_q")
        weights = np.array([float(x) for x in found["weights"]], np.float32).reshape(-1, tokens, tokens)
        rows.append((weights[:, pads:, pads:], np.array(found["output"]).reshape(len(weights), tokens, -1)[:, pads:]))
    np.testing.assert_array_equal(rows[0][0], rows[1][0])
    assert (rows[0][1] == rows[1][1]).all()


@needs_browser
def test_numbers_are_read_as_numpy_prints_them(show: Any, page_file: Path) -> None:
    page = show(page_file)
    page.locator("summary", has_text="Scores").click()
    page.get_by_role("checkbox", name="ALiBi").click()  # of four heads
    page.get_by_role("button", name="numbers").click()
    x = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    for text in (repr(x), str(x.tolist()), "\n".join(" ".join(map(repr, row)) for row in x.tolist())):
        page.fill("#numbers-query", text)
        until(page, "document.getElementById('view').live.source.sizes.T_q === 5")
        found = page.evaluate(ASK, [{}, 0])
        compare(found)


def printed(x: np.ndarray) -> list[str]:
    """Return a matrix as NumPy and Python print it, as lines, and as tables have it."""
    rows = [list(map(str, row)) for row in x]
    texts = ["\n".join(separator.join(row) for row in rows) for separator in (" ", "\t", ",", " , ", ";")]
    return [repr(x), str(x.tolist()), f"tensor({x.tolist()}, dtype=torch.float64)", *texts]


@needs_browser
def test_numbers_are_read_whole_or_refused_with_a_sentence(show: Any, page_file: Path) -> None:
    page = show(page_file)
    page.get_by_role("button", name="numbers").click()
    x = np.random.default_rng(0).standard_normal((3, 14)).astype(np.float32)  # NumPy breaks rows that are so long
    x[0, :6] = -np.inf, np.inf, -0.0, 5, 1e21, np.nan
    for text in printed(x):
        page.fill("#numbers-query", "0")
        until(page, "document.getElementById('view').live.source.sizes.D === 1")
        page.fill("#numbers-query", text)
        until(page, f"document.getElementById('view').live.source.sizes.D === 14 || {PROBLEM}")
        assert page.evaluate(f"() => {PROBLEM}") == ""
        arrays = "document.getElementById('view').live.layers[0].arrays"
        code = f"() => Array.from({arrays}.query, (x) => Object.is(x, -0) ? '-0' : String(x))"
        numbers = np.float32([float(number) for number in page.evaluate(code)]).reshape(x.shape)
        np.testing.assert_array_equal(numbers, x, text)
        np.testing.assert_array_equal(np.signbit(numbers), np.signbit(x))
    for text, sentence in {
        "1 2\n3": "query: row 1 has 1 numbers, row 0 has 2",
        "1 two": "query: “two” is not a number",
        "1,,2": "query: “1,,2” lacks a number beside a separator",
        "1,2,": "query: “1,2,” lacks a number beside a separator",
        "[[1, 2],, [3, 4]]": "query: “, [3, 4” lacks a number beside a separator",
        "1,5 0": "query: “1,5 0” mixes separators; write 1.5 with a point, and spaces or commas between numbers",
        "1,5;0": "query: “1,5;0” mixes separators; write 1.5 with a point, and spaces or commas between numbers",
        "0x10 1": "query: “0x10” is not a number",
        "1e 2": "query: “1e” is not a number",
        "[[1. 2.]\n ...\n [3. 4.]]": "query: “...” is not a number",
        "array([])": "query has no numbers",
        " \n ": "query has no numbers",
    }.items():
        page.fill("#numbers-query", text)
        until(page, f"{PROBLEM} === {json.dumps(sentence)}")


@needs_browser
def test_the_page_runs_the_model_as_numpy_does(show: Any, page_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import small_gpt

    model, pieces = small_gpt.load(ROOT / "docs" / "live_gpt.npz")
    page = show(page_file)
    for text in ("The cat sat on the mat. The cat", "naïve “quotes” 🙂 <b>", "x = 3.14\n\tif y: pass"):
        page.fill("#sentence", text)
        until(page, f"document.getElementById('view').live.source.text === {json.dumps(text)}")
        ids = pieces.encode(text)
        saved: list[Any] = []
        logits = model(ids, saved=saved)[-1]
        assert page.evaluate("() => document.getElementById('view').live.source.ids") == ids
        for layer, (_, _, query, key, value, *_) in enumerate(saved[:-1]):
            for name, right in (("query", query), ("key", key), ("value", value)):
                code = f"() => Array.from(document.getElementById('view').live.layers[{layer}].arrays.{name}, String)"
                numbers = np.array([float(number) for number in page.evaluate(code)], np.float32)
                np.testing.assert_array_equal(numbers, right.ravel())
        found = page.evaluate("() => Array.from(document.getElementById('view').live.source.logits, String)")
        np.testing.assert_array_equal(np.array([float(number) for number in found], np.float32), logits)


@needs_browser
def test_a_stage_that_is_too_large_is_refused_with_a_sentence(
    core: bytes, show: Any, page_file: Path, tmp_path: Path
) -> None:
    """Before the core is asked: 2^30 numbers have 2^32 bytes, which WebAssembly counts from 0 again."""
    page = show(page_file)
    page.get_by_role("button", name="numbers").click()
    until(page, "document.getElementById('view').live.source.name === 'numbers'")
    write = """(text) => {
        const input = document.getElementById("numbers-query");
        input.value = text;
        input.dispatchEvent(new Event("input"));
    }"""
    page.evaluate(write, "1 " * 10**6)
    until(page, f"{PROBLEM} === 'query has 1,000,000 numbers, of at most 131,072 that this page reads'")
    page.evaluate(write, "1\n" * 2**12)
    shown = "4096 × 4096 numbers, of at most 4,194,304 that a stage shows."
    until(page, f"{PROBLEM} === 'There are too many tokens: {shown}'")
    page.get_by_role("button", name="output").click()  # it would fit
    page.evaluate("() => new Promise(requestAnimationFrame)")
    until(page, f"{PROBLEM} === 'There are too many tokens: {shown}'")
    call = """(length) => {
        const { core } = document.getElementById("view").live;
        try { return core.gelu({ length }).length; } catch (error) { return error.message; }
    }"""
    for length in (2**29 - 2, 2**30 - 2, 2**30 - 1, 2**30, 2**31, 2**52):
        assert page.evaluate(call, length) == "there is not enough memory for so many tokens"
    page.evaluate(write, "1 2\n3 4")
    until(page, f"{PROBLEM} === ''")
    compare(page.evaluate(ASK, [{}, 0]))

    query, key = np.ones((2**12, 2), np.float32), np.ones((2, 2), np.float32)
    weights = np.full((1, 2**12, 2), 0.5, np.float32)
    value = np.ones((2, 2048), np.float32)  # the output is larger than the weights
    cattn.view_attention(weights, query=query, key=key, value=value, live=True).save(tmp_path / "long.html")
    page = show(tmp_path / "long.html")
    row = """(stage) => {
        const { live } = document.getElementById("view");
        try { return Array.from(live.row([0, 0], stage, 5)); } catch (error) { return error.message; }
    }"""
    too_many = "There are too many tokens: 4096 × 2048 numbers, of at most 4,194,304 that a stage shows."
    assert page.evaluate(row, "output") == too_many
    assert page.evaluate(row, "weights") == [0.5, 0.5]
    page.get_by_role("button", name="step by step").click()
    until(page, f"document.querySelector('.cattn-steps').textContent.includes({json.dumps(too_many)})")


@needs_browser
def test_a_word_of_20_000_letters_is_read_at_once(show: Any, page_file: Path) -> None:
    """Its tokens are Python's; merging pair after pair through the whole word took half a minute."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        import small_gpt
    finally:
        sys.path.remove(str(ROOT / "examples"))
    pieces = small_gpt.load(ROOT / "docs" / "live_gpt.npz")[1]
    page = show(page_file)
    letters = np.random.default_rng(0).choice(list("etaoinshrdlu"), 20000)
    encode = "(text) => document.getElementById('view').live.source.tokenizer.encode(text)"
    for text in ("".join(letters), "a" * 20000, "of" * 10000, "é" * 10000, " " * 20000):
        assert page.evaluate(encode, text[:999]) == pieces.encode(text[:999])
        time = f"(text) => {{ const start = performance.now(); ({encode})(text); return performance.now() - start; }}"
        assert page.evaluate(time, text) < 1000
    page.evaluate(
        """(text) => {
            const { live } = document.getElementById("view");
            live.source.input.value = text;
            live.update();
        }""",
        text,
    )
    assert "The model reads 128 tokens: the text has 20000," in page.evaluate(f"() => {PROBLEM}")
    assert "at most 128 tokens" in page.inner_text("label[for=sentence]")
