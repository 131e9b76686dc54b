"""tools/soak runs for a few seconds, finds a wrong bit and finds memory that grows."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from support import ROOT, own_blocks
from support.functions import Results, Work

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the memory of the process is Linux's")


@pytest.fixture(scope="module")
def soak() -> ModuleType:
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


def test_a_wrong_result_of_a_problem_is_named_by_a_seed(soak: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on, and the seed gives the same problem again."""
    seen, said = list[str](), list[str]()

    def check(problem: Any) -> None:
        seen.append(soak.describe(problem))
        assert len(seen) != 6, "a wrong number"

    monkeypatch.setattr(soak, "check", check)
    assert soak.Problems(said.append).run(12, 5) == "12 problems, 1 failures"
    assert len(seen) == 12
    assert said[0] == f"FAILED: tools/soak problems --seed 10 --count 1\n{seen[5]}"
    assert "AssertionError: a wrong number" in said[1]
    right = seen[5]
    seen.clear()
    soak.Problems(said.append).run(1, 10)
    assert seen == [right]


def test_growth_of_the_process_alone_is_found(soak: ModuleType) -> None:
    """C has lost memory that no Python object holds."""
    still = np.full((10, 2), (1000, 10 << 20))
    assert "blocks 1000 -> 1000" in soak.check_growth(still)
    still[5:, 1] = 40 << 20
    with pytest.raises(soak.Failed, match="resident grew"):
        soak.check_growth(still)
