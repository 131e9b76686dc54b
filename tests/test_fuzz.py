"""The kept inputs of fuzz/binding.py, without a fuzzer: each call returns, or is refused as the documentation says."""

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("resource")
FUZZ = Path(__file__).resolve().parent.parent / "fuzz"
sys.path.append(str(FUZZ))

import binding  # noqa: E402

INPUTS = sorted((FUZZ / "corpus" / "binding").iterdir())


@pytest.mark.promise("errors")
def test_kept_inputs() -> None:
    assert len(INPUTS) > 100
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for path in INPUTS:
            try:
                binding.run(path.read_bytes())
            except binding.Finding as found:
                raise AssertionError(f"{path.name}: {found}") from found


def test_a_message_without_a_name_is_a_finding() -> None:
    def nameless(x: object) -> None:
        raise ValueError("something is wrong")

    with pytest.raises(binding.Finding, match="names no argument: ValueError: something is wrong"):
        binding.check(ValueError("something is wrong"), nameless, {"x": 1})
    with pytest.raises(binding.Finding, match="ZeroDivisionError"):
        binding.check(ZeroDivisionError("x"), nameless, {"x": 1})
    binding.check(ValueError("x must be larger"), nameless, {"x": 1})
