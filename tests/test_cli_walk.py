"""`python -m cattn`, the walk through the chapter: the tables it prints and its report on the machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cattn
from cattn import _cattn
from cattn._cli import machine

TABLES = {c["id"]: c for c in json.loads((Path(__file__).parent / "data" / "seed_tables.json").read_text())}


@pytest.fixture(scope="module")
def walk() -> str:
    done = subprocess.run([sys.executable, "-m", "cattn"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.promise("walk")
@pytest.mark.parametrize(
    "case",
    ["002-attn-weights", "002-masked-scores", "002-masked-simple", "002-masked-simple-norm", "002-masked-inf",
     "004-3.5.1-attn-weights", "004-3.5.1-masked-scores", "004-3.5.1-masked-inf", "004-3.5.1-context"],
)  # fmt: skip
def test_walk_prints_the_tables_of_the_chapter(walk: str, case: str) -> None:
    values = [["-inf" if v == "-inf" else f"{v:.4f}" for v in row] for row in TABLES[case]["values"]]
    printed = [re.findall(r"-inf|-?\d\.\d{4}(?!\d)", line) for line in walk.splitlines()]
    width = len(values[0])
    tables = [[row[start : start + width] for row in printed] for start in (0, width)]
    assert any(rows[i : i + len(values)] == values for rows in tables for i in range(len(rows))), walk


def test_walk_is_readable(walk: str) -> None:
    lines = walk.splitlines()
    assert max(map(len, lines)) <= 100
    assert not any(line != line.rstrip() for line in lines)
    assert walk.isascii()
    for token in ("Your", "journey", "starts", "with", "one", "step"):
        assert len(re.findall(rf"^  {token} +-?[\di]", walk, re.MULTILINE)) == 7  # one row in each table
    assert "the same to the bit: True" in walk
    assert "(2, 4, 6, 2)" in walk
    assert float(re.search(r"largest difference is (\S+)", walk)[1]) < 1e-6


def test_walk_names_the_instruction_set_and_the_threads(walk: str) -> None:
    end = walk[walk.index("This machine:") :]
    assert _cattn._get_isa() in end
    assert re.search(r"\d+ threads?\b", end)
    assert re.search(r"[\d.]+ ms, [\d.]+ times as fast as textbook NumPy \(\d+ ms\)", end)


def test_the_dropout_that_the_walk_prints_is_that_of_seed_123(walk: str) -> None:
    """The chapter's dropout uses torch's stream and has no table here: the walk prints cattn's own, with rng=123."""
    weights = np.array(TABLES["002-masked-inf"]["values"])
    dropout_mask = cattn.dropout(weights, 0.5, rng=123, return_mask=True)[1]
    shown = walk[walk.index("5. Dropout") : walk.index("6. Context")]
    numbers = np.array([[float(x) for x in line.split()[1:]] for line in shown.splitlines()[1:7]])
    np.testing.assert_array_equal(numbers > 0, dropout_mask & (weights > 0))
    np.testing.assert_allclose(numbers, 2 * weights * dropout_mask, atol=2e-4)


def test_the_timed_functions_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 33, 8), np.float32)
    np.testing.assert_allclose(machine.textbook(q, k, v), cattn.causal_attention(q, k, v), atol=1e-5)
    monkeypatch.setattr(machine, "SHAPE", (1, 1, 8, 4))
    assert all(seconds > 0 for seconds in machine.compare())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "NumPy as configured" in machine.measure()
