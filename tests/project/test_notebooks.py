"""The notebooks of examples/: what a reader sees of them."""

from __future__ import annotations

import ast
import base64
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from support import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str = "code") -> list[dict[str, Any]]:
    every: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in every if cell["cell_type"] == kind]


def tags(cell: dict[str, Any]) -> list[str]:
    return list(cell["metadata"].get("tags", ()))


def pictures(cell: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for output in cell["outputs"] if "image/png" in output.get("data", ())]


def test_every_picture_has_an_alternative_text(path: Path) -> None:
    drawn = [cell for cell in cells(path) if pictures(cell)]
    assert drawn
    texts = [cell["metadata"].get("mystnb", {}).get("image", {}).get("alt", "") for cell in drawn]
    assert min(map(len, texts)) > 40
    assert len(set(texts)) == len(texts)


def test_pictures_have_two_pixels_for_each_point_of_the_page(path: Path) -> None:
    for cell in cells(path):
        for output in pictures(cell):
            data = base64.b64decode("".join(output["data"]["image/png"]))
            width, _ = struct.unpack(">II", data[16:24])
            assert abs(width - 2 * output["metadata"]["image/png"]["width"]) <= 1


def test_checks_at_the_end_of_a_cell_are_hidden(path: Path) -> None:
    """A cell that shows a result does not end with a check of it: that is in a hidden cell of its own."""
    hidden = [cell for cell in cells(path) if "remove-cell" in tags(cell)]
    assert hidden
    for cell in cells(path):
        last = ast.parse(re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)).body[-1]
        checks = isinstance(last, ast.Assert)
        if "remove-cell" in tags(cell):
            assert cell["outputs"] == []
            assert cell["metadata"]["jupyter"]["source_hidden"]
        else:
            assert not (checks and cell["outputs"]), "".join(cell["source"])


def test_exercises_have_folded_solutions(path: Path) -> None:
    questions = [cell for cell in cells(path, "markdown") if re.match(r"\*\*\d+\.\*\* ", "".join(cell["source"]))]
    solutions = [cell for cell in cells(path) if "hide-cell" in tags(cell)]
    assert len(questions) == len(solutions) >= 2
    for cell in solutions:
        assert cell["metadata"]["jupyter"]["source_hidden"]
        assert cell["outputs"], "a solution shows its result"


def test_the_first_cell_says_what_one_learns_and_how_long_it_takes(path: Path) -> None:
    first = "".join(cells(path, "markdown")[0]["source"])
    assert "**You learn** " in first
    assert "**Time:** " in first
