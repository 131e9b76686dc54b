"""``python -m cattn attend``, ``example``, ``view`` and ``statistics``: formats and names of files, options, pipes."""

import errno
import io
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_cli import attend_files, leftovers, save

import cattn
from cattn.__main__ import main
from cattn._cli import attend, walk
from cattn._cli.attend import _Job
from cattn.nn._files import load_arrays, save_arrays
from support import assert_same_bits
from support.processes import run_command


@pytest.mark.parametrize(
    ("suffix", "kind"),
    [("npz", np.float32), ("npz", np.float16)]
    + [("safetensors", kind) for kind in (np.float32, np.float64, np.float16, ml_dtypes.bfloat16)],
)
def test_attend_reads_and_writes_archives(folder: Path, suffix: str, kind: type) -> None:
    pytest.importorskip("safetensors")
    q, k, v = (x.astype(kind) for x in save((6, 4), (6, 4), (6, 4)))
    save_arrays(f"qkv.{suffix}", {"query": q, "key": k, "value": v, "other": np.zeros(3)})
    expected = cattn.causal_attention(q, k, v)
    for files in ([""], [":query", "", ":value"]):
        names = [f"qkv.{suffix}{name}" for name in files]
        assert main(["attend", *names, "-o", f"out.{suffix}", "--causal"]) == 0
        assert_same_bits(load_arrays(f"out.{suffix}")["out"], expected)
    assert leftovers(folder) == []


def test_attend_writes_bfloat16_only_to_safetensors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy's own formats would keep the bytes of bfloat16 and lose its dtype."""
    x = np.ones((6, 4), ml_dtypes.bfloat16)
    pytest.importorskip("safetensors.numpy").save_file({"query": x, "key": x, "value": x}, "qkv.safetensors")
    for name in ("out.npy", "out.npz"):
        assert main(["attend", "qkv.safetensors", "-o", name]) == 2
        assert f"{name[3:]} files cannot hold bfloat16, .safetensors files can" in capsys.readouterr().err
    assert os.listdir() == ["qkv.safetensors"]


def test_attend_names_the_extra_if_safetensors_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save((6, 4), (6, 4), (6, 4))
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    Path("in.safetensors").write_bytes(bytes(8) + b"{}")
    for arguments in (["in.safetensors", "-o", "out.npy"], ["q.npy", "k.npy", "v.npy", "-o", "out.safetensors"]):
        assert main(["attend", *arguments]) == 2
        assert "pip install 'cattn[safetensors]'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.npy", "out.npz", "out.safetensors"])
def test_attend_of_halves_writes_halves_and_a_float32_lse(folder: Path, name: str) -> None:
    """In every file format, `--weights` and `--lse` included."""
    q, k, v = save((2, 5, 4), (2, 6, 4), (2, 6, 3), dtype=np.float16)
    assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", "o.npy", "--lse", name, "--weights", "w.npy"]) == 0
    expected = cattn.scaled_dot_product_attention(q, k, v, return_weights=True, return_lse=True)
    lse = np.load(name) if name.endswith(".npy") else load_arrays(name)["lse"]
    for result, wanted in ((np.load("o.npy"), expected.out), (np.load("w.npy"), expected.weights), (lse, expected.lse)):
        assert_same_bits(result, wanted)


@pytest.mark.parametrize("name", ["out.npy", "out.npz", "out.safetensors"])
def test_attend_without_queries_writes_an_empty_array(folder: Path, name: str) -> None:
    save((2, 0, 4), (2, 6, 4), (2, 6, 3))
    assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", name]) == 0
    out = np.load(name) if name.endswith(".npy") else load_arrays(name)["out"]
    assert out.shape == (2, 0, 3)
    assert leftovers(folder) == []


def test_attend_writes_files_with_the_longest_names(folder: Path) -> None:
    q, k, v = save((5, 4), (6, 4), (6, 3))
    for name in ("n" * 251 + ".npy", "n" * 251 + ".npz"):
        assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", name]) == 0
    assert_same_bits(np.load("n" * 251 + ".npy"), cattn.scaled_dot_product_attention(q, k, v))


def test_attend_names_the_file_that_it_cannot_write(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((5, 4), (6, 4), (6, 3))
    name = "n" * 252 + ".npy"  # one character more than a file name may have
    assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", name]) == 1
    message = capsys.readouterr().err
    assert name in message
    assert ".part" not in message


@pytest.mark.promise("whole files")
@pytest.mark.skipif(sys.platform == "win32" or not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize(("listener", "says"), [("> /dev/full", "No space left"), ("| true", "")])
def test_attend_succeeds_if_nobody_reads_its_output(folder: Path, listener: str, says: str) -> None:
    """The result is written. It is no failure if the closing line cannot be printed."""
    q, k, v = save((5, 4), (6, 4), (6, 3))
    package = Path(cattn.__file__).parents[1]
    done = run_command(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m cattn attend q.npy k.npy v.npy -o o.npy {listener}"],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(package)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert_same_bits(np.load("o.npy"), cattn.scaled_dot_product_attention(q, k, v))


# ---- several outputs, and names that cannot be used ------------------------------------------------------------------
def test_attend_replaces_all_files_or_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save((5, 4), (6, 4), (6, 3))
    Path("out.npy").write_text("former")
    replace = os.replace

    def failing(source: Path, target: Path) -> None:
        if target.name == "lse.npz" and source.suffix == ".part":
            raise PermissionError(1, "Operation not permitted")
        replace(source, target)

    for link in (os.link, None):
        if link is None:  # a file system without hard links
            monkeypatch.setattr(os, "link", lambda *_: failing(Path(".part"), Path("lse.npz")))
        monkeypatch.setattr(os, "replace", failing)
        assert attend_files("--weights", "weights.npy", "--lse", "lse.npz") == 1
        assert "lse.npz" in capsys.readouterr().err
        assert Path("out.npy").read_text() == "former"
        assert sorted(os.listdir()) == ["k.npy", "out.npy", "q.npy", "v.npy"]
        monkeypatch.setattr(os, "replace", replace)
    assert attend_files("--weights", "weights.npy", "--lse", "lse.npz") == 0
    assert sorted(os.listdir()) == ["k.npy", "lse.npz", "out.npy", "q.npy", "v.npy", "weights.npy"]
    assert np.load("out.npy").shape == (5, 3)


def test_attend_takes_files_on_both_sides_of_an_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = save((6, 4), (6, 4), (6, 3))
    assert main(["attend", "q.npy", "--causal", "k.npy", "--threads", "1", "v.npy", "-o", "out.npy"]) == 0
    assert_same_bits(np.load("out.npy"), cattn.causal_attention(q, k, v))
    assert main(["attend", "q.npy", "--bogus", "k.npy", "v.npy", "-o", "out.npy"]) == 2
    assert "unrecognized arguments: --bogus" in capsys.readouterr().err


WRITES = {
    "attend": ["attend", "q.npy", "k.npy", "v.npy", "-o", "{}/out.npy"],
    "attend to an archive": ["attend", "q.npy", "k.npy", "v.npy", "-o", "{}/out.npz"],
    "view": ["view", "w.npy", "-o", "{}/out.html"],
    "plot": ["plot", "w.npy", "-o", "{}/out.png"],
    "statistics": ["statistics", "q.npy", "k.npy", "-o", "{}/out.npz", "--quiet"],
    "example": ["example", "{}"],
}


@pytest.mark.parametrize("place", ["read-only", "no permission"])
@pytest.mark.parametrize("words", WRITES.values(), ids=WRITES)
def test_a_place_where_nothing_can_be_written_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], place: str
) -> None:
    """A read-only file system also refuses to delete the temporary file that it did not let be made."""
    if words[0] == "plot":
        pytest.importorskip("matplotlib")
    save((5, 4), (6, 4), (6, 3))
    np.save("w.npy", np.full((5, 6), 1 / 6))
    os.mkdir("place")
    error = (
        OSError(errno.EROFS, os.strerror(errno.EROFS)) if place == "read-only" else PermissionError(13, "Permission")
    )

    def refuse(path: Any, *_: Any, **__: Any) -> Any:
        if ".part" in str(path):
            raise type(error)(error.errno, error.strerror, str(path))
        raise AssertionError(path)

    monkeypatch.setattr(os, "open", refuse)
    if place == "read-only":
        monkeypatch.setattr(os, "unlink", refuse)
        monkeypatch.setattr(Path, "unlink", refuse)
    assert main([word.format("place") for word in words]) == 1
    message = capsys.readouterr().err
    assert os.path.join("place", "out." if words[0] != "example" else "q.npy") in message
    assert ".part" not in message
    assert os.listdir("place") == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
@pytest.mark.parametrize(
    "words",
    [["attend", "q.npy", "k.npy", "v.npy", "-o", "-"], ["view", "w.npy", "-o", "-"], ["plot", "w.npy", "-o", "-"],
     ["statistics", "q.npy", "k.npy"], ["info"], []],
)  # fmt: skip
def test_a_standard_output_without_room_is_named(folder: Path, words: list[str]) -> None:
    if "plot" in words:
        pytest.importorskip("matplotlib")
    save((5, 4), (6, 4), (6, 3))
    np.save("w.npy", np.full((5, 6), 1 / 6))
    with open("/dev/full", "w") as full:
        done = run_command([sys.executable, "-m", "cattn", *words], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert "No space left on device: 'standard output'" in done.stderr


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give a link away")
def test_no_link_of_another_user_is_followed_where_everybody_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save((5, 4), (6, 4), (6, 3))
    Path("precious.npy").write_text("precious")
    (folder / "shared").mkdir()
    os.chmod("shared", 0o1777)
    os.symlink(folder / "precious.npy", "shared/out.npy")
    os.chown("shared/out.npy", 12345, -1, follow_symlinks=False)
    assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", "shared/out.npy"]) == 1
    assert "a link that another user has laid: 'shared/out.npy'" in capsys.readouterr().err
    os.chown("shared/out.npy", 0, -1, follow_symlinks=False)
    assert Path("precious.npy").read_text() == "precious"
    assert main(["attend", "q.npy", "k.npy", "v.npy", "-o", "shared/out.npy"]) == 0
    assert np.load("precious.npy").shape == (5, 3)


def test_attend_prints_a_name_that_the_terminal_cannot_show(folder: Path) -> None:
    save((5, 4), (6, 4), (6, 3))
    done = run_command(
        [sys.executable, "-m", "cattn", "attend", "q.npy", "k.npy", "v.npy", "-o", "\N{SNOWMAN}.npy"],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cattn.__file__).parents[1]), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\\u2603.npy: (5, 3) float32" in done.stdout


# ---- options that choose keys and change scores, and names of arrays in archives -------------------------------------
HEADS = [(3, 4, 33, 8), (3, 2, 40, 8), (3, 2, 40, 5)]
SAME = [(3, 4, 37, 8), (3, 2, 37, 8), (3, 2, 37, 5)]
BATCH = [(3, 33, 8), (3, 40, 8), (3, 40, 8)]
FLAT = [(33, 8), (40, 8), (40, 8)]
SLOPES, SINKS = cattn.get_alibi_slopes(4), np.linspace(-1, 1, 12).reshape(3, 4)
LENGTHS, QUERIES = np.array([40, 0, 21]), np.array([33, 5, 20])
MASK = np.random.default_rng(1).random((3, 1, 33, 40)) < 0.8
BIAS = np.random.default_rng(2).standard_normal((1, 40), np.float32)

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
    "mask and bias": (HEADS, ["--mask", "mask.npy", "--bias", "numbers.npz:slope"], {"attn_mask": MASK, "bias": BIAS}),
    "bfloat16": (HEADS, ["--compute-dtype", "bfloat16"], {"compute_dtype": "bfloat16"}),
    "bfloat16 in tiles": (HEADS, ["--compute-dtype", "bfloat16_tiles"], {"compute_dtype": "bfloat16_tiles"}),
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
    np.save("mask.npy", MASK)
    np.savez("numbers.npz", keys=LENGTHS, sinks=SINKS[0], slope=BIAS)
    assert attend_files(*words, "--weights", "w.npy", "--lse", "lse.npy") == 0
    assert capsys.readouterr().err == ""
    expected = cattn.scaled_dot_product_attention(q, k, v, return_weights=True, return_lse=True, **options)
    np.testing.assert_array_equal(np.load("out.npy"), expected.out)
    np.testing.assert_array_equal(np.load("w.npy"), expected.weights)
    np.testing.assert_array_equal(np.load("lse.npy"), expected.lse)


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


# ---- example, view and statistics ------------------------------------------------------------------------------------
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
    if (Path(cattn.__file__).parent / "_view/core.wasm").exists():
        assert main(["view", "w.npy", "-o", "c.html", "--entry", "1", "--live", "q.npy", "k.npy", "v.npy"]) == 0
        assert '"causal": true' in Path("c.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["w.npy", "-o", "a.png"], "a.png: the name must end in .html"),
        (["w.npy", "-o", "none/a.html"], "there is no such directory"),
        (["w.npy", "-o", "a.html", "--entry", "3"], r"--entry must be from 0 to 1 for shape (2, 3, 6, 6), got 3"),
        (["w.npy", "-o", "a.html", "--entry", "0", "--layers"], "--entry and --layers do not go together"),
        (["w.npy", "-o", "a.html", "--live", *["w.npy"] * 4], "give query, key and value, or one file of all, got 4"),
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


def stream(*arrays: np.ndarray) -> bytes:
    """Return arrays in the .npy format, one after the other."""
    file = io.BytesIO()
    for array in arrays:
        np.save(file, array)
    return file.getvalue()


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """A function that runs a command in this process, whose standard input has these bytes; it returns what it says."""

    def command(*words: str, given: bytes = b"", status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given)))
        assert main([*words]) == status
        return tuple(capsys.readouterr())

    return command


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ">f8"])
def test_a_pipe_holds_several_arrays_in_the_order_of_the_command_line(folder: Path, piped: Any, dtype: Any) -> None:
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
        assert piped("attend", *words, "-o", "out.npy", "--quiet", given=stream(*arrays)) == ("", "")
        np.testing.assert_array_equal(np.load("out.npy"), expected)
    table = piped("statistics", "-", "-", "--entry", "1", given=stream(query, key))
    np.save("q.npy", query)
    np.save("k.npy", key)
    assert piped("statistics", "q.npy", "k.npy", "--entry", "1") == table
    assert piped("statistics", "-", "-", "--entry", "1", given=stream(query, query)) != table


def test_a_pipe_that_is_not_what_the_command_reads_is_named(folder: Path, piped: Any) -> None:
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
        _, message = piped("attend", *words, "-o", "out.npy", given=given, status=2)
        assert f"standard input {says}" in message
        assert "cattn-" not in message
    for words in (("view", "-", "-o", "a.html"), ("plot", "-", "-o", "a.png"), ("statistics", "-", "k.npy")):
        assert "standard input is empty" in piped(*words, status=2)[1]
        assert "standard input goes on after 1 array" in piped(*words, given=stream(query, key), status=2)[1]
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
