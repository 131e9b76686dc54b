"""Rotary positions: values, sines and cosines in ULP, the law of the bits, strides, scalings, gradients, errors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import cattn
from cattn import reference
from support import HALVES, NAN, assert_same_bits, benchmarks_importable, table, without

with benchmarks_importable():
    from benchmarks.accuracy import BOUNDS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "default"},
    {"type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 10},
    YARN,
    {**YARN, "truncate": False, "beta_fast": 16, "beta_slow": 2},
    {**YARN, "attention_factor": 1.5},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    LLAMA3,
]


def angles_of(dtype: Any, positions: Any, rotary_dim: int, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the cosines and sines that rope uses, (T, rotary_dim / 2): it rotates (1, 0) to them."""
    half = rotary_dim // 2
    x = np.zeros((len(positions), rotary_dim), dtype)
    x[:, :half] = 1
    rotated = cattn.rope(x, positions, **options)
    return rotated[:, :half], rotated[:, half:]


def rotate_half(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.concatenate([-x[..., half:], x[..., :half]], axis=-1)


def to_pairs(x: np.ndarray, rotary_dim: int) -> np.ndarray:
    """Reorder columns from halves to neighbours."""
    half = rotary_dim // 2
    order = [*np.arange(rotary_dim).reshape(2, half).T.ravel(), *range(rotary_dim, x.shape[-1])]
    return np.ascontiguousarray(x[..., order])


# ---- values ----------------------------------------------------------------------------------------------------------


# Numerators of the convergents of pi: the integers that are closest to its multiples.
NEAR_PI = [
    3, 22, 333, 355, 103993, 104348, 208341, 312689, 833719, 1146408, 4272943, 5419351, 80143857, 165707065, 245850922,
    411557987, 1068966896, 2549491779, 6167950454, 14885392687, 21053343141, 1783366216531, 3587785776203,
    5371151992734, 8958937768937, 139755218526789, 428224593349304, 5706674932067741, 6134899525417045,
]  # fmt: skip
EDGES = [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 2**31, 2**32, 2**52 - 1, 2**52, 2**53 - 1, 2**53]


@pytest.mark.promise("rotary positions")
def test_sines_and_cosines_are_right_to_an_ulp(isa: str, rng: np.random.Generator) -> None:
    """Of the float64 angle position * frequency, with a frequency of 1: up to 2**53, and beside multiples of pi."""
    mpmath = pytest.importorskip("mpmath")
    numbers = [p for p in (*EDGES, *NEAR_PI) if p <= 2**53]
    numbers += [*rng.uniform(-10, 10, 300), *rng.uniform(-(2.0**21), 2.0**21, 300), *np.exp2(rng.uniform(-60, 53, 300))]
    positions = np.array([*numbers, *(-x for x in numbers), *(p / 2 for p in NEAR_PI)])
    cosines, sines = (a[:, 0] for a in angles_of(np.float64, positions, 2))
    with mpmath.workdps(60):
        for function, actual in ((mpmath.cos, cosines), (mpmath.sin, sines)):
            for position, value in zip(positions.tolist(), actual.tolist(), strict=True):
                right = function(mpmath.mpf(position))
                ulp = np.spacing(abs(float(right)))
                assert abs(right - value) <= BOUNDS["sine and cosine of rope"][0] * ulp, position


def test_frequencies_are_right_to_an_ulp(isa: str) -> None:
    """A tiny position makes the sine equal to the angle: position * frequency, both exact to the last digit."""
    mpmath = pytest.importorskip("mpmath")
    for theta, rotary_dim in ((10000.0, 128), (500000.0, 128), (1e6, 34), (1.0, 8), (1.001, 16), (1e300, 64), (2, 6)):
        _, sines = angles_of(np.float64, [2.0**-40], rotary_dim, theta=theta)
        with mpmath.workdps(60):
            for i, sine in enumerate(sines[0].tolist()):
                angle = mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / rotary_dim) * mpmath.mpf(2) ** -40
                error = abs(mpmath.asin(mpmath.mpf(sine)) - angle)
                assert error <= BOUNDS["frequencies of rope"][0] * np.spacing(float(angle)), (theta, i)


def test_the_dynamic_scaling_follows_the_largest_position() -> None:
    x = np.ones((2, 4, 8))
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    assert_same_bits(cattn.rope(x, np.arange(4), scaling=scaling), cattn.rope(x))
    assert_same_bits(cattn.rope(x, np.arange(12, 16), scaling=scaling), cattn.rope(x, np.arange(12, 16)))
    for last in (16, 40):
        positions = np.array([0, 1, last, 3])
        theta = 10000.0 * (2.0 * (last + 1) / 16 - 1) ** (8 / 6)
        expected = reference.rope(x, positions, theta=theta)
        np.testing.assert_allclose(cattn.rope(x, positions, scaling=scaling), expected, rtol=0, atol=1e-13)


# ---- bits ------------------------------------------------------------------------------------------------------------
@pytest.mark.promise("rotary positions' bits")
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_bits_are_those_of_the_textbook(isa: str, dtype: type, interleaved: bool, rng: np.random.Generator) -> None:
    """``x * cos + rotate_half(x) * sin`` from cosines and sines that were rounded once, on every table."""
    positions = np.array([0, 1, 7, 4000, 10**6, 2**40, -3, 2.5])
    for n in (2, 6, 14, 16, 30, 32, 64, 70, 128):
        x = rng.standard_normal((3, len(positions), n)).astype(dtype)
        for options in ({}, {"scaling": YARN}, {"inverse": True}):
            wide = angles_of(np.float64, positions, n, **options)
            with table("scalar"):
                assert_same_bits(np.stack(wide), np.stack(angles_of(np.float64, positions, n, **options)))
            cos, sin = (np.concatenate([a, a], axis=-1).astype(dtype) for a in wide)
            expected = x * cos + rotate_half(x) * sin
            if interleaved:
                actual = cattn.rope(to_pairs(x, n), positions, interleaved=True, **options)
                assert_same_bits(actual, to_pairs(expected, n), f"{n} {options}")
            else:
                assert_same_bits(cattn.rope(x, positions, **options), expected, f"{n} {options}")


# ---- special numbers, shapes -----------------------------------------------------------------------------------------


def test_tiny_numbers_stay(isa: str, dtype: type) -> None:
    tiny = np.finfo(dtype).smallest_subnormal
    x = np.full((1, 6), tiny)
    assert_same_bits(cattn.rope(x), x, "position 0")
    rotated = cattn.rope(np.full((1, 2), 8 * tiny), [np.pi / 4])
    np.testing.assert_array_equal(rotated / tiny, [[0, 12]])  # 8 cos(pi/4) = 5.66 is rounded to 6 before the sum


@pytest.mark.parametrize("kind", [np.dtype(np.float32), np.dtype(np.float64), *HALVES], ids=str)
def test_the_other_columns_are_copied_bit_for_bit(isa: str, kind: np.dtype) -> None:
    words = np.dtype(f"u{kind.itemsize}")
    x = np.random.default_rng(0).integers(0, np.iinfo(words).max, (3, 4, 50), words).view(kind)
    for interleaved, view in itertools.product((False, True), (x, x[..., ::-1])):
        rotated = cattn.rope(view, rotary_dim=6, interleaved=interleaved)
        np.testing.assert_array_equal(
            rotated[..., 6:].copy().view(words), np.ascontiguousarray(view[..., 6:]).view(words)
        )


@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        ((5, 4), (5,)),
        ((3, 5, 4), (5,)),
        ((3, 5, 4), (3, 5)),
        ((3, 5, 4), (1, 5)),
        ((2, 3, 5, 4), (2, 5)),
        ((2, 3, 5, 4), (2, 1, 5)),
        ((2, 3, 5, 4), (1, 3, 5)),
        ((2, 3, 5, 4), (2, 3, 5)),
        ((6, 2, 3, 5, 4), (6, 2, 5)),
        ((6, 2, 3, 5, 4), (6, 1, 5)),
        ((6, 2, 3, 5, 4), (1, 2, 3, 5)),
    ],
    ids=str,
)
def test_positions_fit_x(shape: tuple[int, ...], positions: tuple[int, ...], rng: np.random.Generator) -> None:
    """Each token is rotated by its own position, whatever the shape that names it."""
    x, p = rng.standard_normal(shape), rng.integers(0, 99, positions)
    full = p if len(positions) in (1, len(shape) - 1) else p[..., None, :]
    full = np.broadcast_to(full, shape[:-1])
    rotated = cattn.rope(x, p)
    for index in np.ndindex(shape[:-1]):
        np.testing.assert_array_equal(rotated[index], cattn.rope(x[index][None], full[index][None])[0])
    for other in (p.tolist(), p.astype(np.float32), p.astype(np.uint8), p[..., ::-1].copy()[..., ::-1]):
        np.testing.assert_array_equal(cattn.rope(x, other), rotated)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 0, 4), (0, 5, 4), (2, 5, 0)], ids=str)
def test_empty_arrays_keep_their_shape(shape: tuple[int, ...]) -> None:
    for scaling in SCALINGS[:3]:
        assert cattn.rope(np.ones(shape), scaling=scaling).shape == shape
    assert cattn.rope(np.ones(shape), np.ones(shape[-2])).shape == shape


def test_flags_may_be_numpys(rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4))
    expected = cattn.rope(x, interleaved=True)
    assert_same_bits(cattn.rope(x, interleaved=np.True_, inverse=np.False_), expected)  # type: ignore[arg-type]


def test_no_column_is_rotated(dtype: type, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, 4, 5)).astype(dtype)
    for interleaved in (False, True):
        assert_same_bits(cattn.rope(x, rotary_dim=0, interleaved=interleaved, scaling=YARN), x)
    assert_same_bits(cattn.rope(x[..., :1], rotary_dim=0), np.ascontiguousarray(x[..., :1]))


# ---- gradients -------------------------------------------------------------------------------------------------------
@pytest.mark.promise("gradients")
@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN], ids=["none", "llama3", "yarn"])
def test_inverse_gives_the_gradient(scaling: dict[str, Any] | None, rng: np.random.Generator) -> None:
    """The rotation is linear: <rope(x), g> = <x, gradient> for all x. Also with yarn, whose factor is in both."""
    x, g = rng.standard_normal((2, 2, 3, 20, 24))
    for interleaved, rotary_dim in itertools.product((False, True), (None, 10)):
        options: dict[str, Any] = {"interleaved": interleaved, "rotary_dim": rotary_dim, "scaling": scaling}
        gradient = cattn.rope(g, inverse=True, **options)
        np.testing.assert_allclose((cattn.rope(x, **options) * g).sum(), (x * gradient).sum(), rtol=1e-12)
        h, direction = 1e-4, rng.standard_normal(x.shape)
        ends = [(cattn.rope(x + s * h * direction, **options) * g).sum() for s in (-1, 1)]
        np.testing.assert_allclose((gradient * direction).sum(), (ends[1] - ends[0]) / (2 * h), rtol=1e-8)
        back = cattn.rope(cattn.rope(x, **options), inverse=True, **options)
        factor = np.ones(24)
        if scaling is YARN:
            factor[: rotary_dim or 24] = (0.1 * np.log(4) + 1) ** 2
        np.testing.assert_allclose(back, x * factor, rtol=1e-13, atol=1e-14)


# ---- any call --------------------------------------------------------------------------------------------------------
@st.composite
def rope_calls(draw: st.DrawFn) -> dict[str, Any]:
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    tokens, pairs, rest = draw(st.integers(1, 40)), draw(st.integers(2, 40)), draw(st.integers(0, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.standard_normal((*lead, tokens, 2 * pairs + rest)).astype(draw(st.sampled_from(["f4", "f8"])))
    own = draw(st.sampled_from([None, (), tuple(lead), tuple(lead[:-1])]))
    positions = None if own is None else rng.integers(0, 1000, (*own, tokens)) / draw(st.sampled_from([1, 2]))
    return {
        "x": x[..., :: draw(st.sampled_from([1, -1]))],
        "positions": positions,
        "theta": draw(st.sampled_from([10000.0, 500000.0, 1.5])),
        "rotary_dim": 2 * pairs,
        "interleaved": draw(st.booleans()),
        "scaling": draw(st.sampled_from(SCALINGS)),
        "inverse": draw(st.booleans()),
    }


@given(rope_calls(), st.integers(1, 4))
def test_any_call_agrees_with_the_reference_and_the_scalar_table(call: dict[str, Any], threads: int) -> None:
    with cattn.num_threads(threads):
        rotated = cattn.rope(**call)
    tolerance = np.finfo(rotated.dtype).eps * 8 + 1000 * 16 * np.finfo(np.float64).eps
    np.testing.assert_allclose(rotated, reference.rope(**call), rtol=0, atol=tolerance * np.abs(call["x"]).max() * 2)
    with table("scalar"):
        assert_same_bits(cattn.rope(**call), rotated)


# ---- scaling: errors -------------------------------------------------------------------------------------------------
LENGTH = "original_max_position_embeddings"
WRONG: list[tuple[Any, type[Exception], str]] = [
    ("yarn", TypeError, "scaling must be a dict as in the config of a model, or None, got str"),
    (2.0, TypeError, "scaling must be a dict .*, got float"),
    ({}, ValueError, "scaling lacks 'rope_type': it must be one of 'default', 'linear', 'dynamic', 'yarn', 'llama3'"),
    ({"factor": 2.0}, ValueError, "scaling lacks 'rope_type'"),
    ({"rope_type": "longrope"}, ValueError, "scaling has rope_type 'longrope'; cattn.rope knows 'default', 'linear', "),
    ({"type": "su", "factor": 2}, ValueError, "scaling has rope_type 'su'; cattn.rope knows"),
    ({"rope_type": "yarn", "type": "linear"}, ValueError, "scaling has rope_type 'yarn' and type 'linear': pass one"),
    (
        {"rope_type": "linear", "factor": 2.0, "faktor": 1, "beta": 2},
        ValueError,
        "scaling has unknown keys 'faktor', 'beta'; rope_type 'linear' has 'factor'$",
    ),
    ({"rope_type": "default", "factor": 2.0}, ValueError, "scaling has unknown keys 'factor'; .* has no other key$"),
    (
        {"full_attention": {"rope_type": "default"}, "rope_type": "default"},
        ValueError,
        "scaling has a dict for each of 'full_attention': pass that of one layer type$",
    ),
    ({"rope_type": "linear"}, ValueError, "scaling lacks 'factor', which rope_type 'linear' needs"),
    (
        {"rope_type": "yarn", "factor": None, LENGTH: 64},
        ValueError,
        "scaling lacks 'factor'.*max_position_embeddings /",
    ),
    ({"rope_type": "dynamic", "factor": 2}, ValueError, f"scaling lacks '{LENGTH}'.*: config.max_position_embeddings"),
    (
        without(LLAMA3, "low_freq_factor"),
        ValueError,
        "scaling lacks 'low_freq_factor', which rope_type 'llama3' needs$",
    ),
    ({"rope_type": "linear", "factor": 0.5}, ValueError, r"scaling\['factor'\] must be at least 1, got 0.5"),
    ({"rope_type": "linear", "factor": NAN}, ValueError, r"scaling\['factor'\] must be finite, got nan"),
    ({"rope_type": "linear", "factor": 10**400}, ValueError, r"scaling\['factor'\] must be finite, got inf"),
    ({"rope_type": "linear", "factor": "2"}, TypeError, r"scaling\['factor'\] must be a real number, got str"),
    ({"rope_type": "linear", "factor": True}, TypeError, r"scaling\['factor'\] must be a real number, got bool"),
    ({"rope_type": "linear", "factor": [2.0]}, TypeError, r"scaling\['factor'\] must be a real number, got list"),
    (
        {"rope_type": "linear", "factor": np.ones(1)},
        TypeError,
        r"scaling\['factor'\] must be a real number, got ndarray",
    ),
    ({"rope_type": ["linear"]}, TypeError, r"scaling\['rope_type'\] must be a str, got list"),
    ({**YARN, LENGTH: 0}, ValueError, rf"scaling\['{LENGTH}'\] must be positive, got 0"),
    ({**YARN, "attention_factor": 0.0}, ValueError, r"scaling\['attention_factor'\] must be positive, got 0.0"),
    ({**YARN, "beta_slow": -1}, ValueError, r"scaling\['beta_slow'\] must be positive, got -1"),
    ({**YARN, "beta_fast": 0.5}, ValueError, r"scaling\['beta_fast'\] must be such that beta_fast, 0.5, is at least"),
    ({**YARN, "beta_slow": 64}, ValueError, r"scaling\['beta_slow'\] must be such that beta_fast, 32.0, is at least"),
    ({**YARN, "truncate": 1}, TypeError, r"scaling\['truncate'\] must be True or False, got int"),
    ({**LLAMA3, "low_freq_factor": 0}, ValueError, r"scaling\['low_freq_factor'\] must be positive, got 0"),
    ({**LLAMA3, "high_freq_factor": 1}, ValueError, r"scaling\['high_freq_factor'\] must be larger than low_freq"),
    (
        {"rope_type": "default", "rope_theta": 500000.0},
        ValueError,
        r"scaling has rope_theta 500000.0, but theta is 10000.0: pass theta=scaling\['rope_theta'\]",
    ),
    (
        {"rope_type": "default", "partial_rotary_factor": 0.25},
        ValueError,
        r"scaling has partial_rotary_factor 0.25, which is 2 of 8 columns, but rotary_dim is 8: pass rotary_dim=2",
    ),
]


@pytest.mark.promise("errors")
@pytest.mark.parametrize(("scaling", "error", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_scaling_is_refused(scaling: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=f"^{says}"):
        cattn.rope(np.ones((3, 8)), scaling=scaling)


@pytest.mark.promise("errors")
def test_scalings_that_need_more_of_the_call() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, LENGTH: 16}
    with pytest.raises(ValueError, match=r"^scaling has rope_type 'dynamic', which needs a rotary_dim of at least 4, "):
        cattn.rope(np.ones((3, 8)), rotary_dim=2, scaling=dynamic)
    with pytest.raises(ValueError, match=r"^scaling has rope_type 'yarn', which needs a theta above 1, got 1\.0"):
        cattn.rope(np.ones((3, 8)), theta=1, scaling=YARN)


def test_keys_that_agree_with_the_arguments_are_fine() -> None:
    x = np.ones((3, 8))
    both = {"rope_type": "default", "type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5}
    assert_same_bits(cattn.rope(x, theta=500, rotary_dim=4, scaling=both), cattn.rope(x, theta=500, rotary_dim=4))
    nothing = dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"))
    assert_same_bits(cattn.rope(x, scaling={**nothing, **YARN}), cattn.rope(x, scaling=YARN))
