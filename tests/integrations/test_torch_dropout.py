"""Attention with a TorchGenerator drops what PyTorch drops, element by element, on every path and kernel table."""

from __future__ import annotations

import numpy as np
import pytest

import cattn
from cattn import _cattn

torch = pytest.importorskip("torch")

CASES = {
    "2-d": ((6, 2), (6, 2)),
    "3-d": ((2, 6, 3), (2, 6, 3)),
    "heads": ((2, 3, 7, 4), (2, 3, 7, 4)),
    "more than a tile": ((1, 4, 130, 16), (1, 4, 130, 16)),
    "grouped": ((2, 4, 5, 8), (2, 2, 9, 8)),
    "grouped tiles": ((2, 4, 100, 8), (2, 2, 200, 8)),
    "three key chunks": ((1, 2, 3, 8), (1, 2, 4700, 8)),
}


def draw(name: str) -> list[np.ndarray]:
    rng = np.random.default_rng(len(name))
    query, key = CASES[name]
    return [rng.standard_normal(shape) for shape in (query, key, key)]


@pytest.mark.promise("PyTorch's generator")
@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_the_dropout_mask_is_that_of_pytorch(isa: str, name: str, p: float) -> None:
    arrays = draw(name)
    causal = CASES[name][0] == CASES[name][1]
    torch.manual_seed(7)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *map(torch.from_numpy, arrays), dropout_p=p, is_causal=causal, enable_gqa=name.startswith("grouped")
    ).numpy()
    following = torch.rand(3).numpy()
    try:
        for path in ("auto", "tile", "rows", "split"):
            _cattn._set_path(path)
            for n in (1, 2, 3):
                generator = cattn.TorchGenerator(7)
                with cattn.num_threads(n):
                    result = cattn.scaled_dot_product_attention(
                        *arrays, dropout_p=p, is_causal=causal, rng=generator, return_dropout_mask=True
                    )
                # The tolerance covers float64 rounding. One wrong element of the mask would be off by more than 1e-4.
                np.testing.assert_allclose(result.out, expected, rtol=0, atol=1e-12, err_msg=f"{path}, {n} threads")
                assert np.array_equal(generator.rand(3), following), "the stream continues where PyTorch's does"
                assert result.dropout_seed is None
                dropout_mask = cattn.TorchGenerator(7).dropout_mask(p, *result.dropout_mask.shape)
                assert np.array_equal(result.dropout_mask, dropout_mask)
    finally:
        _cattn._set_path("auto")


def test_the_mkl_stream_advances_the_generator_by_one_draw() -> None:
    arrays = draw("heads")
    generator, other = (cattn.TorchGenerator(3, dropout="mkl") for _ in range(2))
    result = cattn.causal_attention(*arrays, dropout_p=0.5, rng=generator, return_dropout_mask=True)
    assert np.array_equal(result.dropout_mask, other.dropout_mask(0.5, *result.dropout_mask.shape))
    assert np.array_equal(generator.rand(4), other.rand(4))


@pytest.mark.parametrize(("p", "shape"), [(0.0, (5, 4)), (1.0, (5, 4)), (0.5, (0, 4))])
def test_a_call_that_drops_nothing_or_everything_leaves_the_generator_alone(p: float, shape: tuple[int, int]) -> None:
    generator = cattn.TorchGenerator(1)
    before = generator.get_state()
    x = np.ones((5, 4))
    result = cattn.scaled_dot_product_attention(np.ones(shape), x, x, dropout_p=p, rng=generator)
    assert np.array_equal(generator.get_state(), before)
    assert np.array_equal(result, np.full(shape, 1.0 - p))


@pytest.mark.promise("failed calls")
def test_a_call_that_raises_leaves_the_generator_alone() -> None:
    generator = cattn.TorchGenerator(1)
    before = generator.get_state()
    x = np.ones((5, 4))
    with pytest.raises(ValueError, match="value has T_k 4"):
        cattn.scaled_dot_product_attention(x, x, x[1:], dropout_p=0.5, rng=generator)
    assert np.array_equal(generator.get_state(), before)
