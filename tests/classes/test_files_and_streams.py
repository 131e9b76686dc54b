"""Files that are replaced, names and texts of strangers, dtypes that NumPy's formats lose, closed streams, pickles."""

import os
import pickle
import re
import stat
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from test_state_dict import mha

import cattn
from cattn.__main__ import main
from cattn.nn._files import load_arrays, replacing, save_arrays
from support import find
from support.processes import run_command

WEIGHTS = np.eye(3, dtype=np.float32)
posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions and shells")


def attend(*arguments: str) -> None:
    np.savez("qkv.npz", q=WEIGHTS, k=WEIGHTS, v=WEIGHTS)
    assert main(["attend", "qkv.npz", "--quiet", *arguments]) == 0


def plot(name: str) -> None:
    pytest.importorskip("matplotlib")
    np.save("w.npy", WEIGHTS)
    assert main(["plot", "w.npy", "-o", name, "--quiet"]) == 0


WRITERS: dict[str, Callable[[str], object]] = {
    "save.npz": lambda name: mha().save(name),
    "save.safetensors": lambda name: mha().save(name),
    "view.html": lambda name: cattn.view_attention(WEIGHTS).save(name),
    "out.npy": lambda name: attend("-o", name),
    "out.npz": lambda name: attend("-o", name, "--force"),
    "out.safetensors": lambda name: attend("-o", name),
    "weights.npy": lambda name: attend("-o", "o.npy", "--weights", name),
    "lse.npz": lambda name: attend("-o", "o.npy", "--lse", name),
    "plot.png": plot,
}


# ---- files that are replaced -----------------------------------------------------------------------------------------
@posix
@pytest.mark.parametrize("name", WRITERS)
def test_a_replaced_file_keeps_its_mode(folder: Path, name: str) -> None:
    """A file of mode 0600 stays secret, a read-only one read-only; a new file has the mode of all new files."""
    if name.endswith(".safetensors"):
        pytest.importorskip("safetensors")
    WRITERS[name](name)
    Path("new").touch()
    assert os.stat(name).st_mode == os.stat("new").st_mode
    for mode in (0o600, 0o640, 0o444, 0o666):
        os.chmod(name, mode)
        before = os.stat(name)
        WRITERS[name](name)
        after = os.stat(name)
        assert stat.S_IMODE(after.st_mode) == mode
        assert after.st_ino != before.st_ino
        assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)


@posix
def test_nobody_else_reads_what_will_replace_a_file(folder: Path) -> None:
    Path("x.npz").touch(0o644)
    with replacing(Path("x.npz")) as temporary:
        assert stat.S_IMODE(temporary.stat().st_mode) == 0o600
        temporary.write_text("secret")
    assert (stat.S_IMODE(os.stat("x.npz").st_mode), Path("x.npz").read_text()) == (0o644, "secret")


@posix
def test_a_group_that_cannot_be_kept_gets_no_more_than_everybody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("x.npz").touch()
    os.chmod("x.npz", 0o664)
    found = os.stat

    def with_other_group(path: object) -> object:
        entry = list(found(path))
        entry[5] += path == Path("x.npz")
        return os.stat_result(entry)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch, replacing(Path("x.npz")):
        patch.setattr(os, "stat", with_other_group)
        patch.setattr(os, "chown", refuse)
    assert stat.S_IMODE(os.stat("x.npz").st_mode) == 0o644


@pytest.mark.skipif(not hasattr(os, "setxattr"), reason="the system has no extended attributes")
def test_a_replaced_file_keeps_its_extended_attributes(folder: Path) -> None:
    Path("x.npz").touch()
    try:
        os.setxattr("x.npz", "user.cattn", b"kept")
    except OSError:
        pytest.skip("the file system has no extended attributes")
    save_arrays("x.npz", {"a": WEIGHTS})
    assert os.getxattr("x.npz", "user.cattn") == b"kept"


# ---- names and texts of strangers ------------------------------------------------------------------------------------
HOSTILE = "a\x1b[2J\r\ncattn: all is well\x9b31m\u202e"


def hostile_npz(content: bytes | None = None) -> str:
    file = BytesIO()
    np.save(file, WEIGHTS)
    with zipfile.ZipFile("hostile.npz", "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"{HOSTILE}.npy"), file.getvalue() if content is None else content)
        archive.writestr("W_query.weight.npy", file.getvalue())
    return "hostile.npz"


@pytest.mark.parametrize("damaged", [False, True])
def test_names_in_archives_do_not_reach_the_terminal(
    folder: Path, capsys: pytest.CaptureFixture[str], damaged: bool
) -> None:
    file = hostile_npz(b"\x93NUMPY" if damaged else None)
    spec = f"{file}:{HOSTILE}" if damaged else file
    assert main(["attend", spec, file, file, "-o", "o.npy"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("\n")
    assert error[:-1].isprintable()
    assert damaged or r"\x1b[2J\r\ncattn: all is well\x9b31m\u202e" in error
    with pytest.raises(ValueError, match=r"\\x1b\[2J" if not damaged else "damaged") as caught:
        mha().load(file)
    assert str(caught.value).replace("\n    ", "").isprintable()


@posix
def test_names_that_are_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File names that are not UTF-8, in a folder of such a name, and tokens from them."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("safetensors")
    name = os.fsdecode(b"caf\xe9")
    try:
        os.mkdir(name)
    except OSError:
        pytest.skip("the file system takes UTF-8 only")
    os.chdir(name)
    for suffix in (".npz", ".safetensors"):
        save_arrays(name + suffix, {"query": WEIGHTS, "key": WEIGHTS, "value": WEIGHTS})
        assert main(["attend", name + suffix, "-o", f"o{name}{suffix}", "--weights", f"{name}.npy"]) == 0
        assert load_arrays(f"o{name}{suffix}")["out"].shape == (3, 3)
        assert capsys.readouterr().out.startswith(rf"ocaf\udce9{suffix}: (3, 3)")
    assert main(["plot", f"{name}.npy", "-o", f"{name}.svg", "--tokens", f"{name} b c", "--title", name]) == 0
    assert "caf\\udce9.svg: 3 queries" in capsys.readouterr().out
    view = cattn.view_attention(WEIGHTS, [name, "\ud83d", "\U0001f600"], layers=["\ude00"])
    view.save(f"{name}.html")
    text = Path(f"{name}.html").read_text("utf-8")
    assert "<title>caf\ufffd</title>" in text
    assert '["caf\ufffd", "\ufffd", "\U0001f600"]' in text
    assert view._repr_mimebundle_()


def test_a_file_of_tokens_has_one_on_each_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a byte order mark, and also where a token is a line break of another kind."""
    pytest.importorskip("matplotlib")
    np.save("w.npy", WEIGHTS)
    drawn = []
    real = cattn.plot_attention
    monkeypatch.setattr(cattn, "plot_attention", lambda w, tokens, **rest: drawn.append(tokens) or real(w, **rest))
    for text in ("a\n\u2028\nc\n", "\ufeffa\r\n\u2028\r\nc"):
        Path("tokens.txt").write_bytes(text.encode())
        assert main(["plot", "w.npy", "-o", "p.png", "--tokens", "@tokens.txt", "--quiet"]) == 0
    assert drawn == [["a", "\u2028", "c"]] * 2


# ---- dtypes that NumPy's formats lose --------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_a_dtype_that_a_file_has_lost_is_not_called_a_wrong_number(
    folder: Path, capsys: pytest.CaptureFixture[str], dtype: type
) -> None:
    x = WEIGHTS.astype(dtype)
    np.save("b.npy", x)
    np.savez("b.npz", W_query=x)
    message = f"holds elements of {x.itemsize} bytes without a dtype: .npy and .npz files lose bfloat16"
    for spec in ("b.npy", "b.npz"):
        assert main(["attend", spec, spec, spec, "-o", "o.npy"]) == 2
        assert f"{message}" in capsys.readouterr().err
        if spec == "b.npy":
            assert main(["plot", spec, "-o", "p.png"]) == 2
            assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match=rf"^b.npz: W_query {message}"):
        load_arrays("b.npz")
    with pytest.raises(ValueError, match=r"a: .npz files cannot hold (bfloat16|float8_e4m3fn), .safetensors files can"):
        save_arrays("new.npz", {"a": x})
    assert sorted(os.listdir()) == ["b.npy", "b.npz"]


# ---- closed streams --------------------------------------------------------------------------------------------------
@posix
@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (">&-", 0, ""),
        ("info >&-", 0, ""),
        ("info 2>&-", 0, ""),
        ("info | true", 1, ""),
        ("--help | true", 1, ""),
        ("info > /dev/full", 1, "cattn: error: [Errno 28] No space left on device: 'standard output'"),
        ("attend q.npy q.npy q.npy -o o.npy >&- 2>&-", 0, ""),
        ("attend nothing.npy q.npy q.npy -o o.npy 2>&-", 2, ""),
        ("attend nothing.npy q.npy q.npy -o o.npy 2>&1 >&- | true", 2, ""),
    ],
)
def test_closed_streams_give_no_traceback(folder: Path, command: str, code: int, says: str) -> None:
    """An error does not go to the other stream instead."""
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("the system has no device that is always full")
    np.save("q.npy", WEIGHTS)
    done = run_command(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} -m cattn {command}"], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(Path(cattn.__file__).parents[1]), "TERM": "xterm"},
    )  # fmt: skip
    assert done.stderr.strip() == says
    assert done.returncode == code or (done.returncode == 0 and "| true" in command)  # the reader may be late
    assert "cattn: error" not in done.stdout


# ---- pickles, and the modules that public objects name ---------------------------------------------------------------
def test_pickles_name_public_modules() -> None:
    """The names of private modules change: a pickle must not depend on them."""
    layer = cattn.MultiHeadAttention(4, 4, 8, dropout=0.1, num_heads=2, rng=1)
    x = np.zeros((2, 2))
    warning, explained = cattn.CausalAlignmentWarning("x"), cattn.explain(x, x, x)
    cache, generator = cattn.KVCache(2, 2, 3, 4), cattn.TorchGenerator(3)
    results = (cattn.AttentionOutput(1), warning, explained)
    for original in (layer, cattn.Linear(2, 2), cache, generator, cattn.num_threads(2), *results):
        content = pickle.dumps(original, protocol=0)
        assert not re.search(rb"cattn[.\w]*\._", content.replace(b"cattn.random\n_restored", b""))
        assert type(pickle.loads(content)) is type(original)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layer)).W_query.weight, layer.W_query.weight)


def test_public_objects_name_their_public_module() -> None:
    for name in {*cattn.__all__, *cattn.functional.__all__}:
        value = find(name)
        if name not in cattn.__all__:
            assert value.__module__ == "cattn.functional", name
            assert pickle.loads(pickle.dumps(value)) is value
        elif callable(value):
            assert value.__module__ == ("cattn.nn" if name in cattn.nn.__all__ else "cattn"), name
            assert pickle.loads(pickle.dumps(value)) is value


def test_completion_shows_public_names_only() -> None:
    for module in (cattn, cattn.nn, cattn.functional):
        shown = {name for name in dir(module) if not name.startswith("__")}
        extra = {"cache", "functional", "integrations", "nn", "random"} if module is cattn else set()
        assert shown == {name for name in module.__all__ if name != "__version__"} | extra
        assert all(hasattr(module, name) for name in dir(module))
