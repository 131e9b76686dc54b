"""tools/soak finds a wrong bit and memory that grows; the kept inputs of the fuzzers run without a fuzzer."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import itertools
import sys
import tarfile
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cattn
from support import ROOT, own_blocks
from support.functions import Results, Work


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    if not sys.platform.startswith("linux"):
        pytest.skip("the memory of the process is Linux's")
    path = str(ROOT / "tools" / "soak")
    loader = importlib.machinery.SourceFileLoader("soak", path)
    spec = importlib.util.spec_from_loader("soak", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses and named tuples look there
    loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def few_objects_to_look_through() -> Iterator[None]:
    """Every sample collects garbage, which takes a second after thousands of tests have left their reports."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.long
@pytest.mark.promise("history")
def test_some_seconds(soak: ModuleType) -> None:
    run = soak.Soak(soak.random_works(60, 2), 4, 2)
    said = run.run(8, say=lambda line: None)
    assert "no bit changed" in said
    assert run.calls > 20


def test_a_wrong_bit_is_found(soak: ModuleType) -> None:
    count = itertools.count()

    def wrong_at_times() -> Results:
        return [np.float32([1.0, -0.0 if next(count) % 10 == 9 else 0.0])]

    with pytest.raises(AssertionError, match="1 of 2 differ"):
        soak.Soak([Work("wrong at times", wrong_at_times, {})], 4, 1).run(5, say=lambda line: None)


@pytest.mark.long
@pytest.mark.parametrize("lost", [pytest.param("blocks", marks=own_blocks), "resident"])
def test_memory_that_grows_is_found(soak: ModuleType, lost: str) -> None:
    kept: list[object] = []

    def leak() -> Results:
        kept.append([object() for _ in range(500)] if lost == "blocks" else np.ones(500_000))
        return []

    with pytest.raises(soak.Failed, match="blocks grew" if lost == "blocks" else "(resident|blocks) grew"):
        soak.Soak([Work("leak", leak, {})], 2, 1).run(3, say=lambda line: None)


# ---- fuzzers ---------------------------------------------------------------------------------------------------------
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


def judge(name: str, judged: Callable[..., None], *arguments: Any) -> None:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            judged(*arguments)
        except binding.Finding as found:
            raise AssertionError(f"{name}: {found}") from found


@pytest.mark.promise("errors")
def test_kept_inputs() -> None:
    """Each call returns, or is refused as the documentation says."""
    inputs = inputs_of("binding")
    assert len(inputs) > 100
    for name, data in inputs.items():
        judge(name, binding.run, data)


X = np.linspace(0.1, 0.6, 6, dtype=np.float32).reshape(2, 3)
RAGGED = [[1.0], [1.0, 2.0]]


def weights(dtype: Any, *batch: int, **more: Any) -> tuple[Any, dict[str, Any]]:
    """Return a call whose weights are drawn before they are written to an array that refuses."""
    x, out = np.ones((*batch, 2, 3), dtype), np.zeros((*batch, 2, 2), dtype)
    out.flags.writeable = False
    given = {"query": x, "key": x, "dropout_p": 0.5, "rng": cattn.TorchGenerator(3), "stage": "dropout", "out": out}
    return cattn.attention_weights, given | more


def backward(**more: Any) -> tuple[Any, dict[str, Any]]:
    return cattn.dropout_backward, {"grad_out": X, "p": 0.5} | more


FIXED: dict[str, tuple[Any, dict[str, Any]]] = {
    "dropout_p with methods": weights(np.float32, rng=5, out=None, dropout_p=binding.Hostile(1)),
    "out of float16 is read-only": weights(np.float16),
    "out of bfloat16 is read-only": weights(ml_dtypes.bfloat16, 1, 2),
    "out of five axes is read-only": weights(np.float16, 2, 2, 2),
    "stage is an array": weights(np.float32, out=None, stage=np.ones((3, 3), np.float32)),
    "stage is a matrix": weights(np.float32, out=None, stage=X.view(np.matrix)),
    "p is a half": (lambda p: cattn.TorchGenerator(1).bernoulli(p), {"p": np.array(0.4375, np.float16)}),
    "rng is larger than memory": (cattn.dropout, {"x": X, "rng": np.broadcast_to(np.float32(1), (3, 2**40))}),
    "array is larger than memory": (cattn.quantize, {"x": np.broadcast_to(np.float32(1), (2, 2**20, 2**30))}),
    "mask does not broadcast": backward(grad_out=np.zeros((0, 0, 0), bool), mask=np.ones((2, 2), bool)),
    "gradient of one number": backward(grad_out=False, mask=False),
    "ragged gradient": backward(grad_out=RAGGED, mask=np.zeros((0, 17), bool)),
    "ragged rng": backward(rng=RAGGED),
    "structured mask": backward(mask=np.zeros((), "f4,i2")),
    "explanation of a gate": (cattn.explain, {"query": X, "key": X, "value": X, "gate": X}),
    "one query head, eight of values": (
        cattn.varlen_attention,
        {"query": np.ones((0, 1, 8), ">f4"), "key": np.ones((8, 1, 8), ">f4"), "value": np.ones((8, 8, 8), ">i8"),
         "cu_seqlens_q": [0, 0, 0], "cu_seqlens_k": [0, 0, 8]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FIXED)
def test_fixed_bugs_of_the_binding(name: str) -> None:
    """The fuzzer found them. The call returns or names an argument, writes nothing and draws nothing."""
    judge(name, binding.call, *FIXED[name])


def test_a_message_without_a_name_is_a_finding() -> None:
    def nameless(x: object) -> None:
        raise ValueError("something is wrong")

    with pytest.raises(binding.Finding, match="names no argument: ValueError: something is wrong"):
        binding.check(ValueError("something is wrong"), nameless, {"x": 1})
    with pytest.raises(binding.Finding, match="ZeroDivisionError"):
        binding.check(ZeroDivisionError("x"), nameless, {"x": 1})
    binding.check(ValueError("x must be larger"), nameless, {"x": 1})
