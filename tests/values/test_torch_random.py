"""TorchGenerator draws PyTorch's numbers, bit for bit: compared with torch where it is installed, and everywhere with
NumPy's MT19937, the documented rules and the chapter's tables.
"""

import json
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import TorchGenerator
from support import FP_MODES, ROOT, assert_same_bits, floating_point_mode

SEEDS = [*range(64), 123, 789, 2**31, 2**32 - 1, 2**32 + 5, 2**63, 2**64 - 1, -1, -2, -(2**63)]
SIZES = [0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 311, 312, 313, 622, 623, 624, 625, 640, 1247, 1248, 1249, 2051]
CASES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "seed_tables.json").read_text())
Draw = Callable[[TorchGenerator], Any]


@pytest.fixture
def torch() -> Iterator[types.ModuleType]:
    module = pytest.importorskip("torch")
    state = module.get_rng_state()
    yield module
    module.set_rng_state(state)


def words(seed: int, n: int) -> np.ndarray:
    """Return the first n 32-bit words for a seed, from NumPy's MT19937."""
    bits = np.random.MT19937()
    bits._legacy_seeding(seed & 0xFFFFFFFF)
    return bits.random_raw(n).astype(np.uint64)


def assert_same_state(generator: TorchGenerator, torch: types.ModuleType) -> None:
    np.testing.assert_array_equal(generator.get_state(), torch.get_rng_state().numpy())


# ---- numbers -------------------------------------------------------------------------------------------------------
def steps(torch: types.ModuleType, n: int, kind: str) -> list[tuple[str, Draw, Callable[[], Any]]]:
    """Return every distribution at one size: (name, ours, torch's)."""
    ours, theirs = np.dtype(kind), getattr(torch, kind)
    full, half = 2**28, -(2**63)

    def empty() -> Any:
        return torch.empty(n, dtype=theirs)

    def uniform(low: float, high: float) -> tuple[str, Draw, Callable[[], Any]]:
        name = f"uniform {low} {high}"
        return name, lambda g: g.uniform(low, high, n, dtype=ours), lambda: empty().uniform_(low, high)

    return [
        ("rand", lambda g: g.rand(n, dtype=ours), lambda: torch.rand(n, dtype=theirs)),
        ("randn", lambda g: g.randn(n, dtype=ours), lambda: torch.randn(n, dtype=theirs)),
        uniform(-0.3, 0.7),
        uniform(0, 1e-3),
        uniform(1, 1 + 2**-22),
        uniform(5, 5),
        ("bernoulli", lambda g: g.bernoulli(0.3, n, dtype=ours), lambda: empty().bernoulli_(0.3)),
        ("randint", lambda g: g.randint(-5, 50257, n), lambda: torch.randint(-5, 50257, (n,))),
        ("randint, 32 bits", lambda g: g.randint(full - 1, n), lambda: torch.randint(full - 1, (n,))),
        ("randint, 64 bits", lambda g: g.randint(full, n), lambda: torch.randint(full, (n,))),
        ("randint, all", lambda g: g.randint(half, -half - 1, n), lambda: torch.randint(half, -half - 1, (n,))),
        ("mask", lambda g: g.dropout_mask(0.1, n).astype(ours), lambda: empty().bernoulli_(1 - 0.1)),
    ]


@pytest.mark.promise("PyTorch's generator")
@pytest.mark.parametrize("seed", SEEDS)
def test_all_distributions_and_sizes_draw_the_numbers_of_torch(torch: types.ModuleType, seed: int) -> None:
    """In random order from one stream; a cached normal number survives draws of other distributions."""
    generator = TorchGenerator(seed)
    torch.manual_seed(seed)
    order = np.random.default_rng(list(str(seed).encode()))
    for n in order.permutation(SIZES):
        for kind in ("float32", "float64"):
            calls = steps(torch, int(n), kind)
            for i in order.permutation(len(calls)):
                name, ours, theirs = calls[i]
                assert_same_bits(ours(generator), theirs().numpy(), f"{name} {n} {kind}")
    assert_same_state(generator, torch)


def test_every_kernel_table_draws_the_numbers_of_torch(torch: types.ModuleType, isa: str) -> None:
    """The portable code and the AVX2 code give the same bits."""
    generator = TorchGenerator(7)
    torch.manual_seed(7)
    for n in (5, 40, 700, 5000, 70001):
        for kind in ("float32", "float64"):
            for name, ours, theirs in steps(torch, n, kind):
                assert_same_bits(ours(generator), theirs().numpy(), f"{name} {n} {kind}")
    assert_same_state(generator, torch)


def test_millions_of_normal_numbers_are_those_of_torch(torch: types.ModuleType) -> None:
    """Enough to reach every octant, radii near 0 and large ones, and so all coefficients of the polynomials."""
    generator = TorchGenerator(2024)
    torch.manual_seed(2024)
    for n in (1 << 23, (1 << 20) + 9):
        assert_same_bits(generator.randn(n), torch.randn(n).numpy())
        assert_same_bits(generator.randn(n // 8, dtype="d"), torch.randn(n // 8, dtype=torch.float64).numpy())
    assert_same_state(generator, torch)


def test_a_cached_normal_number_survives_other_draws_but_not_a_new_seed(torch: types.ModuleType) -> None:
    generator = TorchGenerator(3)
    torch.manual_seed(3)
    assert_same_bits(generator.randn(3), torch.randn(3).numpy())
    assert_same_bits(generator.randn(16), torch.randn(16).numpy())
    assert_same_bits(generator.rand(1), torch.rand(1).numpy())
    assert_same_bits(generator.randn(1, dtype="d"), torch.randn(1, dtype=torch.float64).numpy())
    generator.randn(1)
    generator.manual_seed(3)  # drops the cached number
    torch.manual_seed(3)
    assert_same_bits(generator.randn(2), torch.randn(2).numpy())


def test_bernoulli_takes_an_array_of_probabilities(
    torch: types.ModuleType, dtype: type, rng: np.random.Generator
) -> None:
    generator = TorchGenerator(11)
    torch.manual_seed(11)
    for shape in ((), (5,), (3, 0), (700, 3), (40, 1000)):
        p = np.array(np.clip(rng.uniform(-0.1, 1.1, shape), 0, 1), dtype)
        assert_same_bits(generator.bernoulli(p), torch.bernoulli(torch.from_numpy(p)).numpy())
        assert_same_bits(generator.bernoulli(torch.from_numpy(p)), torch.bernoulli(torch.from_numpy(p)).numpy())
        by_columns = p.copy(order="F")  # draws go in row-major order, whatever the layout
        state = generator.get_state()
        first = generator.bernoulli(by_columns)
        generator.set_state(state)
        assert_same_bits(first, generator.bernoulli(p))
        torch.set_rng_state(torch.from_numpy(generator.get_state()))


@pytest.mark.parametrize("seed", [0, 123, -1])
def test_numbers_follow_the_documented_rules_from_the_words_of_numpy(isa: str, seed: int) -> None:
    """Without torch: every rule applied to the words of NumPy's MT19937."""
    w = words(seed, 6000)
    pairs = (w[::2] << np.uint64(32) | w[1::2]) & np.uint64(2**53 - 1)
    assert_same_bits(TorchGenerator(seed).rand(60, 100), ((w & 0xFFFFFF) * 2.0**-24).astype("f").reshape(60, 100))
    assert_same_bits(TorchGenerator(seed).rand(3000, dtype="d"), pairs * 2.0**-53)
    assert_same_bits(TorchGenerator(seed).randint(10, 6000), (w % 10).astype(np.int64))
    for p in (0.1, 0.5, 0.9, 1e-300, 1e-17, 1 - 2**-53, 0.5 + 2**-52):
        mask = pairs * 2.0**-53 < 1 - p
        assert_same_bits(TorchGenerator(seed).dropout_mask(p, 3000), mask)
        assert_same_bits(TorchGenerator(seed).bernoulli(1 - p, 3000, dtype="d"), mask.astype("d"))


@pytest.mark.parametrize("mode", FP_MODES)
def test_the_callers_floating_point_mode_changes_no_bit(mode: str, isa: str, dtype: type) -> None:
    """Another rounding direction, or subnormals flushed to zero."""
    if mode == "flush":
        pytest.importorskip("torch")
    x = np.linspace(-1, 1, 500).astype(dtype)
    subnormal = float(np.finfo(dtype).smallest_subnormal)

    def everything() -> list[Any]:
        g = TorchGenerator(3)
        numbers = [g.rand(40, dtype=dtype), g.uniform(-0.3, 0.7, 40, dtype=dtype), g.uniform(0, 9 * subnormal, 9)]
        return [
            *numbers,
            g.randn(5, dtype=dtype),
            g.randn(50, dtype=dtype),
            *g.linear(7, 9, dtype=dtype),
            g.dropout_mask(0.1, 500),
            cattn.dropout(x, 0.1, rng=g),
            cattn.dropout(x, 0.7, rng=TorchGenerator(3, "mkl")),
        ]

    expected = everything()
    with floating_point_mode(mode):
        actual = everything()
    for a, b in zip(actual, expected, strict=True):
        assert_same_bits(a, b)


def test_randint_takes_integer_dtypes(torch: types.ModuleType) -> None:
    generator = TorchGenerator(1)
    torch.manual_seed(1)
    for name, low, high in (("int32", -9, 2**31), ("int16", -(2**15), 2**15), ("int8", -3, 4), ("uint8", 0, 256)):
        theirs = torch.randint(low, high, (50,), dtype=getattr(torch, name)).numpy()
        assert_same_bits(generator.randint(low, high, (50,), dtype=name), theirs)
    assert_same_bits(generator.randint(high=6, size=(2, 3)), torch.randint(high=6, size=(2, 3)).numpy())
    assert_same_bits(generator.randint(6, size=(2, 3)), torch.randint(6, size=(2, 3)).numpy())


def test_sizes_may_be_ints_or_one_sequence() -> None:
    def same(*sizes: Any) -> None:
        results = [TorchGenerator(5).rand(*size) for size in sizes]
        for result in results[1:]:
            assert_same_bits(result, results[0])

    same((2, 3), ((2, 3),), ([2, 3],), (np.int64(2), np.int8(3)), (np.array([2, 3]),))
    same((), ((),))
    same((4,), ((4,),), (np.array(4),))
    assert TorchGenerator(5).rand().shape == ()
    assert TorchGenerator(5).randn(0, 3).shape == (0, 3)
    assert TorchGenerator(5).randint(3, 4).shape == (4,)
    assert TorchGenerator(5).dropout_mask(0.5, (2, 1)).shape == (2, 1)


# ---- layers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [True, False])
def test_linear_draws_the_parameters_of_torch(torch: types.ModuleType, dtype: type, bias: bool) -> None:
    theirs = torch.float32 if dtype == np.float32 else torch.float64
    generator = TorchGenerator(17)
    torch.manual_seed(17)
    for n_in, n_out in ((3, 2), (1, 1), (2, 3), (6, 5), (7, 13), (768, 64), (100, 37), (3, 0), (29, 700), (10007, 3)):
        layer = torch.nn.Linear(n_in, n_out, bias=bias, dtype=theirs) if n_out else None
        weight, offset = generator.linear(n_in, n_out, bias, dtype=dtype)
        assert weight.shape == (n_out, n_in)
        assert (offset is not None) == bias
        if layer is None:
            continue
        assert_same_bits(weight, layer.weight.detach().numpy(), f"{n_in} {n_out}")
        if offset is not None:
            assert_same_bits(offset, layer.bias.detach().numpy(), f"{n_in} {n_out}")
    assert_same_state(generator, torch)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_linear_without_inputs_draws_the_bias_of_torch(torch: types.ModuleType) -> None:
    generator = TorchGenerator(17)
    torch.manual_seed(17)
    layer = torch.nn.Linear(0, 5)
    weight, offset = generator.linear(0, 5)
    assert weight.shape == (5, 0)
    assert offset is not None
    assert_same_bits(offset, layer.bias.detach().numpy())
    assert_same_state(generator, torch)


# ---- dropout -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("p", [0.0, 0.1, 0.2, 1 / 3, 0.5, 0.9, 0.999, 1.0])
def test_dropout_is_that_of_torch(
    torch: types.ModuleType, isa: str, dtype: type, p: float, rng: np.random.Generator
) -> None:
    generator = TorchGenerator(123)
    torch.manual_seed(123)
    for shape in ((), (1,), (6, 6), (3, 0), (5, 1), (2, 3, 313), (33, 1000)):
        x = rng.standard_normal(shape).astype(dtype)
        expected = torch.nn.functional.dropout(torch.from_numpy(x), p).numpy() + 0.0  # PyTorch's -0 is +0 here
        before = generator.get_state()
        result, mask = cattn.dropout(x, p, rng=generator, return_mask=True)
        assert_same_bits(result, expected.astype(dtype))
        if p < 1:
            assert_same_bits(result[~mask], np.zeros((~mask).sum(), dtype))
        assert_same_state(generator, torch)

        after = generator.get_state()
        generator.set_state(before)
        assert_same_bits(generator.dropout_mask(p, shape), mask)
        np.testing.assert_array_equal(generator.get_state(), after)


def test_dropout_of_views_goes_by_row_major_index(dtype: type, rng: np.random.Generator) -> None:
    """Whatever the strides; also in place and into strided outputs."""
    base = rng.standard_normal((3, 70, 130)).astype(dtype)
    wide = np.empty((2 * 70, 3 * 130), dtype)
    wider = np.broadcast_to(base[0], (4, 70, 130))
    for x in (base.transpose(2, 0, 1), base[:, ::-1, ::2], base[..., :1], base[:1].T, wider):
        plain = cattn.dropout(x.copy(), 0.3, rng=TorchGenerator(8))
        assert_same_bits(cattn.dropout(x, 0.3, rng=TorchGenerator(8)), plain)
        out = x.copy()
        assert cattn.dropout(out, 0.3, rng=TorchGenerator(8), out=out) is out
        assert_same_bits(out, plain)
    x, out = base[0], wide[::2, ::3]
    cattn.dropout(x, 0.3, rng=TorchGenerator(8), out=out)
    assert_same_bits(out.copy(), cattn.dropout(x.copy(), 0.3, rng=TorchGenerator(8)))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, -1.0])
def test_dropped_elements_are_plus_zero(dtype: type, poison: float) -> None:
    x = np.full((50, 7), poison, dtype)
    for view in (x, x[:, ::2]):
        result, mask = cattn.dropout(view, 0.5, rng=TorchGenerator(1), return_mask=True)
        assert_same_bits(result, np.where(mask, view * dtype(2), dtype(0)))
        assert 0 < mask.sum() < mask.size


def test_dropout_of_nothing_or_everything_leaves_the_generator_alone() -> None:
    generator = TorchGenerator(4)
    before = generator.get_state()
    x = np.ones((4, 5))
    assert_same_bits(cattn.dropout(x, 0.0, rng=generator), x)
    assert_same_bits(cattn.dropout(x, 0.5, training=False, rng=generator), x)
    assert_same_bits(cattn.dropout(x, 1.0, rng=generator), np.zeros_like(x))
    cattn.dropout(x[:0], 0.5, rng=generator)
    generator.dropout_mask(0.5, 0)
    assert generator.dropout_mask(0.0, 5).all()
    assert not generator.dropout_mask(1.0, 5).any()
    np.testing.assert_array_equal(generator.get_state(), before)


def test_the_dropout_mask_of_attention_is_that_of_torch(torch: types.ModuleType) -> None:
    """PyTorch draws for every weight of (B, H, T_q, T_k), also for hidden keys."""
    torch.manual_seed(99)
    q, k = torch.ones(2, 3, 5, 4), torch.ones(2, 3, 7, 4)
    v = torch.eye(7).expand(2, 3, 7, 7)
    weights = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3).numpy()
    generator = TorchGenerator(99)
    assert_same_bits(generator.dropout_mask(0.3, 2, 3, 5, 7), weights > 0)
    assert_same_state(generator, torch)


MKL_TABLE = [
    [2, 2, 2, 2, 2, 2],
    [0, 2, 0, 0, 0, 0],
    [0, 0, 2, 0, 2, 0],
    [2, 2, 0, 0, 0, 2],
    [2, 0, 0, 0, 0, 2],
    [0, 2, 0, 0, 0, 0],
]


def test_the_mkl_stream_gives_the_table_of_older_builds() -> None:
    """The table that older x86 builds of PyTorch print for the chapter's seed."""
    ones = np.ones((6, 6), np.float32)
    np.testing.assert_array_equal(cattn.dropout(ones, 0.5, rng=TorchGenerator(123, "mkl")), MKL_TABLE)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.75])
def test_the_mkl_stream_follows_its_documented_rule(p: float) -> None:
    generator = TorchGenerator(5, dropout="mkl")
    for seed in words(5, 3):  # each call takes one word as its seed
        x = int(seed) % (2**31 - 1) or 1
        expected = []
        for _ in range(5000):
            expected.append(x / (2**31 - 1) < 1 - p)
            x = x * 1132489760 % (2**31 - 1)
        assert_same_bits(generator.dropout_mask(p, 5000), np.array(expected))
    plain = TorchGenerator(5)
    plain.rand(3)
    assert_same_bits(generator.rand(4), plain.rand(4))  # other distributions draw from the usual stream


@pytest.mark.parametrize("stream", ["aten", "mkl"])
@pytest.mark.parametrize("skip", [0, 1, 311, 312, 313, 1000, 12345])
def test_a_mask_may_begin_anywhere_in_the_stream(stream: str, skip: int, isa: str) -> None:
    whole = TorchGenerator(6, stream).dropout_mask(0.4, 20000)
    part = TorchGenerator(6, stream)._dropout_mask(np.empty(700, bool), 0.4, skip)
    assert_same_bits(part, whole[skip : skip + 700])


# ---- the chapter ---------------------------------------------------------------------------------------------------
def drawn_weights(case: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """Return the weights of a case drawn from its seed, or None if the recipe is unknown."""
    recipe = case["recipe"]
    generator = TorchGenerator(recipe["seed"])
    shapes = {name: np.shape(w) for name, w in case["weights"].items()}
    order = recipe["layer_order"]
    if recipe["init"] == "nn.Linear":
        return {name: generator.linear(shapes[name][1], shapes[name][0], bias=False)[0] for name in order}
    if recipe["init"] == "torch.rand":
        return {name: generator.rand(shapes[name]) for name in order}
    if recipe["init"].startswith("torch.randn"):
        return {name: generator.randn(shapes[name]) for name in order}
    if recipe["init"] == "exercise 3.1":  # v1 draws its own numbers, then takes those of v2
        own = {name: generator.rand(shapes[name]) for name in order}
        generator.manual_seed(recipe["seed"])
        v2 = {name: generator.linear(*shapes[name], bias=False)[0].T for name in order}
        return v2 if case["id"].endswith("correct") else {**v2, "W_key": own["W_key"]}
    return None


WITH_WEIGHTS = [case for case in CASES if case.get("weights") and "init" in case["recipe"]]


def test_every_case_with_weights_has_a_recipe() -> None:
    assert len(WITH_WEIGHTS) == sum(bool(case.get("weights")) for case in CASES)


@pytest.mark.parametrize("case", WITH_WEIGHTS, ids=lambda case: case["id"])
def test_seeds_give_the_weights_of_the_chapter(case: dict[str, Any]) -> None:
    drawn = drawn_weights(case)
    assert drawn is not None
    assert drawn.keys() == case["weights"].keys()
    for name, stored in case["weights"].items():
        np.testing.assert_array_equal(drawn[name], np.array(stored, np.float32), err_msg=name)


def test_the_seed_gives_the_inputs_of_notebook_003() -> None:
    """18 normal numbers, drawn after three smaller arrays: 16 and more are drawn by another method than few."""
    case = next(case for case in CASES if case["id"] == "003-attn-scores")
    generator = TorchGenerator(123)
    for name in case["recipe"]["layer_order"]:
        generator.randn(np.shape(case["weights"][name]))
    np.testing.assert_array_equal(generator.randn(6, 3), np.array(case["recipe"]["inputs"], np.float32))


@pytest.mark.parametrize("case", [c for c in CASES if "dropout_mask" in c], ids=lambda case: case["id"])
def test_seeds_give_the_dropout_of_the_chapter(case: dict[str, Any]) -> None:
    spec = case["recipe"]["dropout"]
    generator = cattn.manual_seed(spec["seed"])
    ones = np.ones(np.shape(case["dropout_mask"]), np.float32)
    for _ in range(spec["call"] + 1):
        result = cattn.dropout(ones, spec["p"], rng=generator)
    np.testing.assert_array_equal(result, np.array(case["dropout_mask"]) / (1 - spec["p"]))
