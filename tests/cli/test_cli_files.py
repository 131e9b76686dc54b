"""The files of ``python -m cattn attend``: formats, dtypes, names that cannot be written, a closed output stream."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_cli import attend_files, leftovers, save

import cattn
from cattn.__main__ import main
from cattn.nn._files import load_arrays
from support import assert_same_bits
from support.processes import run_command


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_attend_reads_and_writes_safetensors(folder: Path, kind: type) -> None:
    files = pytest.importorskip("safetensors.numpy")
    q, k, v = (x.astype(kind) for x in save((6, 4), (6, 4), (6, 4)))
    files.save_file({"query": q, "key": k, "value": v, "other": np.zeros(3)}, "qkv.safetensors")
    expected = cattn.causal_attention(q, k, v)
    assert main(["attend", "qkv.safetensors", "-o", "out.safetensors", "--causal"]) == 0
    assert_same_bits(load_arrays("out.safetensors")["out"], expected)
    several = ["qkv.safetensors:query", "qkv.safetensors", "qkv.safetensors:value"]
    assert main(["attend", *several, "-o", "again.safetensors", "--causal"]) == 0
    assert_same_bits(load_arrays("again.safetensors")["out"], expected)
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


def test_attend_refuses_a_thread_count_that_overflows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((5, 4), (6, 4), (6, 3))
    assert attend_files("--threads", str(10**20)) == 2
    assert "--threads: n must be" in capsys.readouterr().err


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


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="no posix_fallocate")
def test_attend_names_the_file_that_has_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    save((5, 4), (6, 4), (6, 3))
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert attend_files() == 1
    assert "No space left on device" in (message := capsys.readouterr().err)
    assert "out.npy" in message


@pytest.mark.parametrize("option", ["--output", "--weights", "--lse"])
def test_attend_refuses_an_empty_name(option: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((5, 4), (6, 4), (6, 3))
    assert attend_files(option, "") == 2
    assert f"{option} must name a file, got ''" in capsys.readouterr().err


def test_attend_refuses_a_mask_of_many_dimensions(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((5, 4), (6, 4), (6, 3))
    np.save("mask.npy", np.ones((1,) * 38 + (5, 6), bool))
    assert attend_files("--mask", "mask.npy") == 2
    assert "which does not broadcast to (5, 6)" in capsys.readouterr().err


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


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_attend_refuses_a_pipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Opening one would wait for a writer."""
    save((5, 4), (6, 4), (6, 3))
    os.mkfifo("pipe.npy")
    assert main(["attend", "pipe.npy", "k.npy", "v.npy", "-o", "out.npy"]) == 2
    assert "pipe.npy is not a regular file" in capsys.readouterr().err


def test_attend_prints_a_name_that_the_terminal_cannot_show(folder: Path) -> None:
    save((5, 4), (6, 4), (6, 3))
    done = run_command(
        [sys.executable, "-m", "cattn", "attend", "q.npy", "k.npy", "v.npy", "-o", "\N{SNOWMAN}.npy"],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cattn.__file__).parents[1]), "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\\u2603.npy: (5, 3) float32" in done.stdout
