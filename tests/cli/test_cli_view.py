"""``python -m cattn example``, ``view`` and ``statistics``, and pipes."""

import io
import os
import re
import stat
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import leftovers, save

import cattn
from cattn.__main__ import main
from cattn._cli import walk
from cattn._cli.attend import _Job
from support.processes import run_command


def test_example_writes_files_that_the_other_commands_take(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["example"]) == 0
    assert capsys.readouterr().out == ".: q.npy, k.npy, v.npy, tokens.txt\n"
    for name, array in zip("qkv", walk.projections(), strict=True):
        np.testing.assert_array_equal(np.load(f"{name}.npy"), array)
    assert Path("tokens.txt").read_text("utf-8").split() == list(walk.TOKENS)
    assert main(["example"]) == 2
    assert "q.npy, k.npy, v.npy, tokens.txt in . would be replaced" in capsys.readouterr().err
    assert main(["example", "--force", "--quiet"]) == 0
    assert main(["example", "none"]) == 2
    assert leftovers(folder) == []


def test_view_writes_a_page_of_one_entry(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((2, 3, 6, 4), (2, 3, 6, 4), (2, 3, 6, 4))
    assert (
        main(["attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy", "--causal", "--weights", "w.npy", "--quiet"]) == 0
    )
    assert main(["view", "w.npy", "-o", "a.html", "--entry", "1", "--tokens", "a b c d e <f>", "--title", "mine"]) == 0
    assert capsys.readouterr().out == "a.html: entry 1 of 2, weights of shape (3, 6, 6)\n"
    page = Path("a.html").read_text("utf-8")
    assert "<title>mine, entry 1 of 2</title>" in page
    assert "\\u003cf>" in page
    assert main(["view", "w.npy", "-o", "b.html", "--layers", "--quiet"]) == 0
    assert '"n_layers": 2' in Path("b.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["w.npy", "-o", "a.png"], "a.png: the name must end in .html"),
        (["w.npy", "-o", "none/a.html"], "there is no such directory"),
        (["w.npy", "-o", "a.html", "--entry", "3"], r"--entry must be from 0 to 1 for shape (2, 3, 6, 6), got 3"),
        (["w.npy", "-o", "a.html", "--entry", "0", "--layers"], "--entry and --layers do not go together"),
        (["w.npy", "-o", "a.html", "--tokens", "a"], "tokens must name 6 tokens, got 1 (weights: w.npy)"),
    ],
)
def test_view_refuses_wrong_arguments(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    np.save("w.npy", np.full((2, 3, 6, 6), 1 / 6))
    assert main(["view", *words]) == 2
    assert says in capsys.readouterr().err
    assert not Path("a.html").exists()


def test_statistics_prints_a_line_for_each_head_and_writes_what_the_function_returns(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query, key, _ = save((2, 3, 6, 4), (2, 3, 6, 4), (1,))
    found = cattn.attention_statistics(query[1], key[1], is_causal="lower_right", enable_gqa=True, top_k=2)
    assert main(["statistics", "q.npy", "k.npy", "--causal", "--entry", "1", "--top-k", "2", "-o", "s.npz"]) == 0
    *table, closing = capsys.readouterr().out.splitlines()
    assert closing == "s.npz: entry 1 of 2, 6 queries, 6 keys"
    assert table[0].split() == ["head", "entropy", "largest", "distance"]
    assert [row.split()[1] for row in table[1:]] == [f"{x:.4f}" for x in found.entropy.mean(axis=-1, dtype=np.float64)]
    kept = np.load("s.npz")
    assert set(kept) == {name for name, array in found._asdict().items() if array is not None}
    for name in kept:
        np.testing.assert_array_equal(kept[name], getattr(found, name))
    tokens = "a b c d e f"
    np.savez("sinks.npz", sinks=np.linspace(-1, 1, 3))
    assert main(["statistics", "q.npy", "k.npy", "--sinks", "sinks.npz", "-o", "sinks.npz"]) == 2
    assert main(["statistics", "q.npy", "k.npy", "--sinks", "sinks.npz", "--entry", "0"]) == 0
    with_sinks = cattn.attention_statistics(query[0], key[0], sinks=np.linspace(-1, 1, 3), enable_gqa=True)
    captured = capsys.readouterr()
    assert "--output: sinks.npz is the input file of sinks" in captured.err
    rows = [line.split() for line in captured.out.splitlines()]
    assert rows[0][-1] == "sink"
    assert [row[-1] for row in rows[1:]] == [f"{x:.4f}" for x in with_sinks.sink_weight.mean(-1, dtype=np.float64)]
    assert main(["statistics", "q.npy", "k.npy", "-o", "s.html", "--tokens", tokens, "--quiet"]) == 0
    assert '"kind": "statistics"' in Path("s.html").read_text("utf-8")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["q.npy"], "q.npy is a single array"),
        (["q.npy", "k.npy", "q.npy"], "give query and key, or one file of both, got 3 files"),
        (["q.npy", "k.npy", "-o", "-"], "the table goes to standard output"),
        (["q.npy", "k.npy", "-o", "s.png"], "s.png: the name must end in .html, .npz, .safetensors"),
        (["q.npy", "k.npy", "--scale", "nan"], "scale must be finite"),
    ],
)
def test_statistics_refuses_wrong_arguments(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    save((6, 4), (6, 4), (1,))
    assert main(["statistics", *words]) == 2
    assert says in capsys.readouterr().err


def run(*words: str, given: bytes = b"") -> bytes:
    command = [sys.executable, "-m", "cattn", *words]
    done = run_command(command, given=given, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout


def test_arrays_pass_through_pipes(folder: Path) -> None:
    query, key, value = save((3, 6, 4), (3, 6, 4), (3, 6, 2))
    archive = io.BytesIO()
    np.savez(archive, query=query, key=key, value=value)
    out = np.load(io.BytesIO(run("attend", "-", "-o", "-", "--causal", given=archive.getvalue())))
    np.testing.assert_array_equal(out, cattn.causal_attention(query, key, value))
    weights = run(*["attend", "--weights", "-", "-o", "out.npy", "-", "--causal"], given=archive.getvalue())
    np.testing.assert_array_equal(np.load("out.npy"), out)
    page = run("view", "-", "-o", "-", given=weights).decode()
    assert page.startswith("<!DOCTYPE html>")
    pytest.importorskip("matplotlib")
    assert run("plot", "-", "-o", "-", given=weights).startswith(b"\x89PNG")
    assert set(os.listdir()) == {"q.npy", "k.npy", "v.npy", "out.npy"}


def refused(*words: str, given: bytes = b"", **options: Any) -> str:
    command = [sys.executable, "-m", "cattn", *words]
    done = run_command(command, given=given, capture_output=True, **options)
    assert done.returncode == 2, done.stderr.decode()
    assert done.stdout == b""
    return done.stderr.decode()


def stream(*arrays: np.ndarray) -> bytes:
    """Return arrays in the .npy format, one after the other."""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ">f8"])
def test_a_pipe_holds_several_arrays_in_the_order_of_the_command_line(folder: Path, dtype: Any) -> None:
    query, key, value = (array.astype(dtype) for array in save((2, 3, 6, 4), (2, 3, 7, 4), (2, 3, 7, 5)))
    np.save("v.npy", value)
    mask, lengths = np.tri(6, 7, 1, dtype=bool), np.array([7, 4])
    plain = cattn.scaled_dot_product_attention(query, key, value)
    masked = cattn.scaled_dot_product_attention(query, key, value, mask, key_value_seq_lengths=lengths)
    swapped = np.asfortranarray(key)
    for words, arrays, expected in (
        (("-", "-", "-"), (query, swapped, value), plain),
        (("-", "-", "v.npy"), (query, swapped), plain),
        (("--lengths", "-", "-", "--mask=-", "-", "v.npy"), (lengths, query, mask, key), masked),
    ):
        run("attend", *words, "-o", "out.npy", "--quiet", given=stream(*arrays))
        np.testing.assert_array_equal(np.load("out.npy"), expected)
    table = run("statistics", "-", "-", "--entry", "1", given=stream(query, key)).decode()
    np.save("q.npy", query)
    np.save("k.npy", key)
    assert run("statistics", "q.npy", "k.npy", "--entry", "1").decode() == table
    assert run("statistics", "-", "-", "--entry", "1", given=stream(query, query)).decode() != table


def test_a_pipe_that_is_not_what_the_command_reads_is_named(folder: Path) -> None:
    query, key, _ = save((6, 4), (6, 4), (6, 4))
    archive = io.BytesIO()
    np.savez(archive, query=query, key=key, value=key)
    one, whole = stream(query), archive.getvalue()
    for words, given, says in (
        (("-", "-", "v.npy"), one, "ends after 1 array, but 2 inputs are -"),
        (("-", "k.npy", "v.npy"), stream(query, key), "goes on after 1 array: give - as often"),
        (("-", "k.npy", "v.npy"), one + b"\n", "goes on after 1 array"),
        (("-", "-", "v.npy"), one + whole, "goes on after array 1 with another kind of file"),
        (("-",), one, "is a single array; give query, key and value"),
        (("-",), whole + whole, "goes on after an archive"),
        (("-",), whole + one, "goes on after an archive"),
        (("-", "k.npy", "v.npy"), b"", "is empty"),
        (("-", "k.npy", "v.npy"), b"1 2 3", "is neither a .npy nor a .npz nor"),
        (("-", "k.npy", "v.npy"), one[:-1], "is truncated or damaged"),
        (("-", "k.npy", "v.npy"), one[:30], "is truncated or damaged"),
        (("-",), whole[:-40], "is truncated or damaged"),
    ):  # fmt: skip
        message = refused("attend", *words, "-o", "out.npy", given=given)
        assert f"standard input {says}" in message
        assert "cattn-" not in message
    for words in (("view", "-", "-o", "a.html"), ("plot", "-", "-o", "a.png"), ("statistics", "-", "k.npy")):
        assert "standard input is empty" in refused(*words)
        assert "standard input goes on after 1 array" in refused(*words, given=stream(query, key))
    assert sorted(os.listdir()) == ["k.npy", "q.npy", "v.npy"]


def test_the_result_for_a_pipe_is_in_a_secret_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can foretell its name and lay a link there, and only its owner reads it."""
    save((6, 4), (6, 4), (6, 4))
    (folder / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    made: list[tuple[str, int]] = []

    def look(*_: Any) -> None:
        made.extend((file.name, stat.S_IMODE(file.stat().st_mode)) for file in (folder / "tmp").iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(_Job, "compute", look)
    for _ in range(2):
        assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", "-"]) == 130
    assert len({name for name, _ in made}) == 2
    assert all(str(os.getpid()) != re.sub(r"\D", "", name) for name, _ in made)
    assert os.name == "nt" or {mode for _, mode in made} == {0o600}
    assert os.listdir("tmp") == []


def test_only_one_output_goes_down_the_pipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((6, 4), (6, 4), (6, 4))
    assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", "-", "--lse", "-"]) == 2
    assert "--output, --weights and --lse must be different files" in capsys.readouterr().err
