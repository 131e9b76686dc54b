"""The benchmarks, apart from the times they measure: rows, files, agreement of contestants, the probe, the model."""

import os
import re
import runpy
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cattn
from support import ROOT, benchmarks_importable

with benchmarks_importable():
    from benchmarks import __main__ as suite
    from benchmarks import contestants, groups, laps, report, scaling, timing
    from benchmarks.machine import Probe, compile_probe


def has_compiler() -> bool:
    return shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is not None


@pytest.fixture(autouse=True)
def without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the peer that compiles for seconds."""
    monkeypatch.setattr(contestants, "PEERS", {n: p for n, p in contestants.PEERS.items() if n != "torch flex"})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laps run in this process, so that a test can replace what they use."""
    monkeypatch.setattr(laps, "apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(laps, "keep_memory", lambda: None)


@pytest.mark.usefixtures("in_this_process")
def test_laps_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    probes = []

    def group(probe: Any) -> Any:
        """Two rows."""
        probes.append(probe)
        for name in ("a", "b"):
            array = np.zeros(3)
            yield timing.Case(name, {"cattn": array.sum, "numpy": array.max}, "float32", 1.0)

    probe = SimpleNamespace(limits={"float32": lambda: 8.0})
    monkeypatch.setitem(groups.GROUPS, "prefill", group)
    monkeypatch.setattr(laps, "Probe", lambda library: probe)
    monkeypatch.setattr(laps, "row_of", lambda case, measured: {"name": case.name, "kept": measured, "targets": {}})
    rows: list[dict[str, Any]] = []
    monkeypatch.setattr(suite, "save", lambda folder, group, found: rows.extend(found))
    suite.measure(["prefill"], suite.parse(["prefill", "--laps", "4", "--rounds", "3"]), probe=Path("probe.so"))
    assert probes == 4 * [probe]
    assert [row["name"] for row in rows] == ["a", "b"]
    for row in rows:
        rounds = {name: len(times.rounds) for name, times in row["kept"].times().items()}
        assert rounds == {"cattn": 12, "numpy": 12, "limit": 12}
        assert row["kept"].limit_work == 8


def test_a_row_is_compared_with_the_quickest_product_of_as_many_flops() -> None:
    """A product of 100 x 100 matrices would have as many flops as the row; the size is a multiple of 16."""
    assert contestants.product_size(2 * 100.0**3) == 96
    assert contestants.product_size(1.0) == 16
    products = contestants.matrix_products("float64", 2 * 100.0**3)
    assert {"numpy", "cattn"} <= products.keys()
    for product in products.values():
        assert np.shape(product()) == (96, 96)
    case = timing.Case("row", {}, "float64", 2 * 100.0**3, beside_products=True)
    seconds = {"cattn": 4.0, "product of numpy": 2.0, "product of torch": 1.0}
    found = laps.product_of(case, {name: timing.Timing([took]) for name, took in seconds.items()})
    assert found["best"] == "torch"
    assert found["per_second"] == 2 * 96.0**3
    np.testing.assert_allclose(found["percent"], 25 * (100 / 96) ** 3)


def test_laps_go_on_until_ratios_settle() -> None:
    def measured(*ratios: float, seconds: float = 0.01) -> laps.Measured:
        times = [{"cattn": timing.Timing([seconds]), "numpy": timing.Timing([r * seconds])} for r in ratios]
        return laps.Measured(times)

    assert not measured(2.0).settled()
    assert measured(2.0, 2.01, 1.99).settled()
    assert not measured(2.0, 3.0, 2.0).settled()
    assert measured(2.0, 3.0, 2.0, seconds=1e-4).settled()  # rows this short are not compared between runs
    assert measured(*[2.0, 2.2] * 8).settled()
    assert not measured(*[2.0, 2.2] * 2).settled()


def test_a_slow_round_changes_no_ratio() -> None:
    ours, peer = timing.Timing([1.0, 5.0, 1.0, 1.0, 9.0]), timing.Timing([2.0, 10.0, 2.0, 2.0, 18.0])
    assert peer.over(ours) == 2
    assert ours.kept() == {"median": 1.0, "best": 1.0, "spread": pytest.approx(6.0), "quiet": 1.0}
    assert timing.Timing([3.0]).kept() == {"median": 3.0, "best": 3.0, "spread": 0.0, "quiet": 1.0}


def test_restless_rounds_do_not_count() -> None:
    fine = [1.0] * 5
    ours = timing.Timing([5.0, 7.0, *fine], [1.5, 1.5, *fine], quick=1.0)
    peer = timing.Timing([9.0, 8.0, *[3.0] * 5], [1.0, 1.5, *fine], quick=1.0)
    assert ours.kept() == {"median": 1.0, "best": 1.0, "spread": 0.0, "quiet": pytest.approx(5 / 7)}
    assert peer.median == 3.0
    assert peer.over(ours) == 3.0
    few = timing.Timing([5.0, 7.0, 1.0], [1.5, 1.5, 1.0], quick=1.0)
    assert few.median == 5.0  # one quiet round is too few: all count
    peer = timing.Timing([1.0] * 3, [1.0, 2.0, 1.0], quick=1.0)
    assert few.over(peer) == 5.0
    assert few.over(peer, enough=1) == 1.0


def small_prefill(probe: Any) -> Any:
    for shape in ((1, 2, 16, 64), (1, 2, 32, 64)):
        calls = contestants.attention_calls(*groups.qkv(shape))
        facts = {"dtype": "float32", "shape": shape, "T": shape[2]}
        flops = groups.causal_flops(*shape)
        yield timing.Case(f"float32 {shape}", calls, "float32", flops, {"percent": 1.0}, facts, beside_products=True)


@pytest.mark.usefixtures("in_this_process")
def test_the_table_and_the_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(groups.GROUPS, "prefill", small_prefill)
    assert suite.main(["prefill", "--laps", "2", "--rounds", "1", "-o", str(tmp_path)]) == 0
    (kept,) = tmp_path.glob("*.json")
    other = kept.read_text("utf-8").replace(f'"{suite.facts()["cpu"]}"', '"another CPU"')
    (tmp_path / "another.json").write_text(other, "utf-8")
    table = report.markdown(tmp_path)
    cell = r" \d+\.\d\d× \([\w ]+\)(, \d+ %)? \|"
    assert re.search(rf"^\| float32 \(1, 2, 16, 64\) \|{cell}{cell}$", table, re.MULTILINE)
    assert "another CPU" in table
    assert (tmp_path / "ratios.png").stat().st_size > 1000
    assert report.draw(tmp_path) == tmp_path / "ratios.png"
    page = Path(shutil.copy(ROOT / "docs" / "performance.md", tmp_path))
    assert suite.main(["report", "-o", str(tmp_path), "--into", str(page)]) == 0
    before, written = ((path.read_text("utf-8")) for path in (ROOT / "docs" / "performance.md", page))
    begin, end = "<!-- benchmarks: begin -->\n", "<!-- benchmarks: end -->"
    assert written == before.partition(begin)[0] + begin + table + end + before.partition(end)[2]


def test_contestants_must_agree() -> None:
    pytest.importorskip("torch")
    query, key, value = groups.qkv((1, 2, 40, 8))
    calls = contestants.attention_calls(query, key, value)
    assert {"cattn", "torch", "numpy"} <= calls.keys()
    assert calls.notes["errors"].keys() == calls.keys()
    exact = contestants.Problem(query, key, value).exact()
    calls = {name: calls[name] for name in ("cattn", "torch", "numpy")}
    for check in (contestants.agreeing, lambda calls: contestants.checked(calls, exact, query.dtype)):
        check(calls)
        with pytest.raises(AssertionError, match="wrong"):
            check(calls | {"wrong": lambda: np.zeros_like(query)})
    rounded = cattn.causal_attention(*(a.astype(np.float16) for a in (query, key, value)))
    errors, other = contestants.checked(calls | {"jax": lambda: rounded}, exact, query.dtype)
    assert other == ["jax"]
    assert errors["jax"] > 100 * errors["cattn"]
    with pytest.raises(AssertionError, match="cattn"):
        contestants.checked({"cattn": lambda: rounded}, exact, query.dtype)
    decode = contestants.attention_calls(*groups.qkv((1, 4, 1, 8), kv_shape=(1, 2, 30, 8)), causal=False)
    assert decode.keys() >= {"cattn", "torch"}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("shapes", [((1, 4, 1030, 8), (1, 2, 1030, 8)), ((3, 8), (5, 8)), ((2, 3, 8), (2, 7, 8))])
def test_the_exact_result(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str, causal: bool) -> None:
    arrays = [a.astype(dtype) for a in groups.qkv(shapes[0], kv_shape=shapes[1])]
    kind = "upper_left" if causal else False
    right = cattn.reference.scaled_dot_product_attention(*(a.astype(np.float64) for a in arrays), is_causal=kind)
    found = contestants.Problem(*arrays, causal=causal).exact()
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-13)


def test_the_best_peer_computes_in_the_rows_arithmetic() -> None:
    ratios = {"torch": 2.0, "openvino": 1.5, "openvino bf16": 0.5, "one thread": 0.4, "float32": 0.3, "p=0": 0.2}
    assert contestants.best_peer(ratios, ["openvino bf16"]) == "openvino"
    assert contestants.best_peer(ratios) == "openvino bf16"
    assert contestants.best_peer({"torch, eager": 3.0, "float32": 1.0}) == "torch, eager"
    assert contestants.best_peer({"one thread": 1.9}) is None
    row = {
        "name": "row", "seconds": {"cattn": timing.Timing([1.0]).kept()}, "ratios": ratios, "best_peer": "openvino",
        "other_arithmetic": ["openvino bf16"], "errors": {"cattn": 1e-7, "openvino bf16": 2e-3}, "targets": {},
        "left_out": {"numpy": "is slow", "ggml": "not installed", "jax": "is slow"},
    }  # fmt: skip
    text = report.line(row)
    assert "best peer openvino 1.50x; openvino bf16 0.50x*\n" in text
    assert "openvino bf16 0.50x* (2e-03)" in text
    assert "left out: numpy, jax: is slow; ggml: not installed" in text


def test_each_lap_runs_in_a_new_process() -> None:
    here, there, again = os.getpid(), laps.apart(os.getpid), laps.apart(os.getpid)
    assert len({here, there, again}) == 3
    with pytest.raises(KeyError, match="no such group"):
        laps.apart(laps.lap, laps.Group("no such group"), 1, laps.Plan())


@pytest.mark.skipif(not has_compiler(), reason="no C compiler")
def test_the_probe_reads_everything_and_counts_flops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = compile_probe(tmp_path)
    assert library
    probe = Probe(library)
    array = np.arange(8 * 64, dtype=np.uint64)
    assert probe.check_sum(array) == array.sum()
    assert probe.read(array, array)() == 2 * array.nbytes
    for name in ("float32", "float64"):
        assert probe.limits[name]() > 0
    assert compile_probe(tmp_path, "no-such-compiler") is None
    assert "no-such-compiler" in capsys.readouterr().out


def test_the_model_finds_its_constants() -> None:
    points = list(scaling.grid())
    constants = np.array([2e-6, 8e-6, 1e-6, 5e-12, 2e-10, 6e-11])
    seconds = np.array([point.terms() @ constants for point in points])
    np.testing.assert_allclose(scaling.fit(points, seconds), constants, rtol=1e-6)


def test_train_gpt(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tqdm")
    example = runpy.run_path(str(ROOT / "examples" / "train_gpt.py"))
    plain, dropped = example["compare"](steps=3, tokens=48)
    np.testing.assert_allclose(plain["losses"]["cattn"], plain["losses"]["torch"], rtol=1e-4)
    assert dropped["losses"].keys() == {"torch", "torch 1", "torch 2", "cattn"}
    assert report.save(tmp_path, "train_gpt", [plain, dropped]).exists()


def test_targets_are_judged() -> None:
    row = {"percent": 70.0, "ratios": {"torch": 2.0, "numpy": 5.0}, "best_peer": "torch"}
    assert laps.judge("percent", 60, row, 1.0) == {"measured": 70.0, "met": True}
    assert laps.judge("best peer", 2.5, row, 1.0) == {"measured": 2.0, "met": False}
    assert laps.judge("jax", 8, row, 1.0) == {"measured": None, "met": None}
    assert laps.judge("microseconds", 1, row, 2e-6)["met"] is False
    assert laps.judge("GB/s", 12, row, 0.5, 8e9) == {"measured": 16.0, "met": True}
