"""`python -m cattn`, the walk through the chapter: the tables it prints and its report on the machine."""

import json
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

import cattn
from cattn import _cattn
from cattn.__main__ import main
from cattn._cli import colours, machine
from cattn._cli.walk import run
from support import ROOT
from support.processes import run_command

TABLES = {c["id"]: c for c in json.loads((ROOT / "tests" / "data" / "seed_tables.json").read_text())}


@pytest.fixture(scope="module")
def walk() -> str:
    done = run_command([sys.executable, "-m", "cattn"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


@pytest.mark.promise("walk")
@pytest.mark.parametrize(
    "case",
    ["002-attn-weights", "002-masked-scores", "002-masked-inf",
     "004-3.5.1-attn-weights", "004-3.5.1-masked-scores", "004-3.5.1-masked-inf", "004-3.5.1-context"],
)  # fmt: skip
def test_walk_prints_the_tables_of_the_chapter(walk: str, case: str) -> None:
    values = [["-inf" if v == "-inf" else f"{v:.4f}" for v in row] for row in TABLES[case]["values"]]
    printed = [re.findall(r"-inf|-?\d\.\d{4}(?!\d)", line) for line in walk.splitlines()]
    assert any(printed[i : i + len(values)] == values for i in range(len(printed))), walk


def test_walk_is_readable(walk: str) -> None:
    lines = walk.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(line != line.rstrip() for line in lines)
    assert walk.isascii()
    for token in ("Your", "journey", "starts", "with", "one", "step"):
        assert len(re.findall(rf"^  {token} +-?[\di]", walk, re.MULTILINE)) == 6  # one row in each table
    assert "the same to the bit: True" in walk
    assert "(2, 4, 6, 2)" in walk
    assert float(re.search(r"largest difference is (\S+)", walk)[1]) < 1e-6


def test_walk_names_the_instruction_set_and_the_threads(walk: str) -> None:
    end = walk[walk.index("This machine:") :]
    assert _cattn._get_isa() in end
    assert re.search(r"\d+ threads?\b", end)
    assert re.search(r"[\d.]+ ms, [\d.]+ times as fast as textbook NumPy \(\d+ ms\)", end)


def test_walk_ends_with_what_to_try_next(walk: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that it names run as they stand."""
    commands = [shlex.split(line)[3:] for line in walk.splitlines() if line.startswith("  python -m cattn ")]
    assert [command[0] for command in commands] == ["example", "attend", "view", "statistics"]
    commands[0] = commands[0][:1]  # what the line says about it follows
    for command in commands:
        assert main(command) == 0, capsys.readouterr().err
    assert "journey" in (folder / "attention.html").read_text("utf-8")


# ---- colours ---------------------------------------------------------------------------------------------------------
ESCAPE = re.compile(r"\x1b\[([\d;]*)m")
LEGEND = "Darker cells hold larger numbers; hidden and dropped cells have no colour.\n"


def run_walk(capsys: pytest.CaptureFixture[str]) -> str:
    run()
    return capsys.readouterr().out


def test_colours_change_nothing_but_the_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    plain = run_walk(capsys)
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    shaded = run_walk(capsys)
    assert LEGEND in shaded
    assert ESCAPE.sub("", shaded).replace(LEGEND, "") == plain
    assert max(map(len, ESCAPE.sub("", shaded).splitlines())) <= 80
    for line in shaded.splitlines():
        assert ESCAPE.findall(line)[1::2] == ["0"] * (len(ESCAPE.findall(line)) // 2), "a cell resets its colours"


def test_darker_cells_are_larger_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    shaded = run_walk(capsys)
    for start, end in (("1. Scores", "2. Att"), ("2. Att", "3. The"), ("4. Cau", "5. Dro"), ("6. Con", "Shapes")):
        table = shaded[shaded.index(start) : shaded.index(end, shaded.index(start))]
        cells = re.findall(r"\x1b\[38;5;\d+;48;5;(\d+)m *([^\s\x1b]+)\x1b", table)
        steps = [colours.BLUES.index(int(colour)) for colour, _ in sorted(cells, key=lambda cell: float(cell[1]))]
        assert steps == sorted(steps)
        assert steps[-1] == len(colours.BLUES) - 1
    hidden = re.findall(r"\x1b\[2m *([^\s\x1b]+)\x1b", shaded)
    assert set(hidden) == {"-inf", "0.0000"}
    assert hidden.count("-inf") == 15


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="no pseudo-terminals")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, True),
        ({"TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
        ({}, False),
    ],
)
def test_a_terminal_has_colours_unless_no_color_is_set(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ends = os.openpty()
    with os.fdopen(ends[1], "w") as terminal, os.fdopen(ends[0]):
        assert colours.has_colours(terminal) is expected
    with open(os.devnull, "w") as file:
        assert not colours.has_colours(file)


def test_the_dropout_that_the_walk_prints_is_that_of_seed_123(walk: str) -> None:
    """torch.manual_seed(123) of the chapter."""
    weights = np.array(TABLES["002-masked-inf"]["values"])
    dropout_mask = cattn.dropout(weights, 0.5, rng=cattn.TorchGenerator(123), return_mask=True)[1]
    shown = walk[walk.index("5. Dropout") : walk.index("6. Context")]
    numbers = np.array([[float(x) for x in line.split()[1:]] for line in shown.splitlines()[2:8]])
    np.testing.assert_array_equal(numbers > 0, dropout_mask & (weights > 0))
    np.testing.assert_allclose(numbers, 2 * weights * dropout_mask, atol=2e-4)


def test_the_timed_functions_give_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 33, 8), np.float32)
    np.testing.assert_allclose(machine.textbook(q, k, v), cattn.causal_attention(q, k, v), atol=1e-5)
    monkeypatch.setattr(machine, "SHAPE", (1, 1, 8, 4))
    assert all(seconds > 0 for seconds in machine.compare())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "NumPy as configured" in machine.measure()
