"""``python -m cattn conform``: cattn conforms, wrong functions do not, and an error is a sentence."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from cattn.__main__ import main
from cattn._cli.conform import USUAL
from cattn._cli.info import textbook
from cattn.testing import _conform
from cattn.testing._conform import LAWS, conform, find_function
from support import ROOT, table
from support.laws import SAME_BITS

VALUES = [name for name in LAWS if name.startswith("values")]


@pytest.fixture(autouse=True)
def table_in_the_contract() -> Iterator[None]:
    with table(SAME_BITS[0]):
        yield


def failed(function: Any, **options: Any) -> dict[str, str]:
    return {law.name: law.text for law in conform(function, **options) if law.holds is False}


def test_cattn_keeps_every_law_and_has_the_bits_of_the_vectors() -> None:
    laws = conform(cattn.scaled_dot_product_attention, bits=True)
    assert [law.name for law in laws] == [*LAWS, *_conform.BITS]
    assert [law.word for law in laws] == ["yes"] * len(laws)
    laws = conform(cattn.causal_attention, is_causal=True, bits=True)
    assert {law.name: law.text for law in laws if not law.holds} == {[*LAWS][3]: "it is causal"}


def test_the_table_of_the_readme_is_the_tools() -> None:
    rows = re.findall(r"^\| (.+) \(a\) \| (\w+) \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    found = {law.name: law.word for law in conform(find_function(USUAL["cattn"]))}
    assert len(rows) >= 3
    assert dict(rows) == {name: found[name] for name, _ in rows}
    pages = (ROOT / "docs" / "testing.md").read_text("utf-8")
    shown = re.findall(r"^\| (.+?) \| (yes|no|–) \| (?:yes|no|–) \|", pages, re.MULTILINE)
    assert dict(shown) == found


# ---- wrong functions -------------------------------------------------------------------------------------------------
def scores_of(query: Any, key: Any) -> Any:
    return query @ key.swapaxes(-1, -2) / query.dtype.type(np.sqrt(query.shape[-1]))


def softmax(scores: Any, axis: int = -1) -> Any:
    weights = np.exp(scores - scores.max(axis, keepdims=True))
    return weights / weights.sum(axis, keepdims=True)


def wrong_axis(query: Any, key: Any, value: Any, attn_mask: Any = None, is_causal: bool = False) -> Any:
    return softmax(scores_of(query, key), -2) @ value


def mask_added(query: Any, key: Any, value: Any, mask: Any, causal: bool = False) -> Any:
    scores = scores_of(query, key)
    hidden = np.where(mask, 0, -1e9) if mask.dtype == bool else mask
    hidden = hidden + np.where(np.tri(*scores.shape[-2:]), 0, -1e9 * causal)
    return softmax(scores + hidden.astype(scores.dtype)) @ value


def no_scale(query: Any, key: Any, value: Any) -> Any:
    return softmax(query @ key.swapaxes(-1, -2)) @ value


def test_wrong_functions_are_found_with_the_first_number_that_differs() -> None:
    number = r"\d+ of \d+ numbers, first at \([\d, ]+\): \S+(,| and)"
    axis, added, scaled = failed(wrong_axis), failed(mask_added), failed(no_scale)
    assert {*VALUES, "a prefix of the tokens has the same bits", "a query that sees no key gives 0"} <= {*axis}
    leaks = {"a hidden key may be NaN", "a hidden value may be NaN", "a query that sees no key gives 0"}
    assert leaks <= {*added}
    assert not {*VALUES} & {*added}, "hidden weights of exp(-1e9) are 0"
    assert {*VALUES} <= {*scaled}
    assert not leaks & {*scaled}, "it takes no mask"
    for text in (*axis.values(), *added.values(), *scaled.values()):
        assert re.search(number, text)


def test_what_is_no_result_of_attention_is_named() -> None:
    def of(result: Any) -> Any:
        return lambda query, key, value: result(textbook(query, key, value))

    assert failed(of(lambda out: out.astype(np.float64)))[VALUES[0]].endswith("float32: it returns float64")
    assert failed(of(lambda out: out[..., :1])) == {
        VALUES[0]: "it returns an array of (2, 2, 5, 1), wanted (2, 2, 5, 4)"
    }
    assert failed(of(lambda out: out / "a"))[VALUES[0]].startswith("it raises TypeError: ufunc 'divide'")
    assert failed(of(lambda out: sys.exit(3))) == {VALUES[0]: "it raises SystemExit: 3"}
    assert [*failed(of(lambda out: None))] == VALUES[:1]
    assert VALUES[0] not in failed(of(lambda out: (out, None))), "of a tuple the first is the output"


# ---- other libraries -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * name.startswith("jax")) for name in _conform.KNOWN]
)
def test_functions_of_other_libraries_are_called_as_they_want_it(name: str) -> None:
    pytest.importorskip(name.partition(":")[0])
    if name.startswith("onnx"):
        pytest.importorskip("onnx")
    laws = {law.name: law for law in conform(find_function(name))}
    assert laws[VALUES[0]].holds, laws[VALUES[0]].text
    assert [law.text for law in laws.values() if "raises" in law.text] == []


def test_a_function_of_tensors_gets_tensors() -> None:
    torch = pytest.importorskip("torch")

    def attention(query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        assert isinstance(query, torch.Tensor)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)

    assert not {*VALUES} & {*failed(attention)}


# ---- the command -----------------------------------------------------------------------------------------------------
MODULE = """
from cattn._cli.info import textbook
def attention(query, key, value, attn_mask=None, is_causal=False):
    return textbook(query, key, value, attn_mask, is_causal)
number = 3
class Class: pass
"""


def test_the_command_prints_the_table_and_says_by_its_code_what_holds(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / "own_attention.py").write_text(MODULE)
    (folder / "broken_attention.py").write_text("1 / 0")
    assert main(["conform", USUAL["cattn"], "--bits"]) == 0
    assert capsys.readouterr().out.count("| yes |") == len(LAWS) + 2
    assert main(["conform", "own_attention:attention", "--bits"]) == 1
    said = capsys.readouterr().out
    assert f"| {VALUES[0]} | yes |" in said
    assert re.search(r"\nown_attention:attention: no, a hidden value may be NaN: \d+ of \d+ numbers, first at ", said)
    for name, message in {
        "own_attention": "must be module:function, such as torch.nn",
        "own_attention:other": "there is no other in own_attention",
        "own_attention:number": "function must be callable, got int",
        "own_attention:Class": "function is the class Class: make an object",
        "no_such_module.at_all:f": "there is no module no_such_module",
        "broken_attention:f": "importing it raised ZeroDivisionError: division by zero",
    }.items():
        assert main(["conform", name]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"cattn: error: {name}: {message}")


def test_without_a_name_the_installed_libraries_are_tried(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(USUAL, "JAX", "no_such_module:f")
    monkeypatch.setitem(USUAL, "onnxruntime", "no_such_module:g")
    monkeypatch.setitem(USUAL, "PyTorch", USUAL["cattn"])
    assert main(["conform"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("| law | cattn | PyTorch | NumPy by hand |\n")
    assert "JAX is left out: there is no module no_such_module\n" in captured.err
