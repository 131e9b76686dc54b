"""The kept inputs of the fuzzers: the archives open, and fuzz/binding.py runs its inputs without a fuzzer."""

import sys
import tarfile
import warnings

import numpy as np
import pytest

from support import ROOT

FUZZ = ROOT / "fuzz"
CORPUS = FUZZ / "corpus"
if not CORPUS.exists():
    pytest.skip("the source distribution has no corpus", allow_module_level=True)
sys.path.append(str(FUZZ))

import binding  # noqa: E402


def inputs_of(archive: str) -> dict[str, bytes]:
    with tarfile.open(CORPUS / f"{archive}.tar.xz") as opened:
        files = [member for member in opened if member.isfile()]
        return {member.name.removeprefix("./"): opened.extractfile(member).read() for member in files}


CRASHERS = inputs_of("crashers")


def run(name: str, data: bytes) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            binding.run(data)
        except binding.Finding as found:
            raise AssertionError(f"{name}: {found}") from found


@pytest.mark.promise("errors")
def test_kept_inputs() -> None:
    """Each call returns, or is refused as the documentation says."""
    inputs = inputs_of("binding")
    assert len(inputs) > 100
    for name, data in inputs.items():
        run(name, data)


@pytest.mark.parametrize("name", [name for name in CRASHERS if name.startswith("binding/")])
def test_fixed_bugs_of_the_binding(name: str) -> None:
    run(name, CRASHERS[name])


def test_kept_inputs_of_the_core() -> None:
    """They need libFuzzer to run: tools/fuzz does that. Here: they are there, and as short as the fuzzer makes them."""
    inputs = inputs_of("core") | {name: data for name, data in CRASHERS.items() if name.startswith("core/")}
    assert len(inputs) > 300
    assert all(0 < len(data) <= 256 for data in inputs.values())


def test_a_message_without_a_name_is_a_finding() -> None:
    def nameless(x: object) -> None:
        raise ValueError("something is wrong")

    with pytest.raises(binding.Finding, match="names no argument: ValueError: something is wrong"):
        binding.check(ValueError("something is wrong"), nameless, {"x": 1})
    with pytest.raises(binding.Finding, match="ZeroDivisionError"):
        binding.check(ZeroDivisionError("x"), nameless, {"x": 1})
    binding.check(ValueError("x must be larger"), nameless, {"x": 1})
