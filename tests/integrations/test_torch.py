"""cattn beside PyTorch: values, dropout, tensors without a copy, and the chapter's modules."""

import gc
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import _cattn
from support import INF

torch = pytest.importorskip("torch")
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from cattn.integrations.torch import _tensors, nn, scaled_dot_product_attention  # noqa: E402

Normal = Callable[..., np.ndarray]
sdpa = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def torch_threads() -> None:
    torch.set_num_threads(2)


def by_math(*tensors: torch.Tensor, **options: Any) -> np.ndarray:
    """PyTorch's unfused path: every step is a tensor operation of its own."""
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(*tensors, **options).numpy()


# ---- float64 -------------------------------------------------------------------------------------------------------
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
SAME: list[Shapes] = [
    ((6, 3), (6, 3), (6, 3)),
    ((1, 1), (1, 1), (1, 1)),
    ((40, 16), (70, 16), (70, 5)),
    ((1, 64), (300, 64), (300, 64)),
    ((200, 300), (200, 300), (200, 130)),
    ((3, 50, 8), (3, 90, 8), (3, 90, 8)),
    ((2, 4, 6, 3), (2, 4, 6, 3), (2, 4, 6, 3)),
    ((2, 3, 97, 33), (2, 3, 193, 33), (2, 3, 193, 17)),
    ((1, 2, 5, 64), (1, 2, 1700, 64), (1, 2, 1700, 64)),
    ((2, 3, 2, 30, 8), (2, 3, 2, 40, 8), (2, 3, 2, 40, 8)),
    ((2, 1, 2, 2, 9, 8), (2, 1, 2, 2, 11, 8), (2, 1, 2, 2, 11, 3)),
]


def some(normal: Normal, shapes: Shapes) -> tuple[list[np.ndarray], list[torch.Tensor]]:
    arrays = [normal(*shape, dtype=np.float64) for shape in shapes]
    return arrays, [torch.from_numpy(a) for a in arrays]


def assert_close(actual: np.ndarray, right: np.ndarray) -> None:
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, right, rtol=1e-12, atol=1e-12)


@pytest.mark.promise("PyTorch's function")
@pytest.mark.parametrize("shapes", SAME, ids=str)
def test_float64_agrees_with_pytorch(isa: str, shapes: Shapes, normal: Normal, rng: np.random.Generator) -> None:
    arrays, tensors = some(normal, shapes)
    T_q, T_k = shapes[0][-2], shapes[1][-2]
    assert_close(cattn.scaled_dot_product_attention(*arrays), by_math(*tensors))
    assert_close(cattn.scaled_dot_product_attention(*arrays, scale=0.3), by_math(*tensors, scale=0.3))
    assert_close(cattn.scaled_dot_product_attention(*arrays, is_causal="upper_left"), by_math(*tensors, is_causal=True))
    # with the alignment of torch.nn.attention.bias.causal_lower_right
    lower_right = torch.ones(T_q, T_k, dtype=torch.bool).tril(T_k - T_q)
    assert_close(cattn.causal_attention(*arrays), by_math(*tensors, attn_mask=lower_right))
    mask = rng.random((T_q, T_k)) < 0.7
    assert_close(cattn.scaled_dot_product_attention(*arrays, mask), by_math(*tensors, attn_mask=torch.from_numpy(mask)))
    bias = np.where(mask, normal(*shapes[0][:-2], T_q, T_k, dtype=np.float64), -INF)
    assert_close(cattn.scaled_dot_product_attention(*arrays, bias), by_math(*tensors, attn_mask=torch.from_numpy(bias)))
    assert_close(
        cattn.scaled_dot_product_attention(*arrays, bias=bias), by_math(*tensors, attn_mask=torch.from_numpy(bias))
    )


@pytest.mark.promise("PyTorch's function")
@pytest.mark.parametrize("shapes", SAME, ids=str)
def test_weights_and_lse_agree_with_pytorch(isa: str, shapes: Shapes, normal: Normal) -> None:
    """With the unit matrix as value, PyTorch's output is its weights."""
    (q, k, v), (tq, tk, _) = some(normal, shapes)
    identity = torch.eye(shapes[1][-2], dtype=torch.float64).expand(*shapes[1][:-2], -1, -1)
    result = cattn.scaled_dot_product_attention(q, k, v, is_causal="upper_left", return_weights=True, return_lse=True)
    right = by_math(tq, tk, identity, is_causal=True)
    assert_close(result.weights, right)
    assert_close(cattn.attention_weights(q, k, is_causal="upper_left"), right)
    scores = tq @ tk.mT / np.sqrt(shapes[0][-1])
    hidden = ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    assert_close(result.lse, scores.masked_fill(hidden, -INF).logsumexp(-1).numpy())
    assert_close(cattn.softmax(scores.numpy()), scores.softmax(-1).numpy())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(6, 2), (6, 1), (6, 3), (4, 4)], ids=str)
def test_grouped_heads_agree_with_pytorch(isa: str, heads: tuple[int, int], causal: bool, normal: Normal) -> None:
    H, H_kv = heads
    for T_q, T_k in ((20, 20), (100, 130), (1, 200)):
        shapes = (2, H, T_q, 16), (2, H_kv, T_k, 16), (2, H_kv, T_k, 16)
        arrays, tensors = some(normal, shapes)
        right = by_math(*tensors, is_causal=causal, enable_gqa=True)
        form = "upper_left" if causal else False
        for enable in (None, True):
            assert_close(cattn.scaled_dot_product_attention(*arrays, is_causal=form, enable_gqa=enable), right)
        (q, k, v), (tq, tk, tv) = ([a[0] for a in x] for x in (arrays, tensors))
        right = by_math(tq, tk, tv, is_causal=causal, enable_gqa=True)
        assert_close(cattn.scaled_dot_product_attention(q, k, v, is_causal=form, enable_gqa=True), right)


@pytest.mark.parametrize(
    "mask_shape", [(20, 1), (1, 30), (1, 1), (3, 1, 30), (2, 1, 20, 30), (2, 3, 1, 30), (2, 3, 20, 30)], ids=str
)
def test_masks_of_every_shape_agree_with_pytorch(
    isa: str, mask_shape: tuple[int, ...], normal: Normal, rng: np.random.Generator
) -> None:
    arrays, tensors = some(normal, ((2, 3, 20, 8), (2, 3, 30, 8), (2, 3, 30, 8)))
    for mask in (rng.random(mask_shape) < 0.7, normal(*mask_shape, dtype=np.float64)):
        right = by_math(*tensors, attn_mask=torch.from_numpy(mask))
        assert_close(cattn.scaled_dot_product_attention(*arrays, mask), right)


@pytest.mark.promise("rows without keys")
def test_rows_without_visible_keys_are_zero_as_in_pytorch(isa: str, normal: Normal) -> None:
    arrays, tensors = some(normal, ((2, 9, 8), (2, 12, 8), (2, 12, 8)))
    mask = torch.ones(9, 12, dtype=torch.bool)
    mask[3:5] = False
    right = by_math(*tensors, attn_mask=mask)
    assert not right[:, 3:5].any()
    assert_close(cattn.scaled_dot_product_attention(*arrays, mask.numpy()), right)
    empty = [a[..., :0, :] for a in arrays[1:]]
    right = by_math(tensors[0], tensors[1][..., :0, :], tensors[2][..., :0, :])
    assert_close(cattn.scaled_dot_product_attention(arrays[0], *empty), right)


# ---- tensors -------------------------------------------------------------------------------------------------------
def test_tensors_give_the_bits_of_arrays(dtype: type, normal: Normal) -> None:
    q, k, v = (normal(2, 3, 40, 8, dtype=dtype) for _ in range(3))
    right = cattn.causal_attention(q, k, v)
    tensors = [torch.from_numpy(a) for a in (q, k, v)]
    result = cattn.causal_attention(*tensors)
    assert type(result) is np.ndarray
    assert (result == right).all()
    swapped = [t.swapaxes(1, 2).contiguous().swapaxes(1, 2) for t in tensors]
    assert (cattn.causal_attention(*swapped) == right).all()
    assert (cattn.causal_attention(tensors[0], k, tensors[2].detach()) == right).all()
    mask = torch.rand(40, 40, generator=torch.Generator().manual_seed(0)) < 0.5
    assert (cattn.causal_attention(*tensors, mask) == cattn.causal_attention(q, k, v, mask.numpy())).all()
    assert (cattn.softmax(tensors[0]) == cattn.softmax(q)).all()
    scores = tensors[0] @ tensors[1].mT
    assert (cattn.masked_softmax(scores, mask) == cattn.masked_softmax(scores.numpy(), mask.numpy())).all()
    assert (cattn.dropout(tensors[0], rng=1) == cattn.dropout(q, rng=1)).all()


def test_a_mask_and_a_bias_are_added_in_one_dtype(rng: np.random.Generator) -> None:
    """Their sum is not rounded to halves because gradients are followed, and a batch of masks has gradients."""
    query, mask, bias = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 2, 5, 4), (3, 5, 5), (2, 5, 5)))
    for dtype in (torch.float16, torch.bfloat16):
        inputs = [query.to(dtype)] * 3
        plain = scaled_dot_product_attention(*inputs, mask[0].to(dtype), bias=bias.to(dtype))
        followed = [x.to(dtype).requires_grad_() for x in (mask[0], bias)]
        assert torch.equal(scaled_dot_product_attention(*inputs, followed[0], bias=followed[1]), plain)
    mask.requires_grad_()
    attend = torch.vmap(lambda x, m: scaled_dot_product_attention(x, x, x, m, bias=bias))
    (own,) = torch.autograd.grad(attend(query, mask).sum(), mask)
    wanted = sdpa(query, query, query, mask[:, None] + bias)
    torch.testing.assert_close(own, torch.autograd.grad(wanted.sum(), mask)[0])


@pytest.mark.promise("kinds of arrays")
def test_tensors_are_not_copied() -> None:
    """NumPy's memory does not grow by a copy of the tensors."""
    import tracemalloc

    tensors = [torch.ones(1, 1, 40_000, 32) for _ in range(3)]  # 5 MB each
    cattn.scaled_dot_product_attention(tensors[0][..., :1, :], *tensors[1:])
    tracemalloc.start()
    try:
        cattn.scaled_dot_product_attention(tensors[0][..., :1, :], *tensors[1:])
        _, peak = tracemalloc.get_traced_memory()
        assert peak < 100_000
        tracemalloc.reset_peak()
        cattn.softmax(tensors[0].numpy().astype(np.int64)[..., :1])  # converted, so a copy
        assert tracemalloc.get_traced_memory()[1] > 5e6, "the measurement does not see a copy"
    finally:
        tracemalloc.stop()


def test_out_may_be_the_memory_of_a_tensor(dtype: type, normal: Normal) -> None:
    """The tensor sees the result without a copy."""
    q = normal(2, 40, 8, dtype=dtype)
    tensor = torch.zeros(2, 40, 8, dtype=torch.from_numpy(q).dtype)
    memory = tensor.numpy()
    assert cattn.causal_attention(q, q, q, out=memory) is memory
    assert (tensor.numpy() == cattn.causal_attention(q, q, q)).all()


def test_tensors_and_arrays_share_memory() -> None:
    x = torch.randn(1, 2, 8, 4)
    assert _tensors.as_array(x).ctypes.data == x.data_ptr()
    array = np.ones((3, 4), np.float32)
    assert _tensors.as_tensor(array, torch.float32).data_ptr() == array.ctypes.data
    half = torch.randn(3, 4, dtype=torch.bfloat16)
    assert _tensors.as_array(half).ctypes.data == half.data_ptr()


needs_dlpack = pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="an older PyTorch")


@needs_dlpack
def test_tensors_are_read_by_dlpack() -> None:
    """The short way finds what PyTorch's own way to NumPy does, and leaves to it what is no plain memory."""
    read = _cattn._array_of_tensor
    x = torch.arange(24.0).reshape(2, 3, 4)
    views = (x, x.mT, x[1:, ::2], x[0, 0, 0], x[:1].expand(3, 3, 4), torch.nn.Parameter(x), torch.ones((1,) * 20))
    for tensor in (*views, x > 3, x.half(), x.double(), x.long(), x.int(), x.char(), x.byte()):
        own, found = tensor.numpy(force=True), read(tensor)
        assert (found.dtype, found.shape, found.strides) == (own.dtype, own.shape, own.strides)
        assert found.ctypes.data == own.ctypes.data
        assert found.flags == own.flags
    cattn.softmax(_tensors.as_array(x.bfloat16()))  # the dtype is known from the first such array on
    assert np.array_equal(read(x.bfloat16()).astype(np.float32), x.numpy())
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    others = x[:0], x.to_sparse(), x.to("meta"), x.cfloat(), x.to(torch.float8_e4m3fn), freed, np.ones(3), None
    assert all(read(other) is None for other in others)
    seen: list[bool] = []
    torch.vmap(lambda row: (seen.append(read(row) is None), row)[1])(x)
    torch.func.grad(lambda x: (seen.append(read(x) is None), x.sum())[1])(x)
    assert seen == [True, True]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["attn_mask", "bias", "sinks"])
def test_a_sparse_option_is_refused_by_its_name(name: str) -> None:
    """Also once PyTorch's compiler is loaded, whose rule for tangents asks for the storage."""
    importlib.import_module("torch._dynamo")
    x, option = torch.ones(2, 4, 8), torch.ones(2) if name == "sinks" else torch.eye(4)
    with pytest.raises(TypeError, match=rf"^{name} is torch\.sparse_coo, cattn wants dense tensors"):
        cattn.integrations.torch.scaled_dot_product_attention(x, x, x, **{name: option.to_sparse()})


@needs_dlpack
def test_arrays_become_tensors_by_dlpack() -> None:
    write = _cattn._tensor_of_array
    x = np.arange(24.0).reshape(2, 3, 4)
    for array in (x, x.swapaxes(0, 2), x[1:, ::2], x[0, :1, :1], x.astype("f"), x.astype("e"), x > 3, x.astype("i8")):
        own, found = torch.from_numpy(array), write(array, torch.Tensor)
        assert (found.dtype, found.shape, found.stride()) == (own.dtype, own.shape, own.stride())
        assert found.data_ptr() == own.data_ptr()
    fixed = x.copy()
    fixed.flags.writeable = False
    for array in (x[::-1], x[:0], fixed, x.astype(">f8"), x.astype("c16"), [1.0]):
        assert write(array, torch.Tensor) is None
    assert write(x, np.ndarray) is None


def test_tensors_and_arrays_keep_the_memory_that_they_share() -> None:
    array = np.ones(1000)
    before = sys.getrefcount(array)
    tensor = _tensors.as_tensor(array)
    kept = sys.getrefcount(array)
    worker = threading.Thread(target=lambda last: None, args=(tensor,))
    del tensor  # the last reference ends in another thread
    worker.start()
    worker.join()
    del worker
    assert (kept, sys.getrefcount(array)) == (before + 1, before)
    shared = _tensors.as_array(torch.full((1000,), 3.0))
    gc.collect()
    assert (shared == 3).all()


def test_tensors_that_require_grad_are_refused() -> None:
    """The gradient would be lost silently. Under no_grad there is none, so they are accepted."""
    x = torch.ones(4, 8)
    grad = torch.ones(4, 8, requires_grad=True)
    for name, call in (
        ("query", lambda: cattn.causal_attention(grad, x, x)),
        ("key", lambda: cattn.causal_attention(x, grad, x)),
        ("value", lambda: cattn.causal_attention(x, x, grad)),
        ("bias", lambda: cattn.causal_attention(x, x, x, bias=torch.zeros(4, 4, requires_grad=True))),
        ("x", lambda: cattn.softmax(grad)),
        ("scores", lambda: cattn.masked_softmax(grad)),
        ("x", lambda: cattn.dropout(grad, 0.0)),
        ("query", lambda: cattn.attention_weights(grad, x)),
        ("x", lambda: cattn.softmax(torch.ones(4, dtype=torch.bfloat16, requires_grad=True))),
    ):
        with pytest.raises(TypeError, match=rf"{name} is a tensor that requires grad.*{name}\.detach\(\)"):
            call()
        with torch.no_grad():
            call()
    assert (cattn.causal_attention(grad.detach(), x, x) == 1).all()


# ---- dropout ---------------------------------------------------------------------------------------------------------
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


# ---- the chapter's classes as modules --------------------------------------------------------------------------------
CLASSES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "SelfAttention_v1": ("SelfAttention_v1", (6, 4), {}),
    "SelfAttention_v2": ("SelfAttention_v2", (6, 4), {"qkv_bias": True}),
    "CausalAttention": ("CausalAttention", (6, 4, 8, 0.0), {}),
    "wrapper": ("MultiHeadAttentionWrapper", (6, 4, 8, 0.0, 3), {"qkv_bias": True}),
    "a window": ("CausalAttention", (6, 4, 8, 0.0), {"window_size": (1, 0)}),
    "windows of heads": ("MultiHeadAttentionWrapper", (6, 4, 8, 0.0, 3), {"window_size": (2, 0)}),
    "a window, no bias": ("MultiHeadAttention", (6, 8, 8, 0.0, 4), {"window_size": (1, 0), "out_bias": False}),
    "many heads": ("MultiHeadAttention", (6, 8, 8, 0.0, 4), {}),
    "grouped heads": ("MultiHeadAttention", (6, 8, 8, 0.0, 4), {"num_kv_groups": 2, "qkv_bias": True}),
}


def twins(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    """Return the module and the NumPy class, drawn from the same seed."""
    cls, args, options = CLASSES[name]
    torch.manual_seed(123)
    ours = getattr(nn, cls)(*args, **options, dtype=getattr(torch, dtype))
    cattn.manual_seed(123)
    return ours, getattr(cattn, cls)(*args, **options, dtype=dtype)


def test_there_is_a_twin_of_every_attention_class() -> None:
    assert set(nn.__all__) == set(cattn.nn.__all__) - {"Linear", "Dropout"}
    assert {cls for cls, _, _ in CLASSES.values()} == set(nn.__all__)


@pytest.mark.parametrize("name", CLASSES)
def test_the_same_seed_gives_the_same_parameters(name: str) -> None:
    ours, theirs = twins(name)
    state = theirs.state_dict()
    assert set(ours.state_dict()) == set(state)
    for key, tensor in ours.state_dict().items():
        np.testing.assert_array_equal(tensor, state[key])


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)])
def test_values_weights_and_gradients_agree_with_the_numpy_class(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = twins(name, "float64")
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    context, weights = ours(x, return_weights=True)
    right, right_weights = theirs(x.detach().numpy(), return_weights=True)
    assert weights.shape == right_weights.shape
    np.testing.assert_allclose(context.detach(), right, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(weights.detach(), right_weights, rtol=1e-12, atol=1e-12)
    assert torch.equal(ours(x), context)
    grad = torch.randn(context.shape, dtype=torch.float64)
    context.backward(grad)
    grad_x = theirs.backward(grad.numpy())
    np.testing.assert_allclose(x.grad, grad_x, rtol=1e-10, atol=1e-11)
    for key, parameter in ours.named_parameters():
        np.testing.assert_allclose(parameter.grad, theirs.grads[key], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", CLASSES)
def test_state_dicts_go_both_ways(name: str) -> None:
    ours, theirs = twins(name)
    other, numpy_other = twins(name)
    for parameter in other.parameters():
        parameter.data.zero_()
    assert other.load_state_dict(theirs.state_dict()) == ([], [])
    for key, tensor in other.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key])
    assert numpy_other.load_state_dict(other.state_dict()) == ([], [])


def test_state_dicts_of_others_and_errors() -> None:
    theirs = torch.nn.MultiheadAttention(8, 4, batch_first=True)
    ours = nn.MultiHeadAttention(8, 8, 16, 0.0, 4, qkv_bias=True)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 5, 8)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(ours(x), theirs(x, x, x, attn_mask=hidden, need_weights=False)[0])
    half = nn.MultiHeadAttention(8, 8, 16, 0.0, 4, qkv_bias=True, dtype=torch.bfloat16)
    half.load_state_dict(ours.state_dict())
    assert half.W_query.weight.dtype is torch.bfloat16
    assert torch.equal(half.W_query.weight, ours.W_query.weight.bfloat16())
    state = ours.state_dict()
    before = {key: value.clone() for key, value in state.items()}
    del state["W_key.weight"]
    with pytest.raises(ValueError, match=r"cannot load into MultiHeadAttention\((.|\n)*missing: W_key\.weight"):
        ours.load_state_dict(state)
    assert ours.load_state_dict({"other": x}, strict=False).unexpected_keys == ["other"]
    assert all(torch.equal(value, before[key]) for key, value in ours.state_dict().items())
    # Inside another module PyTorch loads by name.
    model = torch.nn.Sequential(ours, torch.nn.Linear(8, 8))
    model.load_state_dict(model.state_dict())


def test_dropout_is_active_in_training_alone() -> None:
    torch.manual_seed(0)
    ours = nn.MultiHeadAttention(8, 8, 16, 0.5, 2)
    x = torch.randn(6, 8)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))
    wrapper = nn.MultiHeadAttentionWrapper(8, 4, 16, 0.5, 2)
    assert not torch.equal(wrapper(x), wrapper(x))


def test_wrong_inputs_are_refused_by_name() -> None:
    ours = nn.MultiHeadAttention(8, 8, 4, 0.0, 2)
    with pytest.raises(ValueError, match="x has 5 tokens, context_length is 4"):
        ours(torch.ones(5, 8))
    with pytest.raises(ValueError, match=r"x has shape \(5, 7\), wanted \(T, 8\) or \(B, T, 8\)"):
        ours(torch.ones(5, 7))
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got ndarray"):
        ours(np.ones((5, 8)))
    with pytest.raises(ValueError, match="d_out must be a multiple of num_heads, got 8 and 3"):
        nn.MultiHeadAttention(8, 8, 4, 0.0, 3)
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_groups, got 4 and 3"):
        nn.MultiHeadAttention(8, 8, 4, 0.0, 4, num_kv_groups=3)
    with pytest.raises(ValueError, match="context_length must be at least 1, got 0"):
        nn.CausalAttention(8, 8, 0, 0.0)


def test_a_module_compiles_and_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(nn.MultiHeadAttention(8, 8, 16, 0.1, 2), torch.nn.Linear(8, 1))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    x, y = torch.randn(16, 6, 8), torch.randn(16, 6, 1)
    losses = []
    for _ in range(12):
        loss = (compiled(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("name", CLASSES)
def test_a_module_is_traced_by_fx(name: str) -> None:
    ours, _ = twins(name)
    traced = torch.fx.symbolic_trace(ours)
    for x in (torch.randn(5, 6), torch.randn(2, 5, 6)):
        assert torch.equal(traced(x), ours(x))
        for found, right in zip(traced(x, return_weights=True), ours(x, return_weights=True), strict=True):
            assert torch.equal(found, right)


@pytest.mark.parametrize("name", CLASSES)
def test_a_loss_on_the_weights_trains(name: str) -> None:
    """The gradients of the weights follow the formula: the gradients of the output for the unit matrix as value."""
    ours, _ = twins(name, "float64")
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    parameters = [p for key, p in ours.named_parameters() if "W_query.weight" in key or key == "W_query"]
    assert torch.autograd.gradcheck(lambda *_: ours(x, return_weights=True)[1], parameters, fast_mode=True)
    grads = torch.autograd.grad(ours(x, return_weights=True)[1].square().sum(), parameters)
    assert all(grad.any() for grad in grads)
    with torch.no_grad():
        assert not ours(x, return_weights=True)[1].requires_grad
