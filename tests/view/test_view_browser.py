"""Saved views in a browser: numbers, pointer, keyboard, touch, themes and width; no page loads anything else."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import ml_dtypes
import numpy as np
import pytest

import cattn
from cattn import _view
from support import ROOT
from support.processes import Tab, chromium, needs_browser

pytestmark = needs_browser

TOKENS = ["Your", "journey", "starts", "with", "one", "step"]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """A function that saves a view and opens it; at the end, nothing was fetched and nothing went wrong."""
    tabs = []

    def open_view(view: cattn.AttentionView | str, **options: Any) -> Any:
        path = tmp_path / "attention.html"
        if isinstance(view, str):
            path.write_text(view, "utf-8")
        else:
            view.save(path)
        tab = Tab(browser, **options)
        tabs.append((tab, path))
        return tab.open(path)

    yield open_view
    for tab, path in tabs:
        assert [url for url in tab.requests if url != path.as_uri() and not url.startswith("data:")] == []
        assert tab.problems == []
        tab.context.close()


def weights_of(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((*shape, 4))
    return cattn.attention_weights(x, x, is_causal=True).astype(dtype)


@pytest.fixture
def from_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views open at the first head and the last token."""
    monkeypatch.setattr(_view.Weights, "interesting", lambda _: ([0, 0], -1, -1))


def frame(page: Any) -> None:
    """Wait until the page has drawn what the last event changed."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def number(text: str, dtype: Any) -> Any:
    """Return the number that the page shows, in the array's dtype."""
    return np.float64(text).astype(dtype)


def status(page: Any) -> SimpleNamespace:
    frame(page)
    element = page.locator(".cattn-status")
    data = element.evaluate("node => ({...node.dataset})")
    return SimpleNamespace(
        text=element.inner_text(), query=int(data["query"]), key=int(data["key"]), value=data.get("value", "")
    )


def chips(page: Any, lane: int) -> list[str]:
    """Return the numbers of a lane: 0 holds the keys, 1 the queries."""
    labels = (
        page.locator(".cattn-lane")
        .nth(lane)
        .locator(".cattn-chip")
        .evaluate_all("nodes => nodes.map(node => node.getAttribute('aria-label'))")
    )
    return [label.rpartition(", ")[2] for label in labels]


def chip(page: Any, lane: int, at: int) -> Any:
    return page.locator(".cattn-lane").nth(lane).locator(f"[data-at='{at}']")


# ---- numbers ---------------------------------------------------------------------------------------------------------
@pytest.mark.promise("views")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_the_page_shows_the_numbers_of_the_array(show: Open, dtype: Any) -> None:
    weights = weights_of(2, 6, dtype=dtype)
    weights[1, 5, 2] = np.finfo(np.float16).smallest_subnormal
    page = show(cattn.view_attention(weights, TOKENS))
    for head in range(2):
        page.get_by_role("gridcell", name=f"head {head}").click()
        for at in range(6):
            chip(page, 1, at).hover()
            frame(page)
            np.testing.assert_array_equal([number(text, dtype) for text in chips(page, 0)], weights[head, at])
            np.testing.assert_array_equal([number(text, dtype) for text in chips(page, 1)], weights[head, :, at])


def test_the_shortest_decimal_is_shown(show: Open) -> None:
    """As NumPy prints the number."""
    weights = np.array([[0.1, 0.3, 2 / 3], [1, 1e-7, 1.5e-42]], np.float32)
    page = show(cattn.view_attention(weights, query_tokens=["a", "b"], tokens=["x", "y", "z"]))
    seen = []
    for at in range(2):
        chip(page, 1, at).hover()
        frame(page)
        seen.append(chips(page, 0))
    assert seen[0] == ["0.1", "0.3", "0.6666667"]
    assert [number(text, np.float32) for text in seen[1]] == list(weights[1])


def test_a_cell_under_the_pointer_is_named_with_its_weight(show: Open) -> None:
    weights = weights_of(1, 3)
    page = show(cattn.view_attention(weights, TOKENS[:3]))
    box = page.locator(".cattn-map canvas").first.bounding_box()
    seen = {}
    for x in np.arange(60, box["width"], 31):
        for y in np.arange(40, box["height"], 31):
            page.mouse.move(box["x"] + x, box["y"] + y)
            now = status(page)
            seen[now.query, now.key] = now
    assert {(q, k) for q in range(3) for k in range(3)} <= set(seen)
    for (q, k), now in seen.items():
        assert number(now.value, np.float32) == weights[0, q, k]
        assert f"query “{TOKENS[q]}” ({q}) → key “{TOKENS[k]}” ({k}): {'hidden' if k > q else now.value}" in now.text


def test_thumbnails_have_the_colours_of_the_scale(show: Open) -> None:
    """Zeros are blank, larger weights are darker on a light page, and NaN is red."""
    weights = np.array([[1, 0, 0], [0.25, 0.75, 0], [np.nan, 0.5, 0.5]], np.float32)
    page = show(cattn.view_attention(np.stack([weights, weights])))
    read = "node => Array.from(node.getContext('2d').getImageData(0, 0, 3, 3).data)"
    pixels = np.array(page.locator(".cattn-head canvas").first.evaluate(read)).reshape(3, 3, 4)
    light = pixels[..., :3].sum(-1)
    assert (pixels[..., 3] == 255).all()
    assert (pixels[[0, 0, 1], [1, 2, 2]] == [0xE9, 0xEB, 0xEE, 255]).all()
    assert pixels[2, 0].tolist() == [0xC8, 0x10, 0x2E, 255]
    assert light[0, 0] < light[1, 1] < light[2, 1] < light[1, 0]


def test_differences_are_exact(show: Open) -> None:
    weights = weights_of(3, 6)
    page = show(cattn.view_attention(weights, TOKENS))
    page.get_by_role("gridcell", name="head 2").click()
    page.get_by_role("button", name="Compare two heads").click()
    page.get_by_role("gridcell", name="head 0").click()
    assert page.locator(".cattn-title").inner_text() == "head 2 − head 0"
    wanted = weights[2].astype(np.float64) - weights[0]
    for at in range(6):
        chip(page, 1, at).hover()
        frame(page)
        np.testing.assert_array_equal([float(text) for text in chips(page, 0)], wanted[at])
    now = status(page)
    parts = [number(text, np.float32) for text in re.findall(r"[\d.e-]+(?= [−=])", now.text.partition(": ")[2])]
    assert parts == [weights[2, 5, 5], weights[0, 5, 5]]
    page.get_by_role("button", name="Stop comparing").click()
    assert page.locator(".cattn-title").inner_text() == "head 2"


def test_scores_get_two_colours_and_hidden_ones_are_blank(show: Open) -> None:
    x = np.random.default_rng(0).standard_normal((6, 4))
    scores = cattn.attention_weights(x, x, is_causal=True, stage="mask")
    page = show(cattn.view_attention(scores, TOKENS))
    chip(page, 1, 3).hover()
    frame(page)
    np.testing.assert_array_equal([float(text) for text in chips(page, 0)], scores[3])
    assert chip(page, 0, 5).evaluate("node => node.style.background") == ""


@pytest.mark.parametrize("logarithmic", [False, True])
def test_the_scale_can_be_chosen(show: Open, logarithmic: bool) -> None:
    weights = np.array([[1, 0.1, 0.01]])
    page = show(cattn.view_attention(weights))
    page.get_by_role("button", name="log" if logarithmic else "linear").click()
    reds = (
        chip(page, 0, 0)
        .locator("xpath=..")
        .locator(".cattn-chip")
        .evaluate_all("nodes => nodes.map(node => getComputedStyle(node).backgroundColor)")
    )
    wanted = [1, 1 - 1 / 4, 1 - 2 / 4] if logarithmic else [1, 0.1, 0.01]
    table = _light_colours()
    assert reds == [table[int(part * 255 + 0.5)] for part in wanted]


def _light_colours() -> list[str]:
    """Return the colours of the light scale: nine stops, linear in between."""
    hexes = ["ffffd9", "edf8b1", "c7e9b4", "7fcdbb", "41b6c4", "1d91c0", "225ea8", "253494", "081d58"]
    stops = np.array([list(bytes.fromhex(text)) for text in hexes])
    places = np.arange(256) / 255 * 8
    colours = np.stack([np.interp(places, range(9), stops[:, c]) for c in range(3)], -1)
    return [f"rgb({r}, {g}, {b})" for r, g, b in np.floor(colours + 0.5).astype(int)]


# ---- pointer, keyboard, touch ----------------------------------------------------------------------------------------
def test_a_click_pins_and_escape_lets_go(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(1, 6), TOKENS))
    chip(page, 1, 4).click()
    assert "pinned" in status(page).text
    chip(page, 1, 1).hover()
    assert status(page).query == 4
    page.keyboard.press("Escape")
    assert "pinned" not in status(page).text
    chip(page, 1, 2).hover()
    now = status(page)
    assert (now.query, now.key) == (2, 2)
    assert "pinned" not in now.text


@pytest.mark.usefixtures("from_the_first")
def test_the_keyboard_reaches_everything(show: Open) -> None:
    weights = weights_of(2, 3, 6)
    page = show(cattn.view_attention(weights, TOKENS, layers=["first", "second"]))
    page.locator(".cattn-head[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.locator(".cattn-title").inner_text() == "layer second, head 1"
    page.keyboard.press("Home")
    for _ in range(2):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    now = status(page)
    assert (now.query, now.key) == (3, 1)
    assert number(now.value, np.float32) == weights[1, 1, 3, 1]
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    focused = page.evaluate("() => document.activeElement.getAttribute('aria-label')")
    assert focused == "layer second, head 1"
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("c")
    assert page.locator(".cattn-title").inner_text() == "layer second, head 1 − layer second, head 0"
    page.keyboard.press("Escape")
    assert page.locator(".cattn-title").inner_text() == "layer second, head 1"


def test_the_text_is_walked_by_arrow_keys(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(1, 6), TOKENS))
    page.locator(".cattn-text").first.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    now = status(page)
    assert (now.query, now.key) == (1, 1)
    active = page.locator(".cattn-text").first.get_attribute("aria-activedescendant")
    assert page.locator(f"#{active}").get_attribute("data-at") == "1"


@pytest.mark.usefixtures("from_the_first")
def test_several_tokens_are_marked_and_summed(show: Open) -> None:
    weights = weights_of(1, 6)
    wanted = weights[0].astype(np.float64)
    page = show(cattn.view_attention(weights, TOKENS))
    chip(page, 0, 4).click()
    chip(page, 0, 5).click(modifiers=["Shift"])
    frame(page)
    np.testing.assert_allclose([float(text) for text in chips(page, 0)], wanted[4:6].sum(0), rtol=1e-6)
    page.locator(".cattn-text").last.focus()
    for key in ("Home", "Shift+ArrowRight", "Shift+ArrowRight"):  # of one query again, keys 0, 1 and 2
        page.keyboard.press(key)
    frame(page)
    assert page.locator(".cattn-lane").last.locator("[aria-selected]").count() == 3
    np.testing.assert_allclose([float(text) for text in chips(page, 1)], wanted[:, :3].sum(1), rtol=1e-6)
    chip(page, 0, 3).click(modifiers=["Shift"])
    now = status(page)
    assert "the sum is" in now.text
    assert float(now.value) == pytest.approx(wanted[[0, 3], :3].sum(), rel=1e-6)
    chip(page, 1, 2).click(modifiers=["Shift"])
    assert float(status(page).value) == pytest.approx(wanted[[0, 3], :2].sum(), rel=1e-6)
    page.keyboard.press("Escape")
    assert page.locator(".cattn-lane").first.locator("[aria-selected]").count() == 1
    page = show(cattn.view_attention(weights[:, 2:4], TOKENS, query_tokens=["a", "b"]))  # two texts
    chip(page, 0, 0).click()
    chip(page, 0, 1).click(modifiers=["Shift"])
    frame(page)
    np.testing.assert_allclose([float(text) for text in chips(page, 1)], wanted[2:4, :2].sum(1), rtol=1e-6)


@pytest.mark.usefixtures("from_the_first")
def test_zoom_keeps_the_numbers(show: Open) -> None:
    weights = weights_of(1, 40)
    page = show(cattn.view_attention(weights))
    page.locator(".cattn-map").focus()
    page.keyboard.press("End")
    for _ in range(3):
        page.keyboard.press("+")
    page.keyboard.press("ArrowUp")
    now = status(page)
    assert (now.query, now.key) == (38, 39)
    box = page.locator(".cattn-map canvas").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.keyboard.press("Escape")
    page.mouse.move(box["x"] + box["width"] / 2 - 3, box["y"] + box["height"] / 2)
    now = status(page)
    assert now.query >= 35
    assert number(now.value, np.float32) == weights[0, now.query, now.key]


def test_a_drag_zooms_into_a_rectangle(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(1, 60)))
    box = page.locator(".cattn-map canvas").first.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 0.6 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.8 * box["height"], steps=4)
    page.mouse.up()
    seen = set()
    for part in (0.2, 0.4, 0.6, 0.8):
        page.mouse.move(box["x"] + part * box["width"], box["y"] + part * box["height"])
        seen.add(status(page).query)
    assert min(seen) > 20
    page.get_by_role("button", name="show everything").click()
    page.locator(".cattn-map").focus()
    page.keyboard.press("Home")
    assert status(page).key == 0


def test_a_tap_selects(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(2, 6), TOKENS), has_touch=True, viewport={"width": 400, "height": 800})
    page.get_by_role("gridcell", name="head 1").tap()
    chip(page, 1, 2).tap()
    now = status(page)
    assert (now.query, now.key) == (2, 2)
    chip(page, 1, 4).tap()
    assert status(page).query == 4


# ---- the look --------------------------------------------------------------------------------------------------------
CONTRAST = """nodes => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (!colour.endsWith(", 0)")) return colour;
    }
  };
  return nodes.map(node => {
    const [a, b] = [light(getComputedStyle(node).color), light(back(node))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  });
}"""


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_it_is_legible_and_fits(show: Open, theme: str, width: int) -> None:
    view = cattn.view_attention(weights_of(4, 3, 6), TOKENS)
    page = show(view, color_scheme=theme, viewport={"width": width, "height": 800})
    assert page.locator(".cattn-view").get_attribute("data-theme") == theme
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    for at in range(6):
        chip(page, 1, at).hover()
        frame(page)
        words = ".cattn-chip, .cattn-view button, .cattn-view h2, .cattn-view h3, .cattn-status, .cattn-row > span"
        assert min(page.locator(words).evaluate_all(CONTRAST)) >= 4.5  # WCAG AA


def test_the_theme_follows_the_page(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(2, 6), TOKENS))
    assert page.locator(".cattn-view").get_attribute("data-theme") == "light"
    page.evaluate("() => { document.body.style.background = '#101010'; document.body.style.color = '#eee'; }")
    page.wait_for_selector(".cattn-view[data-theme='dark']")
    page.evaluate("() => { document.body.style.background = 'white'; }")
    page.wait_for_selector(".cattn-view[data-theme='light']")


@pytest.mark.usefixtures("from_the_first")
def test_screen_readers_get_names(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(2, 3, 6), TOKENS))
    assert page.get_by_role("grid", name="heads").get_by_role("gridcell").count() == 6
    assert page.get_by_role("gridcell", name="entry 1, head 2").count() == 1
    assert page.get_by_role("gridcell", selected=True).get_attribute("aria-label") == "entry 0, head 0"
    assert "6 queries, 6 keys" in page.locator(".cattn-map").get_attribute("aria-label")
    chip(page, 1, 1).hover()
    frame(page)
    assert page.get_by_role("listbox", name="Keys that query “journey” (1) looks at").count() == 1
    assert page.get_by_role("option", selected=True).count() == 2


def test_tokens_are_text_and_never_code(show: Open) -> None:
    tokens = ["</script><b>x", "<!--", "\u2028", "&amp;", "\n", " a", "", "שלום", "'\"`${1}"]
    page = show(cattn.view_attention(weights_of(1, 9), tokens))
    texts = page.locator(".cattn-lane").first.locator("bdi").all_inner_texts()
    assert texts[0] == "</script><b>x"
    assert texts[3] == "&amp;"
    assert texts[4:8] == ["↵", "·a", "∅", "שלום"]
    assert texts[8] == tokens[8]


# ---- what it opens with, and the other forms -------------------------------------------------------------------------
def test_it_opens_at_the_sharpest_head_and_its_largest_weight_off_the_diagonal(show: Open) -> None:
    weights = np.stack([np.tril(np.full((6, 6), 0.2))] * 3).astype(np.float32)
    weights[1, 4, 1] = weights[1, 3, 3] = 0.9
    page = show(cattn.view_attention(weights, TOKENS, title="My <model>"))
    assert page.locator(".cattn-title").inner_text() == "head 1"
    now = status(page)
    assert (now.query, now.key, now.value) == (4, 1, "0.9")
    assert page.locator("h1").inner_text() == "My <model>"
    assert page.locator(".cattn-hint").first.inner_text().startswith("Point at a token")


def test_byte_pair_tokens_are_text(show: Open) -> None:
    for tokens, shown in (
        (["The", "Ġca", "fÃ©", "Ċ", "âĤ¬"], ["The", "·ca", "fé", "↵", "€"]),
        (["▁The", "▁ca", "fé", "<0x0A>", "x"], ["·The", "·ca", "fé", "<0x0A>", "x"]),
        (["The", "Ã©", "x", "y", "z"], ["The", "Ã©", "x", "y", "z"]),
        (["x▁", "a▁b", "▁", "y", "z"], ["x·", "a b", "·", "y", "z"]),
        (["Ġthe", "▁", "x", "y", "Ā"], ["·the", "·", "x", "y", "␀"]),
    ):
        page = show(cattn.view_attention(weights_of(1, 5), tokens))
        assert page.locator(".cattn-lane").first.locator("bdi").all_inner_texts() == shown


def test_lines_join_the_tokens_that_look_at_each_other(show: Open) -> None:
    weights = np.array([[1, 0, 0], [0.25, 0.75, 0], [0.002, 0.9, 0.098]], np.float32)
    page = show(cattn.view_attention(weights, list("abc")))
    page.get_by_role("button", name="lines").click()
    assert page.locator(".cattn-lines line").count() == 5  # and not the one of 0.002
    page.locator(".cattn-lines text[data-kind='query'][data-at='1']").click()
    assert status(page).query == 1
    assert page.locator(".cattn-lines .cattn-marked").all_text_contents() == ["b", "b"]


ODD = [
    "\0",
    "\x1b[0m",
    "\ud800x",
    "\ufffe",
    "a\u202eb\u2066",
    "</svg><b>&",
    "long" * 400,
    chr(0x1FFFF),
    "\x7f\x85",
    "\n\t",
]
SHOWN = ["␀", "␛[0m", "�x", "�", "a�b�", "</svg><b>&", "long" * 24 + "lon…", "�", "␡�", "↵→"]


@pytest.mark.parametrize("bytes_as_letters", [False, True])
def test_pictures_of_any_token_can_be_read(show: Open, tmp_path: Path, bytes_as_letters: bool) -> None:
    tokens = [*ODD[:-1], "Ċ" if bytes_as_letters else ODD[-1]]
    page = show(cattn.view_attention(np.tri(10) / np.arange(1, 11)[:, None], tokens, layers=["a\0"], title="a\x01"))
    shown = page.locator(".cattn-lane").first.locator("bdi").all_text_contents()
    assert shown == [*SHOWN[:-1], "↵" if bytes_as_letters else SHOWN[-1]]
    for form in ("map", "lines"):
        page.get_by_role("button", name=form).click()
        for kind in ("PNG", "SVG"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"save as {kind}").click()
            file = tmp_path / download.value.suggested_filename
            download.value.save_as(file)
            if kind == "PNG":
                assert file.read_bytes().startswith(b"\x89PNG")
                continue
            names = [node.text for node in ElementTree.parse(file).iter() if node.tag.endswith("}text")]
            assert set(SHOWN[:6]) <= set(names)
            cut = {name for name in names if name.startswith("long")}
            assert cut
            assert all(name.endswith("…") and len(name) < 40 for name in cut)


def test_a_picture_that_cannot_be_drawn_is_said(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(1, 6), TOKENS))
    page.get_by_role("button", name="lines").click()
    page.evaluate("() => { window.Image = class { set src(_) { this.onerror(); } }; }")
    page.get_by_role("button", name="save as PNG").click()
    assert "save it as SVG" in page.locator(".cattn-status").inner_text()


@pytest.mark.usefixtures("from_the_first")
def test_keys_move_in_every_form_after_a_click(show: Open) -> None:
    page = show(cattn.view_attention(weights_of(1, 6), TOKENS))
    zoom = page.get_by_role("button", name="zoom in")
    assert zoom.is_visible()
    for form, click in (
        ("step by step", ".cattn-steps tbody tr >> nth=2"),
        ("lines", ".cattn-lines text[data-at='2']"),
    ):
        page.get_by_role("button", name=form).click()
        assert not zoom.is_visible()
        page.keyboard.press("Home")  # after the click on the button
        before = status(page)
        assert before.key == 0
        page.locator(click).first.click()
        assert "pinned" in status(page).text
        now = status(page)
        page.keyboard.press("ArrowRight" if form == "lines" else "ArrowDown")
        assert status(page).key == now.key + 1
        page.keyboard.press("ArrowUp" if form == "lines" else "ArrowLeft")
        assert status(page).query == now.query - 1
        page.keyboard.press("Escape")
        assert "pinned" not in status(page).text
    page.get_by_role("button", name="step by step").click()
    headings = page.locator(".cattn-steps thead th").all_inner_texts()
    assert headings == ["key", "score", "masked", "weight", "after dropout", ""]
    slider = page.get_by_label("temperature")
    slider.focus()
    before = status(page)
    page.keyboard.press("ArrowRight")
    assert (status(page).key, slider.input_value()) == (before.key, "1.1")


def test_rows_that_do_not_sum_to_1_are_said(show: Open) -> None:
    page = show(cattn.view_attention(np.tri(6), TOKENS))
    assert page.locator(".cattn-note").inner_text().startswith("Rows do not sum to 1")
    page = show(cattn.view_attention(weights_of(2, 6), TOKENS))
    assert page.locator(".cattn-note").count() == 0


def column(page: Any, at: int) -> list[str]:
    return page.locator(".cattn-steps tbody tr").evaluate_all(f"rows => rows.map(row => row.cells[{at}].textContent)")


@pytest.mark.parametrize("given", [False, True])
def test_the_steps_lead_from_scores_to_the_output(show: Open, given: bool) -> None:
    query, key, value = np.random.default_rng(1).standard_normal((3, 2, 6, 4))
    weights = cattn.attention_weights(query, key, is_causal=True)
    operands = {"query": query, "key": key, "value": value} if given else {}
    page = show(cattn.view_attention(weights, TOKENS, **operands))
    page.get_by_role("button", name="step by step").click()
    page.get_by_role("gridcell", name="head 1").click()
    chip(page, 1, 3).click()
    frame(page)
    exact = [f"{x:.3f}" for x in weights[1, 3, :4]]
    assert column(page, 3) == [*exact, "hidden", "hidden"]
    if given:
        scores = query[1, 3] @ key[1].T / 2
        assert column(page, 1) == [f"{x:.3f}" for x in scores]
        assert column(page, 2)[4:] == ["−∞", "−∞"]
        output = page.locator(".cattn-output p").last.inner_text().partition(": weights × values ")[2]
        np.testing.assert_allclose([float(x) for x in output.split()], weights[1, 3] @ value[1], atol=6e-4)
        products = page.locator(".cattn-products span").evaluate_all("nodes => nodes.map(node => node.title)")
        np.testing.assert_allclose([float(x.split()[-1]) for x in products], query[1, 3] * key[1, 3], atol=6e-5)
    page.get_by_label("temperature").fill("2")
    hot = np.exp(np.log(weights[1, 3, :4]) / 2)
    np.testing.assert_allclose([float(x) for x in column(page, 3)[:4]], hot / hot.sum(), atol=6e-4)
    page.get_by_label("dropout").fill("0.5")
    kept = [(float(a), b) for a, b in zip(column(page, 3)[:4], column(page, 4)[:4], strict=True)]
    assert all(after == "dropped" or abs(float(after) - 2 * before) < 2e-3 for before, after in kept)


def test_what_is_seen_can_be_saved(show: Open, tmp_path: Path) -> None:
    page = show(cattn.view_attention(weights_of(2, 6), TOKENS))
    for form in ("map", "lines"):
        page.get_by_role("button", name=form).click()
        for kind in ("PNG", "SVG"):
            with page.expect_download() as download:
                page.get_by_role("button", name=f"save as {kind}").click()
            file = tmp_path / download.value.suggested_filename
            download.value.save_as(file)
            start = file.read_bytes()
            assert start.startswith(b"\x89PNG" if kind == "PNG" else b"<svg")
            assert kind == "PNG" or b">journey<" in start


def test_a_large_file_is_rounded_and_says_so(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(2, 6)
    monkeypatch.setattr(_view, "MOST_BYTES_SAVED", weights.nbytes // 2)
    page = show(cattn.view_attention(weights, TOKENS))
    page.get_by_role("gridcell", name="head 0").click()
    chip(page, 1, 3).click()
    assert "(rounded to float16)" in status(page).text
    np.testing.assert_array_equal([np.float16(text) for text in chips(page, 0)], weights[0, 3].astype(np.float16))


# ---- large weights ---------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("from_the_first")
def test_reduced_weights_say_so(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = weights_of(2, 50)
    monkeypatch.setattr(_view, "MOST_BYTES_SAVED", 2 * 25 * 25 * 4)
    page = show(cattn.view_attention(weights))
    page.locator(".cattn-map").focus()
    page.keyboard.press("Home")
    now = status(page)
    assert "in 2 × 2 cells the largest is" in now.text
    assert number(now.value, np.float32) == weights[0, 48:50, :2].max()


def test_many_tokens_list_the_largest(show: Open) -> None:
    weights = weights_of(1, 200)
    page = show(cattn.view_attention(weights))
    chip(page, 1, 150).click()
    frame(page)
    rows = page.locator(".cattn-largest").first.locator("tr")
    best = np.argsort(-weights[0, 150], kind="stable")[:6]
    assert rows.evaluate_all("nodes => nodes.map(node => Number(node.dataset.at))") == best.tolist()
    numbers = rows.locator(".cattn-number").all_inner_texts()
    assert [number(text, np.float32) for text in numbers] == list(weights[0, 150, best])


# ---- statistics ------------------------------------------------------------------------------------------------------
FIELDS = ["entropy", "distance", "max_weight", "received"]


def statistics_of(*shape: int, dtype: Any = np.float32, top_k: int = 0) -> cattn.AttentionStatistics:
    x = np.random.default_rng(0).standard_normal((*shape, 4)).astype(dtype)
    return cattn.attention_statistics(x, x, is_causal=True, statistics=FIELDS, top_k=top_k)


def strip_numbers(page: Any) -> dict[str, str]:
    frame(page)
    return {name: page.locator(f".cattn-strip[data-field='{name}'] output").inner_text() for name in FIELDS}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_strips_show_the_numbers_of_the_statistics(show: Open, dtype: Any) -> None:
    statistics = statistics_of(2, 3, 50, dtype=dtype)
    page = show(cattn.view_attention(statistics))
    page.get_by_role("option", name="entry 1, head 2").click()
    page.locator(".cattn-strips").focus()
    for at in range(49, 40, -1):
        page.keyboard.press("ArrowLeft") if at < 49 else None
        for name, text in strip_numbers(page).items():
            wanted = getattr(statistics, name)
            assert number(text, wanted.dtype) == wanted[1, 2, at]


def test_strips_zoom_and_name_the_largest_keys(show: Open) -> None:
    statistics = statistics_of(2, 3000, top_k=4)
    page = show(cattn.view_attention(statistics, [f"t{i}" for i in range(3000)]))
    plot = page.locator(".cattn-strip").first.locator(".cattn-over")
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20, steps=4)
    page.mouse.up()
    page.mouse.move(box["x"] + 0.5 * box["width"], box["y"] + 20)
    frame(page)
    assert page.locator(".cattn-where").inner_text().startswith("tokens 1")
    position = int(page.locator(".cattn-status").get_attribute("data-position"))
    assert number(strip_numbers(page)["entropy"], np.float32) == statistics.entropy[0, position]
    chip(page, 0, position).click()
    frame(page)
    rows = page.locator(".cattn-largest").first.locator("tr")
    assert rows.evaluate_all("nodes => nodes.map(node => Number(node.dataset.at))") == (
        statistics.top_keys[0, position].tolist()
    )
    page.get_by_role("button", name="show everything").click()
    frame(page)
    assert page.locator(".cattn-where").inner_text() == "3000 tokens"


def test_reduced_statistics_say_so(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = statistics_of(2, 60)
    monkeypatch.setattr(_view, "MOST_BYTES_SAVED", 4 * 2 * 60 * 4 // 4)
    page = show(cattn.view_attention(statistics))
    text = strip_numbers(page)["entropy"]
    assert text.startswith("≈ ")
    assert number(text[2:], np.float32) == pytest.approx(statistics.entropy[0, 56:].mean(), rel=1e-6)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_strips_are_legible_and_fit(show: Open, theme: str, width: int) -> None:
    view = cattn.view_attention(statistics_of(4, 3, 60, top_k=3), list("abcdefghij" * 6))
    page = show(view, color_scheme=theme, viewport={"width": width, "height": 800})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    words = ".cattn-chip, .cattn-view button, .cattn-view select, .cattn-view h2, .cattn-view h3, .cattn-status"
    assert min(page.locator(words).evaluate_all(CONTRAST)) >= 4.5


# ---- where no widget runs --------------------------------------------------------------------------------------------
def test_the_frame_hides_its_picture_and_takes_the_theme_around_it(show: Open) -> None:
    html = cattn.view_attention(weights_of(2, 6), TOKENS).to_html()
    png = base64.b64encode(picture()).decode()
    body = "<body style='background: #111; color: #eee'>"
    outer = "<!DOCTYPE html><meta charset='utf-8'><link rel='icon' href='data:,'>" + body + _view._frame(html, png)
    page = show(outer + "<div class='cattn-view' data-theme='x'>around</div>")
    inner = page.frame_locator("iframe")
    inner.locator(".cattn-view[data-theme='dark']").wait_for()
    assert not page.locator("img").is_visible()
    height = inner.locator("body").evaluate("node => node.offsetHeight")
    page.wait_for_function(f"() => Math.abs(document.querySelector('iframe').offsetHeight - {height}) < 40")


def test_a_page_that_is_opened_as_a_file_gives_its_frames_their_height(browser: Any, tmp_path: Path) -> None:
    """A file may not look at the frame that it is in: the script of the site listens to it."""
    cattn.view_attention(weights_of(2, 6), TOKENS).save(tmp_path / "view.html")
    script = (ROOT / "docs/_static/cattn.js").read_text("utf-8")
    frame = "<iframe class='cattn-live' src='view.html' style='height: 100px'></iframe>"
    outer = f"<!DOCTYPE html><meta charset='utf-8'><link rel='icon' href='data:,'><script>{script}</script>{frame}"
    (tmp_path / "page.html").write_text(outer, "utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_function("() => document.querySelector('iframe').offsetHeight > 300")
    inner = page.frame_locator("iframe").locator("body").evaluate("node => node.offsetHeight")
    assert abs(page.locator("iframe").evaluate("node => node.offsetHeight") - inner) < 40
    page.close()


def picture() -> bytes:
    plt = pytest.importorskip("matplotlib.image")
    file = io.BytesIO()
    plt.imsave(file, np.zeros((4, 4)))
    return file.getvalue()
