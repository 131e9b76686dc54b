"""The command line: its output, files that it accepts and refuses, no partly written files, the machine's report."""

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cattn
from cattn import _cattn
from cattn.__main__ import main
from cattn._cli import attend, info, messages
from cattn._cli.walk import run
from cattn.nn._files import save_arrays
from support import ROOT, interrupt_command, needs_links, start_command
from support.processes import MOST_SECONDS, Watch, cpu_seconds, finish, run_command

Say = Callable[..., int]
WINDOWS = sys.platform == "win32"


def save(*shapes: tuple[int, ...], dtype: type = np.float32, names: str = "qkv") -> list[np.ndarray]:
    """Save random arrays as q.npy, k.npy, v.npy and return them."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    for name, array in zip(names, arrays, strict=False):
        np.save(f"{name}.npy", array)
    return arrays


def attend_files(*arguments: str) -> int:
    return main(["attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy", *arguments])


def leftovers(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".part")]


def test_version_info_and_help_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"cattn {cattn.__version__}\n"
    assert main(["info"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["attend", "--help"]) == 0
    assert "lower_right, the default" in re.sub(r"\s+", " ", capsys.readouterr().out)
    assert main(["frobnicate"]) == 2
    assert "frobnicate" in capsys.readouterr().err


def test_output_to_a_closed_pipe_gives_no_traceback() -> None:
    """As in ``python -m cattn | true``."""
    command = [sys.executable, "-m", "cattn"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode != 0


# ---- attend: results -----------------------------------------------------------------------------------------------
SHAPES = {
    "one head": [(70, 8), (70, 8), (70, 5)],
    "batch": [(3, 33, 8), (3, 40, 8), (3, 40, 8)],
    "shared keys": [(3, 33, 8), (40, 8), (1, 40, 8)],
    "heads": [(2, 4, 33, 8), (2, 4, 33, 8), (2, 4, 33, 8)],
    "grouped heads": [(2, 6, 20, 8), (2, 2, 33, 8), (2, 2, 33, 8)],
    "five dimensions": [(2, 3, 4, 17, 8), (1, 3, 1, 17, 8), (2, 1, 4, 17, 8)],
    "cache": [(1, 4, 1, 16), (1, 4, 90, 16), (1, 4, 90, 16)],
    "no queries": [(2, 0, 8), (2, 5, 8), (2, 5, 8)],
    "no keys": [(2, 5, 8), (2, 0, 8), (2, 0, 8)],
}


@pytest.mark.promise("attend")
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("alignment", ["none", "lower_right", "upper_left"])
@pytest.mark.parametrize("slicing", ["whole", "thin"])
def test_attend_gives_the_bits_of_the_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: type, shapes: list, alignment: str, slicing: str
) -> None:
    """Computed whole or in thin slices, the results have the bits of a single call."""
    monkeypatch.setattr(attend, "FIRST_SLICE", 1e9 if slicing == "whole" else 1.0)
    monkeypatch.setattr(attend, "SLICE_SECONDS", 0.25 if slicing == "whole" else 0.0)
    q, k, v = save(*shapes, dtype=dtype)
    options = [] if alignment == "none" else ["--causal", alignment]
    assert attend_files("--weights", "w.npy", "--lse", "lse.npz", *options) == 0
    expected = cattn.scaled_dot_product_attention(
        q, k, v, is_causal=False if alignment == "none" else alignment, return_weights=True, return_lse=True
    )
    out = np.load("out.npy")
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, expected.out)
    np.testing.assert_array_equal(np.load("w.npy"), expected.weights)
    with np.load("lse.npz") as archive:
        np.testing.assert_array_equal(archive["lse"], expected.lse)
    assert leftovers(folder) == []


def test_attend_prints_a_fresh_seed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, k, v = save((5, 4), (5, 4), (5, 4))
    assert attend_files("--dropout", "0.5") == 0
    seed = int(re.search(r"dropout seed (\d+)", capsys.readouterr().out)[1])
    np.testing.assert_array_equal(
        np.load("out.npy"), cattn.scaled_dot_product_attention(q, k, v, dropout_p=0.5, rng=seed)
    )


@pytest.mark.parametrize("kind", ["<f8", ">f4", "<i4", "|b1"])
def test_attend_promotes_dtypes_like_the_library(folder: Path, kind: str) -> None:
    q, k, v = save((6, 4), (6, 4), (6, 4))
    key = np.asfortranarray((10 * k).astype(kind))
    np.save("k.npy", key)
    assert attend_files() == 0
    expected = cattn.scaled_dot_product_attention(q, key, v)
    assert np.load("out.npy").dtype == expected.dtype
    np.testing.assert_array_equal(np.load("out.npy"), expected)


def test_attend_does_not_report_lack_of_memory_as_damage(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("qkv.npz", query=np.ones((2, 4)), key=np.ones((2, 4)), value=np.ones((2, 4)))

    def no_memory(*args: object, **kwargs: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "load", no_memory)
    assert main(["attend", "qkv.npz", "-o", "out.npz"]) != 0
    message = capsys.readouterr().err
    assert "memory" in message
    assert "damaged" not in message


def test_attend_runs_in_a_thread(folder: Path) -> None:
    """Signal handlers cannot be set there, as in a program that calls the command from a thread."""
    q, k, v = save((5, 4), (5, 4), (5, 3))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(attend_files, "--causal").result() == 0
    np.testing.assert_array_equal(np.load("out.npy"), cattn.causal_attention(q, k, v))


@needs_links
def test_attend_keeps_links(folder: Path) -> None:
    q, k, v = save((6, 4), (6, 4), (6, 4))
    os.symlink("q.npy", "out.npy")
    assert attend_files("--quiet") == 2
    np.testing.assert_array_equal(np.load("q.npy"), q)
    assert attend_files("--quiet", "--force") == 0
    assert os.path.islink("out.npy")
    np.testing.assert_array_equal(np.load("q.npy"), cattn.scaled_dot_product_attention(q, k, v))


def test_attend_output_has_ordinary_permissions(folder: Path) -> None:
    save((6, 4), (6, 4), (6, 4))
    assert attend_files() == 0
    assert os.stat("out.npy").st_mode == os.stat("q.npy").st_mode


def test_attend_prints_one_line_unless_quiet(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((6, 4), (6, 4), (6, 4))
    assert attend_files() == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("out.npy: (6, 4) float32")
    assert captured.err == ""
    assert attend_files("--quiet") == 0
    assert capsys.readouterr() == ("", "")


def test_attend_prints_a_warning_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save((6, 4), (6, 4), (6, 4))
    np.save("mask.npy", np.tri(6))
    assert attend_files("--mask", "mask.npy") == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cattn: warning: ")
    assert "additive" in line


def test_attend_warns_about_the_whole_mask_and_only_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mask whose first slice holds only 0 and 1 gives no warning if later rows hold other numbers."""
    monkeypatch.setattr(attend, "FIRST_SLICE", 1.0)
    monkeypatch.setattr(attend, "SLICE_SECONDS", 0.0)
    save((40, 4), (40, 4), (40, 4))
    mask = np.tri(40)
    mask[30:] *= -5
    np.save("mask.npy", mask)
    assert attend_files("--mask", "mask.npy") == 0
    assert capsys.readouterr().err == ""
    np.save("mask.npy", np.tri(40))
    assert attend_files("--mask", "mask.npy") == 0
    assert capsys.readouterr().err.count("additive") == 1


# ---- attend: errors ------------------------------------------------------------------------------------------------
def damage(name: str, share: float) -> None:
    data = Path(name).read_bytes()
    Path(name).write_bytes(data[: int(len(data) * share)])


def write_object_array() -> None:
    np.save("k.npy", np.array([{}, []], dtype=object), allow_pickle=True)


BAD_INPUTS = {
    "missing": (lambda: os.remove("k.npy"), [], "k.npy: No such file"),
    "directory": (lambda: (os.remove("k.npy"), os.mkdir("k.npy")), [], "k.npy: Is a directory"),
    "text": (lambda: Path("k.npy").write_text("hello there"), [], "k.npy is neither a .npy nor a .npz"),
    "empty": (lambda: Path("k.npy").write_bytes(b""), [], "k.npy is empty"),
    "objects": (write_object_array, [], "k.npy holds Python objects"),
    "truncated": (lambda: damage("k.npy", 0.9), [], "k.npy is truncated or damaged"),
    "truncated header": (lambda: damage("k.npy", 0.1), [], "k.npy is truncated or damaged"),
    "rank": (lambda: np.save("k.npy", np.ones(4)), [], "key"),
    "query rank": (lambda: np.save("q.npy", np.ones(4)), [], "query"),
    "head_dim": (lambda: np.save("k.npy", np.ones((6, 5))), [], r"key has head_dim 5, query has 4.*k\.npy"),
    "length": (lambda: np.save("v.npy", np.ones((5, 4))), [], r"value.*v\.npy"),
    "dtype": (lambda: np.save("v.npy", np.ones((6, 4), complex)), [], "value.*complex"),
    "text dtype": (lambda: np.save("v.npy", np.full((6, 4), "x")), [], "value"),
    "mask shape": (
        lambda: np.save("m.npy", np.ones((5, 6), bool)),
        ["--mask", "m.npy"],
        r"attn_mask.*\(5, 6\).*m\.npy",
    ),
    "mask of many dimensions": (
        lambda: np.save("m.npy", np.ones((1,) * 38 + (6, 6), bool)),
        ["--mask", "m.npy"],
        r"does not broadcast to the scores' shape \(6, 6\)",
    ),
    "mask rank": (lambda: np.save("m.npy", np.ones((1, 6, 6), bool)), ["--mask", "m.npy"], "attn_mask"),
    "mask dtype": (lambda: np.save("m.npy", np.ones((6, 6), int)), ["--mask", "m.npy"], r"mask.astype\(bool\)"),
    "bias dtype": (lambda: np.save("b.npy", np.ones((6, 6), bool)), ["--bias", "b.npy"], "bias"),
    "member of npy": (lambda: os.rename("k.npy", "m.npz"), ["--mask", "m.npz:x"], "k.npy"),
    "dropout": (None, ["--dropout", "1.5"], r"--dropout must be in \[0, 1\], got 1\.5$"),
    "dropout nan": (None, ["--dropout", "nan"], "--dropout must be in .*got nan$"),
    "scale": (None, ["--scale", "inf"], "scale"),
    "seed": (None, ["--dropout", "0.5", "--seed", "-1"], "--seed must be in .*got -1$"),
    "seed of nothing": (None, ["--seed", "18446744073709551616"], "--seed must be in"),
    "threads": (None, ["--threads", "0"], "--threads must be at least 1"),
    "threads overflow": (None, ["--threads", str(10**20)], "--threads: n must be"),
    "no number": (None, ["--threads", "many"], "--threads"),
    "alignment": (None, ["--causal=upper-left"], "did you mean upper_left"),
    "one side of a window": (None, ["--window", "3"], "expected 2 arguments.*before and after.*as in --window 3 0"),
    "same file": (None, ["--weights", "out.npy"], "different files"),
    "two outputs to the pipe": (None, ["-o", "-", "--lse", "-"], "must be different files"),
    "no output": (None, ["--output", ""], "--output must name a file, got ''"),
    "no weights": (None, ["--weights", ""], "--weights must name a file, got ''"),
    "misspelt": (None, ["--casual", "--zzz"], "unrecognized arguments: --casual --zzz: did you mean --causal?"),
    "alibi": (None, ["--alibi"], "--alibi needs heads on axis -3 of four dimensions"),
    "suffix": (None, ["--weights", "weights.txt"], r"\.npy, \.npz or \.safetensors"),
    "no directory": (None, ["--weights", "no/such/w.npy"], "no such directory"),
}
if hasattr(os, "mkfifo"):  # opening a pipe would wait for a writer
    BAD_INPUTS["pipe"] = (lambda: (os.remove("k.npy"), os.mkfifo("k.npy")), [], "k.npy is not a regular file")


@pytest.mark.parametrize(("prepare", "options", "message"), BAD_INPUTS.values(), ids=BAD_INPUTS.keys())
def test_attend_refuses_wrong_inputs_and_leaves_the_output(
    folder: Path, capsys: pytest.CaptureFixture[str], prepare: Callable[[], object] | None, options: list, message: str
) -> None:
    save((6, 4), (6, 4), (6, 4))
    if prepare:
        prepare()
    Path("out.npy").write_text("as it was")
    assert attend_files(*options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)
    assert "Traceback" not in captured.err
    assert Path("out.npy").read_text() == "as it was"
    assert leftovers(folder) == []


def test_attend_refuses_bad_archives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    q, _, _ = save((6, 4), (6, 4), (6, 4))
    np.savez("part.npz", query=q, keys=q)
    np.savez("broken.npz", query=q, key=q, value=q)
    damage("broken.npz", 0.8)
    np.savez("objects.npz", query=q, key=q, value=np.array([{}], object))
    for name in ("part.safetensors", "broken.safetensors"):
        save_arrays(name, {"query": q})
    damage("broken.safetensors", 0.8)
    for files, message in (
        (["part.npz"], "part.npz has no array key, value; it has query, keys"),
        (["broken.npz"], "broken.npz is truncated or damaged"),
        (["objects.npz"], "objects.npz holds Python objects"),
        (["q.npy"], "q.npy is a single array"),
        (["q.npy", "k.npy"], "got 2 files"),
        (["part.npz:query", "part.npz:nothing", "v.npy"], "part.npz has no array nothing"),
        (["part.safetensors"], "part.safetensors has no array key, value; it has query"),
        (["broken.safetensors"], "broken.safetensors is no .safetensors file, or damaged"),
        (["part.safetensors:none", "k.npy", "v.npy"], "part.safetensors has no array none; it has query"),
    ):
        assert main(["attend", *files, "-o", "out.npy"]) == 2
        assert message in capsys.readouterr().err
    os.rename("q.npy", "single.npz")
    assert main(["attend", "single.npz:query", "k.npy", "v.npy", "-o", "out.npy"]) == 2
    assert "single.npz is a single array" in capsys.readouterr().err
    assert not Path("out.npy").exists()


@pytest.mark.promise("files are data")
def test_attend_never_unpickles(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return os.mkdir, ("exploded",)

    save((6, 4), (6, 4), (6, 4))
    np.save("k.npy", np.array([Bomb()], object), allow_pickle=True)
    np.savez("qkv.npz", query=np.array([Bomb()], object), key=np.ones(1), value=np.ones(1))
    assert attend_files() == 2
    assert main(["attend", "qkv.npz", "-o", "out.npy"]) == 2
    assert not Path("exploded").exists()


@pytest.mark.promise("whole files")
@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system cannot reserve room in a file")
def test_attend_on_a_full_disk_fails_before_it_computes(folder: Path) -> None:
    """Not by a bus error in the middle of the computation."""
    save((4096, 64), (4, 64), (4, 64))
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000));"
        "from cattn.__main__ import main; sys.exit(main(['attend', 'q.npy', 'k.npy', 'v.npy', '-o', 'out.npy']))"
    )
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search("File too large: .*out.npy", done.stderr)
    assert sorted(os.listdir(folder)) == ["k.npy", "q.npy", "v.npy"]


# ---- attend: long runs ---------------------------------------------------------------------------------------------
def start_long_run(folder: Path, *options: str) -> subprocess.Popen[str]:
    """Start a run of many seconds, and wait until it computes."""
    array = np.zeros((1 << 16, 64), np.float32)
    for name in "qkv":
        np.save(f"{name}.npy", array)
    Path("out.npy").write_text("as it was")
    run = start_command("attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy", "--threads", "1", *options)
    watch = Watch(run.pid)
    while not leftovers(folder):
        assert run.poll() is None, run.stderr.read()
        assert not watch.finds()
        time.sleep(0.02)
    time.sleep(0.5)
    assert run.poll() is None, "the run was too short for this test"
    return run


@pytest.mark.promise("whole files")
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(130, id="Ctrl-C"),
        pytest.param(143, id="kill", marks=pytest.mark.skipif(WINDOWS, reason="a killed process cannot clean up")),
    ],
)
def test_a_stopped_run_leaves_no_file(folder: Path, code: int) -> None:
    run = start_long_run(folder)
    before = cpu_seconds(run.pid)
    if code == 130:
        interrupt_command(run)
    else:
        run.terminate()
    _, errors = finish(run, most=(before or MOST_SECONDS) + 2)
    assert run.returncode == code
    assert "Traceback" not in errors
    assert Path("out.npy").read_text() == "as it was"
    assert leftovers(folder) == []
    if code == 130:
        assert errors.splitlines()[-1] == "cattn: interrupted; nothing was written"


@pytest.mark.promise("attend")
@pytest.mark.usefixtures("ctrl_c")
def test_a_long_run_shows_progress(folder: Path) -> None:
    run = start_long_run(folder)
    assert run.stderr is not None
    seen = character = run.stderr.read(1)
    while "%" not in seen and character:
        character = run.stderr.read(1)
        seen += character
    interrupt_command(run)
    finish(run)
    assert "%" in seen


def test_progress_is_printed_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with messages.Progress(100) as bar:
        bar.advance(10)
    assert capsys.readouterr().err == ""  # short work shows no progress
    monkeypatch.setattr(messages, "PATIENCE", 0.0)
    with messages.Progress(100) as bar:
        bar.advance(50)
        bar.advance(25)  # without a terminal there is a line every few seconds only
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("cattn:  50% done")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with messages.Progress(100) as bar:
        bar.advance(50)
    assert capsys.readouterr().err.startswith("\rcattn:  50% done")
    with messages.Progress(100, quiet=True) as bar:
        bar.advance(50)
    assert capsys.readouterr().err == ""


# ---- the walk through the chapter ------------------------------------------------------------------------------------
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
        steps = [messages.BLUES.index(int(colour)) for colour, _ in sorted(cells, key=lambda cell: float(cell[1]))]
        assert steps == sorted(steps)
        assert steps[-1] == len(messages.BLUES) - 1
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
        assert messages.has_colours(terminal) is expected
    with open(os.devnull, "w") as file:
        assert not messages.has_colours(file)


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
    np.testing.assert_allclose(info.textbook(q, k, v, is_causal=True), cattn.causal_attention(q, k, v), atol=1e-5)
    monkeypatch.setattr(info, "SHAPE", (1, 1, 8, 4))
    assert all(seconds > 0 for seconds in info.compare())
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "NumPy as configured" in info.measure()


# ---- python -m cattn info --------------------------------------------------------------------------------------------
FIRST = ["system", "libc", "cpu", "python", "numpy", "cattn", "instruction_set", "bit_contract", "threads"]


def entries(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if not line.startswith(" "))


def test_info_begins_with_the_system_and_ends_with_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CATTN_NUM_THREADS", "3")
    monkeypatch.setenv("PASSWORD", "secret")
    with cattn.num_threads(2):
        assert main(["info"]) == 0
    text = capsys.readouterr().out
    found = {key: value.strip() for key, value in entries(text).items()}
    assert list(found)[: len(FIRST)] == FIRST
    assert list(found)[-1] == "tables"
    assert platform.release() in found["system"]
    assert found["python"] == f"{platform.python_implementation()} {platform.python_version()}"
    assert (found["numpy"], found["cattn"]) == (np.__version__, cattn.__version__)
    assert found["instruction_set"] == _cattn._get_isa()
    assert found["threads"].startswith("2 on ")
    assert "CATTN_NUM_THREADS=3" in found["environment"]
    assert "secret" not in text
    assert "pytest" not in found["packages"]
    assert len(re.findall(r"^  \w+ +\d+ lanes, micro-tile", text, re.MULTILINE)) == len(_cattn._isa_list())


def test_info_has_every_entry_of_show_config(capsys: pytest.CaptureFixture[str]) -> None:
    renamed = {"version": "cattn", "num_threads": "threads", "machine": "system"}
    assert main(["info"]) == 0
    shown = entries(capsys.readouterr().out)
    for key, value in cattn.show_config("dicts").items():
        if key not in ("tables", "platform"):  # the platform is the system and the C library
            assert str(value) in shown[renamed.get(key, key)]


@pytest.mark.skipif(sys.platform != "linux", reason="the file is Linux's")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu\n\nprocessor\t: 1\n", "Some CPU @ 2 GHz"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n", "variant 0x41 0xd0c 0x3"),
        ("processor\t: 0\ncpu\t\t: POWER9, altivec supported\n", "POWER9, altivec supported"),
        ("", platform.processor() or platform.machine()),
    ],
    ids=["x86", "arm", "power", "none"],
)
def test_info_names_the_cpu(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setattr(info, "_read", {"/proc/cpuinfo": text}.__getitem__)
    assert info.cpu().endswith(expected)


def test_info_names_the_cpu_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(info, "_output", lambda *command: "Apple M9" if "machdep.cpu.brand_string" in command else "")
    assert info.cpu() == "Apple M9"


def test_info_names_musl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The loader of musl prints its version if it is run without arguments."""
    loader = tmp_path / "ld-musl-x86_64.so.1"
    loader.write_text(
        "#!/bin/sh\nprintf 'musl libc (x86_64)\\nVersion 1.2.5\\nDynamic Program Loader\\n' >&2\nexit 1\n"
    )
    loader.chmod(0o755)
    monkeypatch.setattr(info, "sys", SimpleNamespace(platform="linux"))
    monkeypatch.setattr(info.os, "confstr", lambda _: None)
    maps = f"7f00-7f01 r--p 00000000 08:01 123   {loader}\n"
    monkeypatch.setattr(info, "_read", {"/proc/self/maps": maps}.__getitem__)
    assert info.libc() == "musl 1.2.5"
    loader.unlink()
    assert info.libc() == "musl"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_info_names_glibc() -> None:
    assert info.libc() == " ".join(platform.libc_ver())


def test_a_program_that_cannot_be_run_prints_nothing() -> None:
    assert info._output("/nowhere/program") == ""
    assert info._output(sys.executable, "-c", "print('x')") == "x"
