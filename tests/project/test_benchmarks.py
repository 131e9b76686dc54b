"""The benchmarks, apart from the times they measure: rows, files, agreement of contestants, the probe, the model."""

import json
import os
import platform
import re
import runpy
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import cattn
from support import ROOT, UNDER_SANITIZER, benchmarks_importable

with benchmarks_importable():
    from benchmarks import __main__ as suite
    from benchmarks import child, contestants, groups, laps, machine, report, scaling, timing
    from benchmarks.contestants import PEERS
    from benchmarks.machine import Probe, compile_probe


def has_compiler() -> bool:
    return shutil.which((sysconfig.get_config_var("CC") or "cc").split()[0]) is not None


@pytest.fixture(autouse=True)
def without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the peer that compiles for seconds; `test_a_peer_is_prepared` has a long run of it."""
    monkeypatch.setattr(contestants, "PEERS", {n: p for n, p in contestants.PEERS.items() if n != "torch flex"})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Laps run in this process, so that a test can replace what they use."""
    monkeypatch.setattr(laps, "apart", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(laps, "keep_memory", lambda: None)


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(groups.GROUPS)
    assert set(groups.GROUPS) >= groups.KEEP_MEMORY


@pytest.mark.parametrize("arguments", [["nonsense"], ["calls", "--rounds", "0"], ["calls", "--laps", "0"]])
def test_wrong_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        suite.main(arguments)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    option = arguments[1] if len(arguments) > 1 else ""
    assert (f"{option} must be at least 1, got 0" if option else "unknown group nonsense; there are prefill") in message


@pytest.mark.long
def test_a_group_is_kept_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert suite.main(["calls", "--laps", "1", "--rounds", "1", "-o", str(tmp_path), "--no-plots"]) == 0
    kept = report.load(tmp_path, "calls")
    assert kept
    assert {"cpu", "date", "instruction_set", "numpy", "cattn"} <= kept["machine"].keys()
    assert [row["name"] for row in kept["rows"]] == ["(6, 2)", "(1, 4, 16, 16)", "(8, 12, 64, 64)"]
    for row in kept["rows"]:
        assert set(row["seconds"]["cattn"]) == {"median", "best", "spread", "quiet"}
        assert row["ratios"].keys() >= {"torch", "numpy"}
        assert row["targets"]["microseconds"]["met"] in (True, False)
    assert "(1, 4, 16, 16)" in capsys.readouterr().out


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


@pytest.mark.usefixtures("in_this_process")
def test_groups_take_turns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lap by lap, at least three each, until each is settled; a group without times has one lap."""
    gone, kept = list[str](), list[str]()

    def group(name: str) -> Callable[[Any], Any]:
        def rows(probe: Any) -> Any:
            gone.append(name)
            yield (
                timing.Case(name, {"cattn": list}, "float32", 1.0) if name != "once" else {"name": name, "targets": {}}
            )

        rows.__doc__ = f"About {name}."
        return rows

    for name in ("long", "once", "short"):
        monkeypatch.setitem(groups.GROUPS, name, group(name))
    enough = {"long": 5, "once": 1, "short": 1}
    monkeypatch.setattr(laps.Group, "settled", lambda self: gone.count(self.name) >= enough[self.name])
    monkeypatch.setattr(laps, "row_of", lambda case, measured: {"name": case.name, "targets": {}})
    monkeypatch.setattr(suite, "save", lambda folder, name, rows: kept.append(name))
    suite.measure(["long", "once", "short"], suite.parse(["calls", "--rounds", "1"]), probe=None)
    assert gone == ["long", "once", "short", *["long", "short"] * 2, "long", "long"]
    assert kept == ["once", "short", "long"]
    text = capsys.readouterr().out
    assert text.index("once: About once.") < text.index("short: About short.") < text.index("long: About long.")


@pytest.mark.usefixtures("in_this_process")
@pytest.mark.parametrize(("stopped_in", "kept"), [(3, []), (4, ["prefill"])])
def test_a_stopped_run_keeps_the_groups_that_have_their_laps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped_in: int, kept: list[str]
) -> None:
    begun = []

    def rows(probe: Any) -> Any:
        """One row."""
        begun.append(1)
        if len(begun) == stopped_in:
            raise KeyboardInterrupt
        yield timing.Case("a", {"cattn": list})

    monkeypatch.setitem(groups.GROUPS, "prefill", rows)
    monkeypatch.setattr(laps.Group, "settled", lambda self: False)
    assert suite.main(["prefill", "--rounds", "1", "-o", str(tmp_path), "--no-plots"]) == 130
    assert [group for path in tmp_path.glob("*.json") for group in json.loads(path.read_text("utf-8"))] == kept


def test_ctrl_c_while_the_model_is_measured_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stopped(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite.scaling, "interleave", stopped)
    assert suite.main(["scaling", "-o", str(tmp_path), "--no-plots"]) == 130
    assert not list(tmp_path.iterdir())


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


def test_laps_go_on_until_enough_rounds_are_quiet() -> None:
    def lap(canary: float) -> dict[str, timing.Timing]:
        return {name: timing.Timing([0.01] * 3, [canary] * 3, quick=canary) for name in ("cattn", "numpy")}

    assert laps.Measured([lap(1.0)] * 2, quick=1.0).settled()
    assert not laps.Measured([lap(1.0), lap(2.0), lap(2.0)], quick=1.0).settled()
    assert laps.Measured([lap(1.0), lap(2.0), lap(1.0)], quick=1.0).settled()


def test_restless_moments_are_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before_and_after = [1.0, 1.0, 1.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0]  # the third round waits twice
    found, naps = iter([*before_and_after, *[3.0] * 1000]), list[float]()
    monkeypatch.setattr(timing, "canary", lambda: next(found))
    monkeypatch.setattr(timing.time, "sleep", naps.append)
    times = timing.interleave({"cattn": list}, rounds=3)["cattn"]
    assert times.canary == [1.0, 3.0, 1.0]
    assert times.quick == 1.0
    assert len(naps) == 3 + 2  # a pause before each measurement, and two waits
    assert len(times.rounds) == 3
    timing.interleave({"cattn": list}, rounds=3, quick=1.0)
    assert sum(naps) < 1.1 * timing.PATIENCE + 6 * timing.PAUSE  # the patience ends


def test_two_runs_are_compared(tmp_path: Path) -> None:
    def kept(folder: str, slow: float, fast: float) -> Path:
        rows = [
            {"name": "slow", "seconds": {"cattn": {"median": 0.01}}, "ratios": {"torch": slow}},
            {"name": "fast", "seconds": {"cattn": {"median": 0.0001}}, "ratios": {"torch": fast}},
            {"name": folder, "seconds": {"cattn": {"median": 0.01}}, "ratios": {"torch": 1.0}},
        ]
        report.save(tmp_path / folder, "decode", [])
        report.save(tmp_path / folder, "window", rows[:1])
        path = report.save(tmp_path / folder, "decode", rows)  # it replaces the earlier one, and keeps other groups
        assert path.read_text("utf-8").count("\n") == 16  # a line for each row
        return tmp_path / folder

    before, now = kept("before", 2.0, 1.0), kept("now", 2.5, 9.0)
    assert report.changes(before, now, ["decode", "prefill"]) == [("decode: slow", "torch", pytest.approx(0.25))]
    assert "0 of 1 ratios are within 10 %" in report.agreement(before, now, ["decode"])
    assert "+25%  decode: slow, against torch" in report.agreement(before, now, ["decode"])
    assert "no rows of a millisecond" in report.agreement(before, now, ["prefill"])
    with pytest.raises(SystemExit):
        suite.main(["decode", "-o", str(now), "--against", str(now)])


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
    table = report.markdown(tmp_path)
    assert "| float32 (1, 2, 16, 64) |" in table
    assert re.search(r"\| \d+ % \((numpy|torch|cattn)\) \|", table)
    assert "NumPy textbook" in table
    assert (tmp_path / "ratios.png").stat().st_size > 1000
    page = tmp_path / "page.md"
    page.write_text("above\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\nbelow\n")
    assert suite.main(["report", "-o", str(tmp_path), "--into", str(page)]) == 0
    text = page.read_text("utf-8")
    assert text.startswith("above\n<!-- benchmarks: begin -->\nOther libraries' time")
    assert text.endswith("<!-- benchmarks: end -->\nbelow\n")
    assert "old" not in text
    page.write_text("nothing")
    with pytest.raises(ValueError, match="has no marks"):
        report.write_into(page, table)


def test_the_page_of_performance_has_the_marks() -> None:
    text = (ROOT / "docs/performance.md").read_text("utf-8")
    assert text.index("<!-- benchmarks: begin -->") < text.index("<!-- benchmarks: end -->")


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


@pytest.mark.filterwarnings("default")  # warnings of the peers are not ours
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n.startswith("torch ") else n for n in contestants.PEERS]
)
def test_a_peer_is_prepared(name: str) -> None:
    """In a new process, for a peer may change the thread pools of a process."""
    if machine.version(PEERS[name].package) is None:
        pytest.skip(f"{name} is not installed")
    kinds = laps.apart(prepared_kinds, name)
    if not kinds:
        pytest.skip(f"{name} computes nothing on this machine")
    assert kinds & {"causal", "one query"}
    assert (name in ("onnxruntime GQA", "torch matmul")) == ("all keys" not in kinds)


def prepared_kinds(name: str) -> set[str]:
    """Return the kinds of problems that a peer computes, after comparing its results with the exact ones."""
    kinds = set()
    with benchmarks_importable():
        for kind, tokens, keys, causal in (
            ("causal", 65, 65, True),
            ("all keys", 40, 77, False),
            ("one query", 1, 33, False),
        ):
            arrays = groups.qkv((1, 4, tokens, 16), kv_shape=(1, 4, keys, 16))
            for threads in (1, 2):
                problem = contestants.Problem(*arrays, causal=causal, threads=threads)
                try:
                    call = PEERS[name].prepare(problem)
                except (contestants.LeftOutError, ImportError):
                    continue
                _, other = contestants.checked({name: call}, problem.exact(), np.dtype(np.float32))
                assert other == ([name] if name == "openvino bf16" else [])
                kinds.add(kind)
    return kinds


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


def resident_after_64_mb(keep: bool) -> int:
    if keep:
        machine.keep_memory()
    before = child.status("VmRSS")
    np.ones(8 << 20)
    return child.status("VmRSS") - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc" or UNDER_SANITIZER, reason="malloc is not glibc's")
def test_malloc_keeps_freed_memory() -> None:
    assert laps.apart(resident_after_64_mb, True) > 60 << 20
    assert laps.apart(resident_after_64_mb, False) < 30 << 20


def test_the_textbooks_module_agrees_with_ours() -> None:
    torch = pytest.importorskip("torch")
    eager = contestants.book_module(torch, 32, 16, 4, fused=False)
    ours = cattn.MultiHeadAttention(32, 32, 16, 0.1, 4).eval()
    ours.load_state_dict(eager.state_dict())
    x = torch.randn(2, 16, 32)
    with torch.no_grad():
        np.testing.assert_allclose(ours(x.numpy()), eager(x).numpy(), rtol=0, atol=1e-5)


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


def test_the_model_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "measure", lambda points: np.array([point.terms().sum() for point in points]))
    found = scaling.run(tmp_path, list(scaling.grid())[:9], show=False)
    assert abs(found["worst"]) < 1e-6
    kept = report.load(tmp_path, "scaling")
    assert kept
    assert kept["constants"] == found["constants"]
    assert kept["rows"][0]["name"] == "H=12 T=128 D=32 causal, threads 1"


def test_a_peer_that_keeps_the_scores_is_left_out_of_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """One entry in PEERS makes a peer a contestant, and gives it its column in the table."""
    call = lambda problem: lambda: contestants.textbook(*problem.arrays, problem.causal)  # noqa: E731
    absent = lambda problem: __import__("no_such_module")  # noqa: E731
    monkeypatch.setitem(contestants.PEERS, "new", contestants.Peer("New", "new", call, keeps_scores=True))
    monkeypatch.setitem(contestants.PEERS, "none", contestants.Peer("None", "none", absent))
    arrays = groups.qkv((1, 2, 40, 8))
    calls = contestants.attention_calls(*arrays, causal=False)
    assert "new" in calls
    assert calls.notes["left_out"]["none"] == "not installed"
    short = contestants.attention_calls(*arrays, causal=False, matrix=False)
    assert calls.keys() - short.keys() >= {"new", "numpy"}
    assert short.notes["left_out"]["new"] == "holds the whole matrix of scores"


def test_rows_with_all_keys_visible() -> None:
    case = groups.prefill_case("float32", (1, 2, 10, 4), {}, keys=13)
    assert case.name == "float32 (1, 2, 10, 4), all 13 keys visible"
    assert case.work == 4 * 2 * 4 * 10 * 13
    assert callable(case.contestants)
    query, key, value = groups.qkv((1, 2, 10, 4), kv_shape=(1, 2, 13, 4))
    np.testing.assert_array_equal(case.contestants()["cattn"](), cattn.scaled_dot_product_attention(query, key, value))


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
