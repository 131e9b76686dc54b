"""A training has one hash: on every table, with any threads, without NumPy's vector instructions, and in segments."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

import cattn
from cattn import _cattn
from support import ROOT, in_contract, table

EXAMPLES = ROOT / "examples"
STEPS = range(0, 21, 5)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("one_hash")


def hashes(example: Any, steps: int = 20) -> Any:
    training = example.start(example.SIZES["tiny"], example.text())
    *_, (_, claim) = example.steps(training, steps, {steps})
    return claim


@pytest.mark.promise("one hash")
def test_a_training_has_the_stored_hash_on_every_table_with_one_to_three_threads(example: Any) -> None:
    stored = example.read_claims(example.STORED, "tiny")
    assert [*stored] == [*STEPS]
    assert len({*map(str, stored.values())}) == len(STEPS)
    for name in [row["name"] for row in _cattn._isa_list() if row["usable"]]:
        for threads in (1, 2, 3) if in_contract(name) else (1,):
            with table(name), cattn.num_threads(threads):
                found = hashes(example)
            # the table outside the contract, which has no FMA, shows that other bits give another hash
            assert (found == stored[20]) == in_contract(name), f"{name} with {threads} threads"


def run(*arguments: str, **env: str) -> str:
    command = [sys.executable, str(EXAMPLES / "one_hash.py"), *arguments]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.promise("one hash")
def test_the_hash_does_not_depend_on_the_vector_instructions_of_numpy() -> None:
    features = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
    if not features:
        pytest.skip("NumPy has nothing to switch off on this processor")
    without = run("--size", "tiny", NPY_DISABLE_CPU_FEATURES=" ".join(features))
    assert "after steps 0 to 20 are the stated ones" in without
    assert without == run("--size", "tiny")


def test_a_changed_bit_anywhere_changes_the_hash(example: Any) -> None:
    training = example.start(example.SIZES["tiny"], example.text())
    for _ in example.steps(training, 3, ()):
        pass
    right = example.claim_of(training)
    for name, array in example.arrays_of(training).items():
        bits = array.reshape(-1).view(np.uint32)
        for place in (0, len(bits) // 2, len(bits) - 1):
            bits[place] ^= 1
            changed = example.claim_of(training)
            bits[place] ^= 1
            assert changed.state != right.state, name
            assert (changed.weights != right.weights) == name.startswith("weights"), name
    assert example.claim_of(training) == right
    training.ids[7] ^= 1
    assert example.claim_of(training).state != right.state


@pytest.mark.parametrize("what", ["weight", "mean", "batch"])
def test_a_changed_bit_before_a_step_changes_the_hash_after_it(
    example: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = example.start(example.SIZES["tiny"], example.text())
    training.step()
    ids = training.batch()
    if what == "weight":
        training.model.weights["0 qkv"].view(np.uint32)[5, 7] ^= 1
    elif what == "mean":
        training.first["1 down"].view(np.uint32)[3, 9] ^= 1 << 12
    else:
        ids[1, 20] ^= 1
    monkeypatch.setattr(training, "batch", lambda: ids)
    training.step()
    found, right = example.claim_of(training), hashes(example, 2)
    assert found.weights != right.weights
    assert found.state != right.state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    run("--size", "tiny", "--folder", str(path))
    return path


@pytest.mark.promise("one hash")
@pytest.mark.parametrize(("first", "last"), [(0, 5), (5, 15), (10, 20), (0, 20)])
def test_a_segment_is_the_piece_of_the_run_and_makes_its_steps_alone(
    example: Any, folder: Path, first: int, last: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    calls, step = Counter[int](), example.Training.step
    monkeypatch.setattr(example.Training, "step", lambda self: (calls.update([self.done]), step(self))[1])
    example.main(["--size", "tiny", "--folder", str(folder), "--from", str(first), "--to", str(last)])
    assert calls == Counter(range(first, last))
    printed = re.findall(r"weights (\w+)\n +state   (\w+)", capsys.readouterr().out)
    claims = example.read_claims(folder / "hashes.txt", "tiny")
    assert printed == [claims[n] for n in STEPS if first <= n <= last]
    assert claims == example.read_claims(example.STORED, "tiny")


def test_a_segment_of_another_text_is_repeated_with_that_text(example: Any, tmp_path: Path, capsys: Any) -> None:
    text, run_of = tmp_path / "text", ["--size", "tiny", "--folder", str(tmp_path / "run")]
    text.write_bytes(bytes(range(256)) * 3)
    example.main([*run_of, "--text", str(text)])
    assert "no hashes are stated" in capsys.readouterr().out
    segment = [*run_of, "--from", "5", "--to", "10"]
    example.main([*segment, "--text", str(text)])
    assert "after steps 5 to 10 are the stated ones" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"after step 5 the hash of the state is \w{64}, but 00005.npz has"):
        example.main(segment)


WRONG = {
    "--from 5 --to 10": "--from and --to need --folder",
    "--to 5 --text short": "--from and --to need --folder",
    "--from 10 --to 10 --folder F": "0 <= from < to <= 20, got 10 and 10",
    "--from -5 --folder F": "0 <= from < to <= 20, got -5 and 20",
    "--to 21 --folder F": "0 <= from < to <= 20, got 0 and 21",
    "--from 5 --to 12 --folder F": r"steps with a stated hash, \[0, 5, 10, 15, 20\], got 12",
    "--to 3": r"steps with a stated hash, \[0, 5, 10, 15, 20\], got 3",
    "--from 15 --folder F": "--from is 15, but .*00015.npz does not exist",
    "--from 10 --folder F": "the hash of the state is .*, but 00010.npz has",
    "--from 5 --folder G": "No such file or directory: .*hashes.txt",
    "--text short": "more bytes than the context, 48, got 48",
    "--text none": "No such file",
    "--folder short": "exists",
    "--from 5 --folder W": "'first 0 down' of .*00005.npz must be float32 of .32, 128., got float64",
    "--from 5 --folder L": "must be a size, a step and two hashes, got 'tiny 5 abc'",
    "--from 5 --folder A": "must have the arrays of this size; one side alone has more",
    "--from 5 --folder Z": "00005.npz must be an archive of NumPy's arrays, but cannot be read",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_argument_has_a_clear_error(
    example: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, arguments: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_bytes(bytes(48))
    for name in "FWLAZ":
        shutil.copytree(folder, name)
    Path("F", "00015.npz").unlink()
    with np.load("F/00010.npz") as stored:
        arrays = dict(stored)
    arrays["second norm"].view(np.uint32)[3] ^= 1
    np.savez("F/00010.npz", **arrays)
    np.savez("A/00005.npz", **arrays, more=np.zeros(3))
    np.savez("W/00005.npz", **(arrays | {"first 0 down": arrays["first 0 down"].astype(np.float64)}))
    Path("L", "hashes.txt").write_text("tiny 5 abc\n")
    Path("Z", "00005.npz").write_bytes(b"no archive")
    with pytest.raises(SystemExit) as failure:
        example.main(["--size", "tiny", *arguments.split()])
    assert failure.value.code != 0
    assert re.search(WRONG[arguments], f"{failure.value.code} {capsys.readouterr().err}")
