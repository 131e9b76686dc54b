"""The options of ``python -m cattn attend`` that choose keys and change scores, and the names of arrays in archives."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cli import attend_files, save

import cattn
from cattn.__main__ import main
from cattn._cli import attend
from cattn.nn._files import save_arrays

HEADS = [(3, 4, 33, 8), (3, 2, 40, 8), (3, 2, 40, 5)]
SAME = [(3, 4, 37, 8), (3, 2, 37, 8), (3, 2, 37, 5)]
BATCH = [(3, 33, 8), (3, 40, 8), (3, 40, 8)]
FLAT = [(33, 8), (40, 8), (40, 8)]
SLOPES, SINKS = cattn.get_alibi_slopes(4), np.linspace(-1, 1, 12).reshape(3, 4)
LENGTHS, QUERIES = np.array([40, 0, 21]), np.array([33, 5, 20])
OFFSETS = LENGTHS - QUERIES

CASES: dict[str, tuple[list, list[str], dict[str, Any]]] = {
    "window": (SAME, ["--window", "5", "3"], {"window_size": (5, 3)}),
    "window of one side": (FLAT, ["--causal", "--window", "-1", "0"], {"is_causal": "lower_right"}),
    "causal window": (BATCH, ["--causal", "--window", "9", "0"], {"is_causal": "lower_right", "window_size": (9, 0)}),
    "offset": (HEADS, ["--causal", "--query-offset", "3"], {"is_causal": True, "query_offset": 3}),
    "window at an offset": (HEADS, ["--window", "4", "2", "--query-offset", "-2"],
                            {"window_size": (4, 2), "query_offset": -2}),
    "one length": (FLAT, ["--lengths", "17"], {"key_value_seq_lengths": 17}),
    "one length of a batch": (SAME, ["--lengths", "17"], {"key_value_seq_lengths": 17, "query_seq_lengths": 17}),
    "lengths": (HEADS, ["--lengths", "40,0,21"], {"key_value_seq_lengths": LENGTHS}),
    "lengths of three dimensions": (BATCH, ["--lengths", "40,0,21"], {"key_value_seq_lengths": LENGTHS}),
    "lengths of the same sequences": (SAME, ["--lengths", "37,0,21", "--causal"],
        {"is_causal": True, "key_value_seq_lengths": [37, 0, 21], "query_seq_lengths": [37, 0, 21]}),
    "both lengths, causal": (HEADS, ["--lengths", "40,0,21", "--query-lengths", "33,5,20", "--causal"],
        {"is_causal": "lower_right", "key_value_seq_lengths": LENGTHS, "query_seq_lengths": QUERIES}),
    "lengths of five dimensions": ([(2, 3, 4, 20, 8), (1, 3, 4, 20, 8), (2, 1, 4, 20, 8)], ["--lengths", "20,5,1"],
        {"key_value_seq_lengths": [20, 5, 1], "query_seq_lengths": [20, 5, 1]}),
    "lengths of a file": (HEADS, ["--lengths", "numbers.npz:keys", "--query-lengths", "queries.npy"],
        {"key_value_seq_lengths": LENGTHS, "query_seq_lengths": QUERIES}),
    "one start": (SAME, ["--starts", "9", "--causal"], {"is_causal": True, "key_value_seq_starts": 9}),
    "starts": (HEADS, ["--starts", "0,40,21"], {"key_value_seq_starts": [0, 40, 21]}),
    "starts and lengths": (BATCH, ["--starts", "3,0,21", "--lengths", "40,10,12", "--causal", "--window", "20", "0"],
        {"key_value_seq_starts": [3, 0, 21], "key_value_seq_lengths": [40, 10, 12], "is_causal": "lower_right",
         "window_size": (20, 0)}),
    "starts of a file": (HEADS, ["--starts", "queries.npy"], {"key_value_seq_starts": QUERIES}),
    "softcap": (HEADS, ["--softcap", "0.7"], {"softcap": 0.7}),
    "alibi": (SAME, ["--alibi", "--causal"], {"is_causal": True, "alibi_slopes": SLOPES}),
    "sinks": (HEADS, ["--sinks", "sinks.npy"], {"sinks": SINKS}),
    "sinks of each head": (HEADS, ["--sinks", "numbers.npz"], {"sinks": SINKS[0]}),
    "heads of three dimensions": ([(6, 20, 8), (2, 33, 8), (2, 33, 8)], ["--enable-gqa", "--lengths", "30"],
        {"enable_gqa": True, "key_value_seq_lengths": 30}),
    "everything": (HEADS,
        ["--causal", "--window", "12", "0", "--lengths", "40,0,21", "--query-lengths", "33,5,20", "--softcap", "2",
         "--alibi", "--sinks", "sinks.npy", "--scale", "0.4", "--dropout", "0.3", "--seed", "4"],
        {"is_causal": "lower_right", "window_size": (12, 0), "key_value_seq_lengths": LENGTHS, "softcap": 2.0,
         "query_seq_lengths": QUERIES, "alibi_slopes": SLOPES, "sinks": SINKS, "scale": 0.4, "dropout_p": 0.3,
         "rng": 4}),
}  # fmt: skip


@pytest.mark.promise("attend")
@pytest.mark.parametrize("slicing", ["whole", "thin"])
@pytest.mark.parametrize("case", CASES)
def test_options_give_the_bits_of_the_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str, slicing: str
) -> None:
    monkeypatch.setattr(attend, "FIRST_SLICE", 1e9 if slicing == "whole" else 1.0)
    monkeypatch.setattr(attend, "SLICE_SECONDS", 0.25 if slicing == "whole" else 0.0)
    shapes, words, options = CASES[case]
    q, k, v = save(*shapes)
    np.save("queries.npy", QUERIES.astype(np.uint8))
    np.save("sinks.npy", SINKS)
    np.savez("numbers.npz", keys=LENGTHS, sinks=SINKS[0])
    assert attend_files(*words, "--weights", "w.npy", "--lse", "lse.npy") == 0
    assert capsys.readouterr().err == ""
    expected = cattn.scaled_dot_product_attention(q, k, v, return_weights=True, return_lse=True, **options)
    np.testing.assert_array_equal(np.load("out.npy"), expected.out)
    np.testing.assert_array_equal(np.load("w.npy"), expected.weights)
    np.testing.assert_array_equal(np.load("lse.npy"), expected.lse)


@pytest.mark.parametrize("word", ["bfloat16", "bfloat16_tiles"])
def test_products_of_bfloat16_are_for_float32(word: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = save(*HEADS)
    options = ("--compute-dtype", word, "--causal")
    assert attend_files(*options) == 0
    np.testing.assert_array_equal(np.load("out.npy"), cattn.causal_attention(q, k, v, compute_dtype=word))
    capsys.readouterr()
    np.save("q.npy", q.astype(np.float64))
    assert attend_files(*options) == 2
    assert f"compute_dtype='{word}' is for float32 and bfloat16, and query, key" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("shapes", [((3, 2, 40, 1), (2, 40, 1)), ((8,), (3, 1, 1, 5)), ((), None), (None, (40, 1))])
@pytest.mark.parametrize("slicing", ["whole", "thin"])
def test_quantized_keys_and_values_have_scales(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, shapes: Any,
    slicing: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(attend, "FIRST_SLICE", 1e9 if slicing == "whole" else 1.0)
    monkeypatch.setattr(attend, "SLICE_SECONDS", 0.25 if slicing == "whole" else 0.0)
    arrays: list[Any] = [array.astype(dtype) for array in save(*HEADS)]
    words: list[str] = []
    for i, (name, shape) in enumerate(zip(("key", "value"), shapes, strict=True), 1):
        if shape is not None:
            scale = np.exp(np.random.default_rng(i).standard_normal(shape)) / 30
            arrays[i] = cattn.Quantized((arrays[i] * 30).astype(np.int8), scale)
            np.save(f"{name}_scale.npy", scale)
            words += [f"--{name}-scale", f"{name}_scale.npy"]
    for name, array in zip("qkv", arrays, strict=True):
        np.save(f"{name}.npy", array.values if isinstance(array, cattn.Quantized) else array)
    assert attend_files(*words, "--causal", "--weights", "w.npy") == 0
    assert capsys.readouterr().err == ""
    expected = cattn.scaled_dot_product_attention(*arrays, is_causal="lower_right", return_weights=True)
    np.testing.assert_array_equal(np.load("out.npy"), expected.out)
    np.testing.assert_array_equal(np.load("w.npy"), expected.weights)


def test_one_archive_holds_all_arrays_and_scales(folder: Path) -> None:
    q, k, v = np.ones((3, 4), np.float32), np.ones((5, 4), np.int8), np.ones((5, 4), np.int8)
    np.savez("all.npz", q=q, k=k, v=v, key_scale=np.float32(0.5), value_scale=np.full((5, 1), 0.25, np.float32))
    assert main(["attend", "all.npz", "-o", "out.npy", "--key-scale", "all.npz", "--value-scale", "all.npz"]) == 0
    np.testing.assert_array_equal(np.load("out.npy"), np.full((3, 4), 0.25, np.float32))


@pytest.mark.parametrize("number", ["-1e-3", "-.5", "-1", "-2.", "-1_0", "-1E+2"])
def test_a_negative_number_may_follow_its_option(folder: Path, capsys: pytest.CaptureFixture[str], number: str) -> None:
    q, k, v = save(*FLAT)
    for words in (["--scale", number], [f"--scale={number}"], ["--sc", number]):
        assert attend_files(*words) == 0
        expected = cattn.scaled_dot_product_attention(q, k, v, scale=float(number))
        np.testing.assert_array_equal(np.load("out.npy"), expected)
    capsys.readouterr()
    for command, option, says in (
        ("attend", "--softcap", "softcap"),
        ("attend", "--dropout", r"--dropout must be in"),
        ("statistics", "--softcap", "softcap"),
    ):  # fmt: skip
        files = ["q.npy", "k.npy"] if command == "statistics" else ["q.npy", "k.npy", "v.npy", "-o", "out.npy"]
        assert main([command, *files, option, number]) == 2
        assert re.search(f"{says}.*got {re.escape(str(float(number)))}", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["attend", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--scale", "-inf"], "scale must be finite, got -inf"),
        (["attend", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--scale", "-nan"], "scale must be finite, got nan"),
        (["attend", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--lengths", "-1,2,3"], "_lengths must be .* got -1"),
        (["attend", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--starts", "-1,2,3"], "_starts must be .* got -1"),
        (["attend", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--seed", "-5", "--dropout", ".1"], "--seed .* got -5"),
        (["attend", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--threads", "-2"], "--threads .* got -2"),
        (["statistics", "q.npy", "k.npy", "--top-k", "-3"], "top_k must be at least 0, got -3"),
        (["plot", "q.npy", "-o", "o.png", "--heads", "-1,2"], "--heads must be .* got -1,2"),
        (["plot", "q.npy", "-o", "o.png", "--dpi", "-5"], "--dpi must be .* got -5"),
        (["view", "q.npy", "-o", "o.html", "--entry", "-1"], "--entry must be .* got -1"),
    ],
)
def test_a_negative_number_that_is_refused_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    if words[0] == "plot":
        pytest.importorskip("matplotlib")
    save(*HEADS)
    assert main(words) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_window_that_is_ambiguous_warns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(*HEADS)
    assert attend_files("--window", "4", "2") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(r"cattn: warning: window_size with 33 queries and 40 keys .* give query_offset=7", line)
    assert attend_files("--window", "4", "2", "--causal") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "41,0,1"], r"key_value_seq_lengths must be between 0 and 40, got 41.*--lengths 41,0,1"),
        (["--lengths=-1,0,1"], "key_value_seq_lengths must be between 0 and 40, got -1"),
        (["--lengths", "1,2"], r"key_value_seq_lengths has shape \(2,\), which does not broadcast"),
        (["--lengths", "1,x"], "--lengths must be numbers such as 5,3, or a file of them: 1,x: No such file"),
        (["--lengths", f"1,2,{10**30}"], r"--lengths must hold numbers below 2\*\*63, got 1,2,1000"),
        (["--lengths", "9" * 5000], r"--lengths must hold numbers below 2\*\*63, got 999"),
        (["--lengths", "q.npy"], "--lengths must hold integers, got float32"),
        (["--query-lengths", "1,2,34"], "query_seq_lengths must be between 0 and 33, got 34"),
        (["--starts", "1,2,41"], "key_value_seq_starts must be between 0 and 40, got 41.*--starts 1,2,41"),
        (["--starts", "1.5"], "--starts must be numbers such as 5,3"),
        (["--query-lengths", "--causal"], "--query-lengths"),
        (["--window", "-2", "0"], "window_size must be at least -1, got -2"),
        (["--window", "3"], "--window: expected 2 arguments"),
        (["--softcap", "-1"], "softcap"),
        (["--softcap", "nan"], "softcap"),
        (["--sinks", "sinks.npy"], r"sinks has shape \(7,\)"),
        (["--query-offset", str(2**70)], "query_offset"),
        (["--key-scale", "sinks.npy"], "key with --key-scale: values has dtype float32, wanted int8.*k.npy, sinks.npy"),
        (["--value-scale", "none.npy"], "none.npy: No such file"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    save(*HEADS)
    np.save("sinks.npy", np.ones(7))
    assert attend_files(*words) == 2
    captured = capsys.readouterr()
    assert re.search(message, captured.err), captured.err
    assert "Traceback" not in captured.err
    assert sorted(os.listdir()) == ["k.npy", "q.npy", "sinks.npy", "v.npy"]


def test_alibi_needs_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(*BATCH)
    assert attend_files("--alibi") == 2
    assert "--alibi needs heads on axis -3 of four dimensions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "argument", "file"),
    [("--output", "query", "q.npy"), ("--weights", "value", "v.npy"), ("--lse", "attn_mask", "mask.npy"),
     ("--weights", "--lengths", "lengths.npz"), ("--lse", "sinks", "sinks.npy"), ("--lse", "bias", "bias.npz")],
)  # fmt: skip
def test_no_output_replaces_an_input_without_force(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, argument: str, file: str
) -> None:
    save(*HEADS)
    np.save("mask.npy", np.ones((33, 40), bool))
    np.save("sinks.npy", SINKS)
    np.savez("lengths.npz", lengths=LENGTHS)
    np.savez("bias.npz", x=np.zeros((33, 40), np.float32))
    words = ["--mask", "mask.npy", "--lengths", "lengths.npz", "--sinks", "sinks.npy", "--bias", "bias.npz:x"]
    before = {name: Path(name).read_bytes() for name in os.listdir()}
    assert attend_files(*words, option, os.path.join("..", folder.name, file)) == 2
    assert f"{option}: {file} is the input file of {argument}; write to another file" in capsys.readouterr().err
    assert {name: Path(name).read_bytes() for name in os.listdir()} == before
    assert attend_files(*words, option, file, "--force") == 0
    assert Path(file).read_bytes() != before[file]


# ---- the names of arrays in archives ---------------------------------------------------------------------------------
def test_archives_may_use_short_names(folder: Path) -> None:
    q, k, v = save((6, 4), (6, 4), (6, 4))
    mask = np.tri(6, dtype=bool)
    np.savez("qkv.npz", q=q, k=k, v=v, other=np.zeros(3))
    np.savez("both.npz", q=k, query=q, key=k, v=v)
    np.savez("masks.npz", mask=mask, other=~mask)
    expected = cattn.causal_attention(q, k, v)
    for name in ("qkv.npz", "both.npz"):
        assert main(["attend", name, "-o", "out.npy", "--mask", "masks.npz"]) == 0
        np.testing.assert_array_equal(np.load("out.npy"), expected)


def test_an_archive_of_one_array_needs_no_name(folder: Path) -> None:
    q, k, v = save((6, 4), (6, 4), (6, 4))
    np.savez("one.npz", q)
    assert main(["attend", "one.npz", "k.npy", "v.npy", "-o", "out.npy"]) == 0
    np.testing.assert_array_equal(np.load("out.npy"), cattn.scaled_dot_product_attention(q, k, v))


def test_other_names_are_refused_with_the_command_that_works(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = save((6, 4), (6, 4), (6, 4))
    np.savez("arrays.npz", q, k, v)
    save_arrays("four.npz", {"a": q, "b": k, "c": v, "d": v})
    assert main(["attend", "arrays.npz", "-o", "out.npy"]) == 2
    message = capsys.readouterr().err
    assert "arrays.npz has no array query, key, value; it has arr_0, arr_1, arr_2" in message
    words = re.search(r"or say which array to read: (.*)", message)[1].split()
    assert main(["attend", *words, "-o", "out.npy"]) == 0
    np.testing.assert_array_equal(np.load("out.npy"), cattn.scaled_dot_product_attention(q, k, v))
    assert main(["attend", "four.npz", "-o", "out.npy"]) == 2
    assert "or q, k, v; or say which array to read: four.npz:NAME" in capsys.readouterr().err
    assert main(["attend", "q.npy", "k.npy", "v.npy", "--mask", "four.npz", "-o", "out.npy"]) == 2
    assert "has no array attn_mask; it has a, b, c, d. Name arrays attn_mask, or mask" in capsys.readouterr().err


def test_a_misspelt_option_gets_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy", "--casual", "--zzz"]) == 2
    assert "unrecognized arguments: --casual --zzz: did you mean --causal?" in capsys.readouterr().err
