"""The chapter's layers: values against PyTorch modules like those of the book, modes, cache, errors, copies."""

import copy
import doctest
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
from cattn import cache
from cattn.nn import _chapter, _layers
from support import assert_same_bits

torch = pytest.importorskip("torch")

Normal = Callable[..., np.ndarray]


# ---- the book's modules, in PyTorch ----------------------------------------------------------------------------------
class TorchAttention(torch.nn.Module):
    """All classes of the chapter that use nn.Linear in one: any heads, with or without causal mask and output layer."""

    def __init__(
        self,
        d_in: int,
        d_out: int,
        *,
        causal: bool = True,
        dropout: float = 0.0,
        heads: int = 1,
        bias: bool = False,
        kv: int | None = None,
        out: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.kv, self.causal = heads, kv or heads, causal
        d_kv = d_out // heads * self.kv
        self.W_query = torch.nn.Linear(d_in, d_out, bias=bias)
        self.W_key = torch.nn.Linear(d_in, d_kv, bias=bias)
        self.W_value = torch.nn.Linear(d_in, d_kv, bias=bias)
        if out:
            self.out_proj = torch.nn.Linear(d_out, d_out)
        self.dropout = torch.nn.Dropout(dropout)
        if causal:
            self.register_buffer("mask", torch.triu(torch.ones(64, 64), diagonal=1))

    def forward(self, x: Any) -> Any:
        batch, tokens, _ = x.shape
        q = self.W_query(x).view(batch, tokens, self.heads, -1).transpose(1, 2)
        k = self.W_key(x).view(batch, tokens, self.kv, -1).transpose(1, 2)
        v = self.W_value(x).view(batch, tokens, self.kv, -1).transpose(1, 2)
        k, v = (a.repeat_interleave(self.heads // self.kv, dim=1) for a in (k, v))
        scores = q @ k.transpose(2, 3)
        if self.causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        context = (weights @ v).transpose(1, 2).reshape(batch, tokens, -1)
        return self.out_proj(context) if hasattr(self, "out_proj") else context


class TorchWrapper(torch.nn.Module):
    def __init__(self, heads: int, *args: Any, **keywords: Any) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList([TorchAttention(*args, **keywords) for _ in range(heads)])

    def forward(self, x: Any) -> Any:
        return torch.cat([head(x) for head in self.heads], dim=-1)


def numpy_rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def mha(*args: Any, **keywords: Any) -> cattn.MultiHeadAttention:
    return cattn.MultiHeadAttention(*args, **{"rng": numpy_rng()} | keywords)


# name: (ours, PyTorch's), all with d_in 6
MODELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "v2": (lambda **k: cattn.SelfAttention_v2(6, 5, **k), lambda: TorchAttention(6, 5, causal=False)),
    "v2, bias": (
        lambda **k: cattn.SelfAttention_v2(6, 5, True, **k),
        lambda: TorchAttention(6, 5, causal=False, bias=True),
    ),
    "causal": (lambda **k: cattn.CausalAttention(6, 5, 64, 0.3, **k), lambda: TorchAttention(6, 5, dropout=0.3)),
    "causal, bias": (
        lambda **k: cattn.CausalAttention(6, 5, 64, 0.3, True, **k),
        lambda: TorchAttention(6, 5, dropout=0.3, bias=True),
    ),
    "wrapper": (
        lambda **k: cattn.MultiHeadAttentionWrapper(6, 5, 64, 0.3, 3, **k),
        lambda: TorchWrapper(3, 6, 5, dropout=0.3),
    ),
    "heads": (
        lambda **k: cattn.MultiHeadAttention(6, 8, 64, 0.3, 4, **k),
        lambda: TorchAttention(6, 8, heads=4, dropout=0.3, out=True),
    ),
    "groups": (
        lambda **k: cattn.MultiHeadAttention(6, 8, 64, 0.3, 4, True, num_kv_groups=2, **k),
        lambda: TorchAttention(6, 8, heads=4, kv=2, dropout=0.3, bias=True, out=True),
    ),
    "one group": (
        lambda **k: cattn.MultiHeadAttention(6, 8, 64, 0.3, 4, num_kv_groups=1, **k),
        lambda: TorchAttention(6, 8, heads=4, kv=1, dropout=0.3, out=True),
    ),
}  # fmt: skip
CAUSAL = [name for name in MODELS if not name.startswith("v2")]
ALL_OURS = {name: ours for name, (ours, _) in MODELS.items()} | {"v1": lambda **k: cattn.SelfAttention_v1(6, 5, **k)}


def assert_as_good_as_torch(ours: Any, theirs: Any, *xs: np.ndarray) -> None:
    """Assert an RMS error of at most twice the error of PyTorch in float32, both measured against PyTorch in float64.

    Not the largest error: of so few numbers it is chance, and differs by more than twice between two orders of a sum.
    """
    wide = copy.deepcopy(theirs).double()
    errors: dict[str, list[np.ndarray]] = {"ours": [], "theirs": []}
    for x in xs:
        with torch.no_grad():
            exact = wide(torch.from_numpy(x).double()).numpy()
            results = {"ours": ours(x), "theirs": theirs(torch.from_numpy(x)).numpy()}
        for whose, result in results.items():
            assert result.dtype == np.float32
            assert result.shape == exact.shape
            errors[whose].append(((result - exact) ** 2).ravel())
    mine, other = (np.sqrt(np.concatenate(errors[whose]).mean()) for whose in ("ours", "theirs"))
    assert mine <= 2 * other


@pytest.mark.promise("PyTorch's function")
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_as_accurate_as_pytorch(name: str, normal: Normal) -> None:
    torch.manual_seed(0)
    ours, theirs = MODELS[name][0](rng=numpy_rng()), MODELS[name][1]().eval()
    ours.load_state_dict(theirs.state_dict())
    ours.eval()
    assert_as_good_as_torch(ours, theirs, normal(1, 1, 6), normal(3, 17, 6), normal(2, 64, 6))


def test_a_layer_of_the_size_of_gpt2_is_as_accurate_as_pytorch(normal: Normal) -> None:
    torch.manual_seed(0)
    theirs = TorchAttention(768, 768, heads=12, bias=True, out=True).eval()
    ours = mha(768, 768, 256, 0.1, 12, True).eval()
    ours.load_state_dict(theirs.state_dict())
    assert_as_good_as_torch(ours, theirs, normal(1, 256, 768))


def test_multi_head_attention_agrees_with_that_of_pytorch(normal: Normal) -> None:
    theirs = torch.nn.MultiheadAttention(24, 4, batch_first=True).eval()
    ours = mha(24, 24, 64, 0.0, 4, True)
    ours.load_state_dict(theirs.state_dict())
    x = normal(2, 20, 24)
    hide = torch.ones(20, 20).triu(1).bool()
    with torch.no_grad():
        t = torch.from_numpy(x)
        expected, weights = theirs(t, t, t, attn_mask=hide, average_attn_weights=False)
    got, got_weights = ours(x, return_weights=True)
    np.testing.assert_allclose(got, expected.numpy(), atol=1e-6)
    np.testing.assert_allclose(got_weights, weights.numpy(), atol=1e-6)


# ---- randomness ------------------------------------------------------------------------------------------------------
@pytest.mark.promise("PyTorch's generator")
@pytest.mark.parametrize("name", MODELS)
def test_seeds_give_the_initial_weights_of_pytorch(name: str) -> None:
    ours, theirs = MODELS[name]
    torch.manual_seed(42)
    expected = theirs().state_dict()
    cattn.manual_seed(42)
    implicit = ours().state_dict()
    for state in (implicit, ours(rng=cattn.TorchGenerator(42)).state_dict(), ours(rng=42).state_dict()):
        for key, value in state.items():
            assert_same_bits(value, expected[key].numpy())


@pytest.mark.parametrize("name", CAUSAL)
def test_seeds_give_the_dropout_of_pytorch(name: str, normal: Normal) -> None:
    torch.manual_seed(0)
    ours, theirs = (build() for build in MODELS[name])
    ours.load_state_dict(theirs.state_dict())
    x = normal(2, 9, 6)
    torch.manual_seed(7)
    cattn.manual_seed(7)
    for _ in range(2):  # the second call continues the stream
        with torch.no_grad():
            expected = theirs(torch.from_numpy(x)).numpy()
        np.testing.assert_allclose(ours(x), expected, atol=2e-6)


@pytest.mark.parametrize("name", ALL_OURS)
def test_numpy_generators_initialise_layers_reproducibly(name: str) -> None:
    a, b, c = (ALL_OURS[name](rng=seed).state_dict() for seed in (numpy_rng(1), numpy_rng(1), numpy_rng(2)))
    assert all(np.array_equal(a[key], b[key]) for key in a)
    assert not any(np.array_equal(a[key], c[key]) for key in a)
    for key, value in a.items():
        assert value.dtype == np.float32
        bound = 1 / np.sqrt(8 if "out_proj" in key else 6)
        if name == "v1":
            assert value.min() >= 0
            assert value.max() < 1
        else:
            assert np.abs(value).max() <= np.float32(bound)


@pytest.mark.parametrize("name", CAUSAL)
def test_dropout_happens_only_in_training(name: str, normal: Normal) -> None:
    module = ALL_OURS[name](rng=numpy_rng())
    x = normal(2, 12, 6)
    assert module.training
    first, second = module(x), module(x)
    assert not np.array_equal(first, second)
    assert module.eval() is module
    assert not module.training
    assert_same_bits(module(x), module(x))
    assert not np.array_equal(module(x), first)
    assert module.train() is module
    assert not np.array_equal(module(x), module(x))


@pytest.mark.parametrize("name", CAUSAL)
def test_the_mean_over_dropout_is_the_result_without(name: str, normal: Normal) -> None:
    module = ALL_OURS[name](rng=numpy_rng())
    x = normal(1, 6, 6)
    out, weights = module(x, return_weights=True)
    many = np.array([module(x) for _ in range(4000)], np.float64)
    whole, whole_weights = module.eval()(x, return_weights=True)
    assert_same_bits(weights, whole_weights)  # the returned weights are those before dropout
    assert not np.array_equal(out, whole)
    spread = many.std(axis=0) / np.sqrt(len(many))
    assert np.all(np.abs(many.mean(axis=0) - whole) < 6 * spread + 1e-6)  # six sigma, for some 100 numbers


def test_train_and_eval_reach_every_sublayer() -> None:
    wrapper = ALL_OURS["wrapper"](rng=numpy_rng()).eval()
    parts = [*wrapper.heads, *(head.dropout for head in wrapper.heads), wrapper.heads[2].W_key]
    assert not any(part.training for part in parts)
    wrapper.train(True)
    assert all(part.training for part in parts)
    module = ALL_OURS["causal"](rng=numpy_rng())
    module.dropout.eval()  # as in PyTorch, the layer decides
    x = np.ones((3, 6), np.float32)
    assert_same_bits(module(x), module(x))


def test_heads_may_have_different_dropout(normal: Normal) -> None:
    wrapper = ALL_OURS["wrapper"](rng=numpy_rng())
    x = normal(2, 9, 6)
    whole = copy.deepcopy(wrapper).eval()(x)
    for head in (0, 2):
        wrapper.heads[head].dropout.p = 0.0
    out = wrapper(x)
    assert_same_bits(out[..., :5], whole[..., :5])
    assert_same_bits(out[..., 10:], whole[..., 10:])
    assert not np.array_equal(out[..., 5:10], whole[..., 5:10])


def test_the_dropout_layer_scales_what_it_does_not_drop(normal: Normal) -> None:
    x = normal(50, 40)
    layer = cattn.Dropout(0.25, rng=numpy_rng(3))
    out = layer(x)
    mask = out != 0
    assert 0.7 < mask.mean() < 0.8
    np.testing.assert_allclose(out[mask], x[mask] / 0.75, rtol=1e-6)
    assert not np.array_equal(layer(x), out)
    same = layer.eval()(x)
    assert_same_bits(same, x)
    assert not np.shares_memory(same, x)
    assert_same_bits(cattn.Dropout(0.0)(x), x)


# ---- shapes, dtypes, extras ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ALL_OURS)
def test_a_batch_and_a_single_sequence_agree(name: str, normal: Normal) -> None:
    module = ALL_OURS[name](rng=numpy_rng()).eval()
    x = normal(3, 11, 6)
    out, weights = module(x, return_weights=True)
    one, one_weights = module(x[1], return_weights=True)
    assert one.shape == out.shape[1:]
    assert one_weights.shape == weights.shape[1:]
    np.testing.assert_allclose(one, out[1], atol=1e-6)
    np.testing.assert_allclose(one_weights, weights[1], atol=1e-6)
    heads = {"wrapper": (3,), "heads": (4,), "groups": (4,), "one group": (4,)}.get(name, ())
    assert weights.shape == (3, *heads, 11, 11)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert_same_bits(module(x), out)
    if name in CAUSAL:
        assert not weights[..., ~np.tri(11, dtype=bool)].any()
    assert module(x[:0]).shape == (0, *out.shape[1:])
    assert module(x[:, :0]).shape == (3, 0, out.shape[-1])


@pytest.mark.parametrize("name", ALL_OURS)
def test_layers_have_a_dtype_and_promote_with_their_input(name: str, normal: Normal) -> None:
    narrow, wide = (ALL_OURS[name](rng=numpy_rng(), dtype=dtype).eval() for dtype in ("float32", np.float64))
    wide.load_state_dict(narrow.state_dict())
    x = normal(5, 6)
    assert narrow(x).dtype == np.float32
    assert {value.dtype for value in wide.state_dict().values()} == {np.dtype("float64")}
    for module, given in ((wide, x), (narrow, x.astype(np.float64)), (narrow, x.astype(np.float64).tolist())):
        assert module(given).dtype == np.float64
        np.testing.assert_allclose(module(given), narrow(x), atol=1e-6)
    assert_same_bits(narrow(torch.from_numpy(x)), narrow(x))
    assert "float64" in repr(wide)
    assert "float32" not in repr(narrow)


def test_linear_is_x_times_weight_plus_bias(dtype: type, normal: Normal) -> None:
    layer = cattn.Linear(6, 4, dtype=dtype, rng=numpy_rng())
    for shape in ((6,), (3, 6), (2, 0, 6), (2, 3, 5, 6)):
        x = normal(*shape, dtype=dtype)
        assert layer(x).shape == (*shape[:-1], 4)
        assert layer(x).dtype == dtype
        np.testing.assert_allclose(layer(x), x @ layer.weight.T + layer.bias, rtol=1e-5, atol=1e-6)
    assert cattn.Linear(6, 4, bias=False, rng=numpy_rng()).bias is None
    with pytest.raises(ValueError, match=r"x has shape \(3, 5\), wanted \(..., 6\)"):
        layer(normal(3, 5))


def test_inputs_are_not_modified(normal: Normal) -> None:
    for name, make in ALL_OURS.items():
        x = normal(2, 5, 6)
        before = x.copy()
        x.flags.writeable = False
        make(rng=numpy_rng())(x)
        assert_same_bits(x, before, name)


def test_no_buffer_has_the_size_of_the_context() -> None:
    module = cattn.CausalAttention(6, 5, 10**12, 0.0, rng=numpy_rng())
    assert module(np.ones((4, 6))).shape == (4, 5)
    assert set(module.state_dict()) == {"W_query.weight", "W_key.weight", "W_value.weight"}


# ---- with a cache ----------------------------------------------------------------------------------------------------
def exact(name: str, rng: np.random.Generator) -> Any:
    """Return a module whose projections are exact in any order of summation: multiples of 1/4, identity out_proj."""
    module = ALL_OURS[name](rng=numpy_rng()).eval()
    state = {key: rng.integers(-3, 4, value.shape) / 4 for key, value in module.state_dict().items()}
    if "out_proj.weight" in state:
        state["out_proj.weight"] = np.eye(8)
    module.load_state_dict(state)
    return module


CACHES: dict[str, tuple[int, int]] = {
    "causal": (1, 5), "causal, bias": (1, 5), "wrapper": (3, 5), "heads": (4, 2), "groups": (2, 2), "one group": (1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_decoding_in_steps_has_the_bits_of_one_pass(
    name: str, batch: tuple[int, ...], p: float, rng: np.random.Generator
) -> None:
    module = exact(name, rng)
    for layer in module._dropouts():
        layer.p = p
        layer.train().draw_from = lambda: 9  # one seed for all calls: dropout depends on the position
    x = rng.integers(-3, 4, (*batch, 20, 6)).astype(np.float32)
    cache = cattn.KVCache(batch, CACHES[name][0], 64, CACHES[name][1])
    full, weights = module(x, return_weights=True)
    start = 0
    for count in (1, 1, 7, 0, 10, 1):
        now = slice(start, start + count)
        out, step = module(x[..., now, :], return_weights=True, cache=cache)
        assert_same_bits(out, full[..., now, :])
        start += count
        assert_same_bits(step, weights[..., now, :start])
    np.testing.assert_array_equal(cache.lengths, np.full(batch, 20))


def test_prompts_of_different_lengths_are_decoded_together(rng: np.random.Generator) -> None:
    module = exact("groups", rng)
    x = rng.integers(-3, 4, (3, 12, 6)).astype(np.float32)
    full = module(x)
    cache = cattn.KVCache(3, 2, 64, 2)
    module(x[:, :8], cache=cache)
    cache.truncate([8, 2, 5])
    for step in range(4):
        rows = np.arange(3), np.array([8, 2, 5]) + step
        assert_same_bits(module(x[rows][:, None], cache=cache)[:, 0], full[rows])


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (((2,), 2, 64, 2, None, "float32"), None, ""),
        (((2,), 2, 64, 2, None, "float64"), None, ""),
        (((), 2, 64, 2, None, "float32"), ValueError, r"cache has batch_shape \(\), wanted \(2,\)"),
        (((2,), 4, 64, 2, None, "float32"), ValueError, "cache has num_kv_heads 4, wanted 2"),
        (((2,), 2, 64, 4, None, "float32"), ValueError, "cache has head_dim 4, wanted 2"),
        (((2,), 2, 64, 2, 3, "float32"), ValueError, "cache has v_head_dim 3, wanted 2"),
        (((2,), 2, 4, 2, None, "float32"), ValueError, "the cache is full: it has 0 of max_len=4 tokens, 5 more"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(cache: tuple[Any, ...], error: Any, message: str, normal: Normal) -> None:
    module = ALL_OURS["groups"](rng=numpy_rng())
    x, store = normal(2, 5, 6), cattn.KVCache(*cache)
    if error is None:
        assert module(x, cache=store).dtype == store.dtype
        return
    with pytest.raises(error, match=message):
        module(x, cache=store)
    assert not store.lengths.any()


def test_a_call_that_raises_leaves_the_cache_unchanged(normal: Normal, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ALL_OURS["groups"](rng=numpy_rng()).eval()
    cache = cattn.KVCache(2, 2, 100, 2)
    with pytest.raises(TypeError, match=r"cache must be a cattn\.KVCache, got list"):
        module(normal(2, 5, 6), cache=[])
    with pytest.raises(TypeError, match="keys would be float64 as x is float64, the cache holds float32"):
        module(normal(2, 5, 6, dtype=np.float64), cache=cache)
    module(normal(2, 60, 6), cache=cache)
    with pytest.raises(ValueError, match="x has 5 tokens behind 60 in the cache, context_length is 64"):
        module(normal(2, 5, 6), cache=cache)

    def interrupted(*args: Any, **keywords: Any) -> None:
        raise KeyboardInterrupt

    before = cache.k.copy()
    monkeypatch.setattr("cattn.nn._attention.causal_attention", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module(normal(2, 3, 6), cache=cache)
    assert_same_bits(cache.k, before)
    assert cache.lengths.tolist() == [60, 60]


# ---- errors, copies --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: mha(6, 8, 4, 0.1, 3), ValueError, "d_out must be a multiple of num_heads, got 8 and 3"),
        (lambda: mha(6, 8, 4, 0.1, 4, num_kv_groups=3), ValueError, "multiple of num_kv_groups, got 4 and 3"),
        (lambda: mha(6, 8, 4, 0.1, 4, num_kv_groups=0), ValueError, "num_kv_groups must be at least 1, got 0"),
        (lambda: mha(6, 8, 0, 0.1, 4), ValueError, "context_length must be at least 1, got 0"),
        (lambda: mha(6, 8.0, 4, 0.1, 4), TypeError, "d_out must be an int, got float"),
        (lambda: mha(6, 8, 4, 1.1, 4), ValueError, r"dropout probability must be in \[0, 1\], got 1.1"),
        (lambda: mha(6, 8, 4, float("nan"), 4), ValueError, "dropout probability must be finite, got nan"),
        (lambda: mha(6, 8, 4, "0.1", 4), TypeError, "dropout probability must be a real number, got str"),
        (lambda: mha(6, 8, 4, 0.1, 4, dtype="f2"), TypeError, "dtype must be float32 or float64, got float16"),
        (lambda: mha(6, 8, 4, 0.1, 4, rng=True), TypeError, "rng must be None, an int, .* got bool"),
        (lambda: mha(6, 8, 4, 0.1, 4, rng="seed"), TypeError, "rng must be None, an int, a TorchGenerator or"),
        (lambda: mha(6, 8, 4, 0.1, 4, rng=2**70), ValueError, rf"^rng must be in .* got {2**70}"),
        (lambda: cattn.Dropout(0.1, rng=-(2**63) - 1), ValueError, r"^rng must be in -2\*\*63 <= rng < 2\*\*64 if"),
        (lambda: cattn.SelfAttention_v1(6, 8, rng=2**64), ValueError, "^rng must be in "),
        (lambda: cattn.Linear(0, 4), ValueError, "d_in must be at least 1, got 0"),
        (lambda: mha(6, 8, 4, 0.1, 4)(np.ones((5, 6))), ValueError, "x has 5 tokens, context_length is 4"),
        (lambda: mha(6, 8, 4, 0.1, 4)(np.ones(6)), ValueError, r"x has shape \(6,\), wanted \(T, 6\) or \(B, T, 6\)"),
        (lambda: mha(6, 8, 4, 0.1, 4)(np.ones((3, 5))), ValueError, r"x has shape \(3, 5\), wanted \(T, 6\)"),
        (lambda: mha(6, 8, 4, 0.1, 4)(np.ones((1, 1, 3, 6))), ValueError, "x has shape"),
        (lambda: mha(6, 8, 4, 0.1, 4)(np.ones((3, 6), "c8")), TypeError, "x has dtype complex64"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ALL_OURS)
def test_copies_are_independent_and_equal(name: str, normal: Normal) -> None:
    module = ALL_OURS[name](rng=numpy_rng())
    x = normal(2, 7, 6)
    module(x)
    for twin_of in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        twin = twin_of(module)
        assert repr(twin) == repr(module)
        for key, value in module.state_dict().items():
            assert_same_bits(twin.state_dict()[key], value)
            assert not np.shares_memory(twin.state_dict()[key], value)
        assert_same_bits(twin(x), copy.deepcopy(module)(x))  # both generators have the same state
        twin.load_state_dict({key: np.zeros(value.shape) for key, value in twin.state_dict().items()})
        assert all(value.any() for value in module.state_dict().values())
    assert_same_bits(copy.copy(module).eval()(x), module.eval()(x))


def test_repr_can_be_evaluated() -> None:
    shown = {name: repr(make(rng=numpy_rng())) for name, make in ALL_OURS.items()}
    assert shown["v1"] == "SelfAttention_v1(6, 5)"
    assert shown["v2, bias"] == "SelfAttention_v2(6, 5, qkv_bias=True)"
    assert shown["causal"] == "CausalAttention(6, 5, context_length=64, dropout=0.3, qkv_bias=False)"
    assert shown["wrapper"].startswith("MultiHeadAttentionWrapper(6, 5, context_length=64, dropout=0.3, num_heads=3,")
    assert shown["groups"].endswith("num_heads=4, qkv_bias=True, num_kv_groups=2)")
    assert repr(cattn.Linear(3, 2, rng=numpy_rng())) == "Linear(3, 2, bias=True)"
    assert repr(cattn.Dropout(0.1)) == "Dropout(0.1)"
    for name, text in shown.items():
        assert repr(eval(text.replace(")", ", rng=numpy_rng())"), vars(cattn) | {"numpy_rng": numpy_rng})) == text, name


@pytest.mark.parametrize("module", [_chapter, cache, _layers])
def test_the_examples_of_the_modules_run(module: Any) -> None:
    """The public classes say that they are of ``cattn`` or ``cattn.nn``: doctest finds methods one by one only."""
    finder, runner = doctest.DocTestFinder(exclude_empty=True), doctest.DocTestRunner()
    classes = [
        x
        for x in vars(module).values()
        if isinstance(x, type) and x.__module__ in (module.__name__, "cattn", "cattn.nn")
    ]
    for owner in (module, *classes):
        for test in finder.find(owner, owner.__name__, module=module, globs=vars(module).copy()):
            runner.run(test)
    assert runner.tries > 0
    assert runner.failures == 0
