"""state_dict, load_state_dict and files of weights: naming schemes, dtypes, damage; a failed load changes nothing."""

import itertools
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cattn
from cattn.nn._files import load_arrays, save_arrays
from support import assert_same_bits, looped, needs_links
from support.processes import finish, run_command

State = dict[str, np.ndarray]


def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def mha(d_in: int = 6, d_out: int = 8, bias: bool = True, groups: int | None = None) -> cattn.MultiHeadAttention:
    return cattn.MultiHeadAttention(d_in, d_out, 16, 0.0, 4, bias, num_kv_groups=groups, rng=rng())


def wrapper(d_in: int = 6, d_out: int = 2, bias: bool = True, heads: int = 4) -> cattn.MultiHeadAttentionWrapper:
    return cattn.MultiHeadAttentionWrapper(d_in, d_out, 16, 0.0, heads, bias, rng=rng())


def v1(d_in: int = 6, d_out: int = 8) -> cattn.SelfAttention_v1:
    return cattn.SelfAttention_v1(d_in, d_out, rng=rng())


def v2(d_in: int = 6, d_out: int = 8, bias: bool = False) -> cattn.SelfAttention_v2:
    return cattn.SelfAttention_v2(d_in, d_out, bias, rng=rng())


def causal(d_in: int = 6, d_out: int = 8, bias: bool = False) -> cattn.CausalAttention:
    return cattn.CausalAttention(d_in, d_out, 16, 0.0, bias, rng=rng())


def other(module: Any, seed: int = 0) -> State:
    """Return a state dict for the module with other numbers."""
    random = np.random.default_rng(seed)
    return {key: random.standard_normal(value.shape).astype(value.dtype) for key, value in module.state_dict().items()}


def assert_state(module: Any, expected: Mapping[str, np.ndarray]) -> None:
    state = module.state_dict()
    assert set(state) == set(expected)
    for key, value in expected.items():
        assert_same_bits(state[key], value, key)
        assert state[key].flags.c_contiguous


# ---- naming schemes --------------------------------------------------------------------------------------------------
def renamed(q: str, k: str, v: str, out: str) -> Callable[[State], State]:
    names = {"W_query": q, "W_key": k, "W_value": v, "out_proj": out}
    return lambda state: {f"{names[key.split('.')[0]]}.{key.split('.')[1]}": a for key, a in state.items()}


def fused(weight: str, bias: str, out: str, *, conv: bool) -> Callable[[State], State]:
    def convert(state: State) -> State:
        result = {}
        for part, name in (("weight", weight), ("bias", bias)):
            parts = [state[f"W_{role}.{part}"] for role in ("query", "key", "value") if f"W_{role}.{part}" in state]
            if parts:
                whole = np.concatenate(parts)
                result[name] = whole.T if conv and part == "weight" else whole
        if "out_proj.weight" in state:
            result[f"{out}.weight"] = state["out_proj.weight"].T if conv else state["out_proj.weight"]
            result[f"{out}.bias"] = state["out_proj.bias"]
        return result

    return convert


def bare(state: State) -> State:
    """Return the names and shapes of SelfAttention_v1: matrices (in, out) without biases."""
    return {key.removesuffix(".weight"): a.T if key.startswith("W_") else a for key, a in state.items()}


def by_head(state: State) -> State:
    result = {}
    for key, value in state.items():
        for head, part in enumerate(np.split(value, 4)):
            result[f"heads.{head}.{key}"] = part
    return result


SCHEMES: dict[str, Callable[[State], State]] = {
    "the book": lambda state: state,
    "W_q": renamed("W_q", "W_k", "W_v", "out_proj"),
    "wq": renamed("wq", "wk", "wv", "wo"),
    "W_Q": renamed("W_Q", "W_K", "W_V", "W_O"),
    "Llama": renamed("q_proj", "k_proj", "v_proj", "o_proj"),
    "query": renamed("query", "key", "value", "proj"),
    "OPT": renamed("q_proj", "k_proj", "v_proj", "out_proj"),
    "nn.MultiheadAttention": fused("in_proj_weight", "in_proj_bias", "out_proj", conv=False),
    "qkv": fused("qkv.weight", "qkv.bias", "proj", conv=False),
    "GPT-2": fused("c_attn.weight", "c_attn.bias", "c_proj", conv=True),
    "GPT-2 with nn.Linear": fused("c_attn.weight", "c_attn.bias", "c_proj", conv=False),
}
TARGETS: dict[str, Callable[..., Any]] = {
    "heads": mha,
    "heads, square": lambda: mha(8, 8),
    "heads, no bias": lambda: mha(bias=False),
    "groups": lambda: mha(groups=2),
    "groups, square": lambda: mha(8, 8, groups=1),
    "v2": v2,
    "v2, square, bias": lambda: v2(8, 8, True),
    "causal": causal,
}


@pytest.mark.promise("state_dict")
@pytest.mark.parametrize("target", TARGETS)
@looped("scheme", SCHEMES)
@pytest.mark.parametrize("prefix", ["", "transformer.h.11.attn."])
def test_every_naming_scheme_is_loaded(target: str, scheme: str, prefix: str) -> None:
    module = TARGETS[target]()
    expected = other(module)
    state = {prefix + key: value for key, value in SCHEMES[scheme](expected).items()}
    result = module.load_state_dict(state)
    assert result == ([], [])
    assert_state(module, expected)
    assert not any(np.shares_memory(a, b) for a, b in itertools.product(module.state_dict().values(), state.values()))


def test_a_prefix_chooses_one_layer_of_a_model() -> None:
    module = v2()
    first, second = other(module), {key: value + 1 for key, value in other(module).items()}
    layers = {"h.0.attn.": first, "h.1.attn.": second}
    state = {prefix + key: value for prefix, layer in layers.items() for key, value in layer.items()}
    for prefix, layer in layers.items():
        assert module.load_state_dict(state, prefix=prefix) == ([], [])
        assert_state(module, layer)
    with pytest.raises(ValueError, match=r"'h.2.attn.' begins no name .*; its prefixes are 'h.0.attn.', 'h.1.attn.'"):
        module.load_state_dict(state, prefix="h.2.attn.")
    with pytest.raises(TypeError, match="prefix must be a str, got int"):
        module.load_state_dict(state, prefix=0)  # type: ignore[arg-type]


@pytest.mark.parametrize("d_in", [6, 8])  # the layout of a square matrix is known by its name only
def test_bare_matrices_are_transposed(d_in: int) -> None:
    for target in (v2, causal, lambda *sizes: mha(*sizes, bias=False)):
        module = target(d_in, 8)
        expected = other(module)
        state = bare(expected) | {key: value for key, value in expected.items() if key.startswith("out")}
        module.load_state_dict({key: a for key, a in state.items() if key != "out_proj"})
        assert_state(module, expected)
    module = v1(d_in, 8)
    expected = other(module)
    for names in (("W_query", "W_key", "W_value"), ("W_q", "W_k", "W_v"), ("w_query", "w_key", "w_value")):
        module = v1(d_in, 8)
        module.load_state_dict(dict(zip(names, expected.values(), strict=True)))
        assert_state(module, expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("d_in", [6, 8])
def test_every_naming_scheme_is_loaded_into_bare_matrices(scheme: str, d_in: int) -> None:
    module, source = v1(d_in, 8), v2(d_in, 8)
    expected = other(source)
    module.load_state_dict({f"model.{key}": value for key, value in SCHEMES[scheme](expected).items()})
    assert_state(module, {key.removesuffix(".weight"): value.T for key, value in expected.items()})


def test_v1_and_v2_with_the_same_weights_agree() -> None:
    x = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)
    for first, second in ((v1(8, 8), v2(8, 8)), (v2(8, 8), v1(8, 8))):
        second.load_state_dict(first.state_dict())
        np.testing.assert_allclose(first(x), second(x), rtol=1e-5)
        back = type(first)(8, 8, rng=np.random.default_rng(9))
        back.load_state_dict(second.state_dict())
        assert_state(back, first.state_dict())


@pytest.mark.parametrize("d_in", [6, 8])
def test_separate_heads_and_whole_matrices_are_converted(d_in: int) -> None:
    for bias in (False, True):
        whole, heads = causal(d_in, 8, bias), wrapper(d_in, 2, bias)
        expected = other(whole)
        for scheme, convert in SCHEMES.items():  # whole matrices into separate heads
            heads = wrapper(d_in, 2, bias)
            heads.load_state_dict({f"attn.{key}": value for key, value in convert(expected).items()})
            assert_state(heads, by_head(expected))
            whole = causal(d_in, 8, bias)  # and separate heads into whole matrices
            whole.load_state_dict({f"x.{key}": value for key, value in heads.state_dict().items()})
            assert_state(whole, expected)
            assert scheme
    # the order of the entries does not matter
    heads.load_state_dict(dict(reversed(by_head(expected).items())))
    assert_state(heads, by_head(expected))


def test_one_head_of_several_is_loaded_alone() -> None:
    heads, one = wrapper(bias=False), causal(6, 2)
    part = {key: value for key, value in heads.state_dict().items() if key.startswith("heads.2.")}
    one.load_state_dict(part)
    assert_same_bits(one.W_key.weight, heads.heads[2].W_key.weight)
    with pytest.raises(ValueError, match=r"W_query.weight has \(8, 6\), wanted \(2, 6\)"):
        one.load_state_dict(heads.state_dict())


def test_strict_loading_names_missing_and_unexpected_entries() -> None:
    module, heads = mha(), wrapper()
    with pytest.raises(ValueError, match=r"missing: out_proj.weight, out_proj.bias$"):
        module.load_state_dict(heads.state_dict())
    result = module.load_state_dict(heads.state_dict(), strict=False)
    assert result == (["out_proj.weight", "out_proj.bias"], [])
    with pytest.raises(ValueError, match=r"unexpected: out_proj.bias, out_proj.weight$"):
        heads.load_state_dict(module.state_dict())
    assert heads.load_state_dict(module.state_dict(), strict=False).missing_keys == []


def test_linear_loads_its_parameters_under_any_prefix() -> None:
    layer = cattn.Linear(6, 4, rng=rng())
    expected = other(layer)
    for prefix in ("", "lm_head.", "W_query."):
        layer = cattn.Linear(6, 4, rng=rng())
        layer.load_state_dict({prefix + key: value for key, value in expected.items()})
        assert_state(layer, expected)
    with pytest.raises(ValueError, match=r"weight has \(6, 4\), wanted \(4, 6\); it looks transposed"):
        layer.load_state_dict({"weight": expected["weight"].T, "bias": expected["bias"]})
    with pytest.raises(ValueError, match=r"missing: bias\n    unexpected: b$"):
        layer.load_state_dict({"weight": expected["weight"], "b": expected["bias"]})
    assert cattn.Dropout(0.1).load_state_dict({}) == ([], [])
    assert cattn.Dropout(0.1).state_dict() == {}


def test_mask_buffers_are_ignored() -> None:
    mask = np.triu(np.ones((16, 16)), 1)
    buffers = {"mask": mask, "bias": mask[None, None], "masked_bias": np.array(-1e4)}
    for module in (mha(), causal()):
        expected = other(module)
        module.load_state_dict({f"a.{key}": value for key, value in (expected | buffers).items()})
        assert_state(module, expected)
    heads = wrapper()
    heads.load_state_dict(other(heads) | {f"heads.{i}.mask": mask for i in range(4)})
    with pytest.raises(ValueError, match="unexpected: bias"):
        causal().load_state_dict(other(causal()) | {"bias": np.ones(8)})


# ---- other dtypes and containers -------------------------------------------------------------------------------------
def test_other_dtypes_are_converted() -> None:
    import ml_dtypes

    module = causal()
    expected = other(module)
    for dtype in (np.float64, np.float16, ml_dtypes.bfloat16, ">f4", np.longdouble):
        state = {key: value.astype(dtype) for key, value in expected.items()}
        if dtype is np.longdouble:
            with pytest.raises(TypeError, match=r"W_query.weight has dtype (float128|longdouble)"):
                module.load_state_dict(state)
            continue
        module.load_state_dict(state)
        assert_state(module, {key: value.astype(np.float32) for key, value in state.items()})
    module.load_state_dict({key: value.tolist() for key, value in expected.items()})
    assert_state(module, expected)


def test_torch_tensors_are_loaded() -> None:
    torch = pytest.importorskip("torch")
    module = causal()
    expected = other(module)
    tensors = {key: torch.from_numpy(value) for key, value in expected.items()}
    for convert in (lambda t: t, torch.nn.Parameter, lambda t: t.double(), lambda t: t.T.contiguous().T):
        module = causal()
        module.load_state_dict({key: convert(t) for key, t in tensors.items()})
        assert_state(module, expected)
    for half in (torch.float16, torch.bfloat16):
        module.load_state_dict({key: t.to(half) for key, t in tensors.items()})
        assert_state(module, {key: t.to(half).float().numpy() for key, t in tensors.items()})


@pytest.mark.promise("state_dict")
def test_torch_loads_our_state_dict() -> None:
    torch = pytest.importorskip("torch")
    layer = cattn.Linear(6, 4, rng=rng())
    theirs = torch.nn.Linear(6, 4)
    theirs.load_state_dict({key: torch.from_numpy(value) for key, value in layer.state_dict().items()})
    assert_same_bits(theirs.weight.detach().numpy(), layer.weight)


def test_state_dict_holds_the_arrays_themselves() -> None:
    module = v2()
    state = module.state_dict()
    assert state["W_key.weight"] is module.W_key.weight
    assert list(state) == ["W_query.weight", "W_key.weight", "W_value.weight"]
    module.load_state_dict(other(module))
    assert state["W_key.weight"] is not module.W_key.weight  # loading does not write into an earlier state


# ---- errors ----------------------------------------------------------------------------------------------------------
def but(module: Any, **changes: Any) -> dict[str, Any]:
    """Return a state that fits except for some entries. None removes an entry; __ in a name stands for a dot."""
    state: dict[str, Any] = other(module)
    for key, value in changes.items():
        state.pop(key.replace("__", "."), None)
        if value is not None:
            state[key.replace("__", ".")] = value
    return state


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def twice(module: Any) -> dict[str, Any]:
    state = other(module)
    return {f"{layer}.{key}": value for layer in ("h.0.attn", "h.1.attn") for key, value in state.items()}


REFUSED: dict[str, tuple[Any, Callable[[Any], Any], list[str]]] = {
    "missing": (v1(), lambda m: but(m, W_key=None), ["cannot load into SelfAttention_v1(6, 8)", "missing: W_key"]),
    "unexpected": (v1(), lambda m: but(m, W_keys=ones(6, 8)), ["unexpected: W_keys"]),
    "both": (v1(), lambda m: but(m, W_key=None, W_keys=ones(6, 8)), ["missing: W_key", "unexpected: W_keys"]),
    "nothing": (v2(), lambda m: {}, ["missing: W_query.weight, W_key.weight, W_value.weight"]),
    "bias to none": (v2(), lambda m: but(m, W_key__bias=ones(8)), ["unexpected: W_key.bias"]),
    "bias to v1": (v1(), lambda m: but(m, W_key__bias=ones(8)), ["unexpected: W_key.bias"]),
    "no bias": (v2(bias=True), lambda m: other(v2()), ["missing: W_query.bias, W_key.bias, W_value.bias"]),
    "fused bias to none": (v2(), lambda m: SCHEMES["qkv"](other(v2(bias=True))), ["unexpected: qkv.bias"]),
    "shape": (v2(), lambda m: but(m, W_key__weight=ones(7, 6)), ["W_key.weight has (7, 6), wanted (8, 6)"]),
    "all shapes": (v2(), lambda m: but(m, W_key__weight=ones(7, 6), W_value__weight=ones(3)),
        ["W_key.weight has (7, 6)", "W_value.weight has (3,), wanted (8, 6)"]),
    "transposed": (v2(), lambda m: but(m, W_key__weight=ones(6, 8)),
        ["W_key.weight has (6, 8), wanted (8, 6); it looks transposed: under this name it is (out, in)"]),
    "transposed v1": (v1(), lambda m: but(m, W_key=ones(8, 6)),
        ["W_key has (8, 6), wanted (6, 8); it looks transposed: under this name it is (in, out)"]),
    "fused shape": (v2(), lambda m: {"in_proj_weight": ones(23, 6)}, ["in_proj_weight has (23, 6), wanted (24, 6)"]),
    "fused transposed": (v2(), lambda m: {"in_proj_weight": ones(6, 24)}, ["wanted (24, 6); it looks transposed"]),
    "conv shape": (v2(), lambda m: {"c_attn.weight": ones(6, 23)}, ["c_attn.weight has (6, 23), wanted (24, 6)"]),
    "all heads shape": (wrapper(), lambda m: other(causal(6, 6)), ["W_query.weight has (6, 6), wanted (8, 6)"]),
    "twice": (v2(), lambda m: but(m, W_q__weight=ones(8, 6)),
        ["ambiguous: W_query.weight and W_q.weight both give the query weight"]),
    "bare and not": (v2(), lambda m: but(m, W_query=ones(6, 8)), ["ambiguous: W_query.weight and W_query both"]),
    "fused and not": (v2(), lambda m: but(m, in_proj_weight=ones(24, 6)), ["both give the value weight"]),
    "heads and not": (v2(), lambda m: but(m, heads__0__W_key__weight=ones(8, 6)), ["both give the key weight"]),
    "two layers": (v2(), twice, ["several modules, with the prefixes 'h.0.attn.', 'h.1.attn.'; pass the prefix"]),
    "square c_attn": (v2(24, 8), lambda m: {"c_attn.weight": ones(24, 24)},
        ["ambiguous: c_attn.weight has shape (24, 24)", "rename it to in_proj_weight"]),
    "c_proj alone": (mha(), lambda m: but(m, out_proj__weight=None, c_proj__weight=ones(8, 8)),
        ["ambiguous: c_proj.weight has shape (8, 8)", "rename it to out_proj.weight"]),
    "another's c_proj": (mha(), lambda m: {f"attn.{k}": a for k, a in other(m).items()} | {"mlp.c_proj.bias": ones(8)},
                         ["unexpected: mlp.c_proj.bias"]),
    "a head too few": (wrapper(), lambda m: but(m, heads__3__W_key__weight=None), ["missing: heads.3.W_key.weight"]),
    "a head too many": (wrapper(), lambda m: but(m, heads__4__W_key__weight=ones(2, 6)),
        ["unexpected: heads.4.W_key.weight"]),
    "a gap": (causal(bias=True), lambda m: {k: a for k, a in other(wrapper()).items() if "heads.1" not in k},
        ["missing: the query weight of head 1"]),
    "far heads": (causal(), lambda m: {"heads.0.W_q.weight": ones(4, 6), "heads.99999999999.W_q.weight": ones(4, 6)},
                  ["missing: the query weight of head 1"]),
    "unlike heads": (causal(), lambda m: {"heads.0.W_q.weight": ones(4, 6), "heads.1.W_q.weight": ones(4, 5)},
        ["wrong shape: heads.0.W_q.weight, heads.1.W_q.weight have (4, 6), (4, 5)"]),
    "scalar heads": (causal(), lambda m: {"heads.0.W_q.weight": ones(), "heads.1.W_q.weight": ones()},
        ["wrong shape"]),
    "a layer's name alone": (v1(), lambda m: but(m, q_proj=ones(6, 8)), ["unexpected: q_proj"]),
    "no point before weight": (v1(), lambda m: but(m, c_attn_weight=ones(6, 24)), ["unexpected: c_attn_weight"]),
    "the output of a head": (wrapper(), lambda m: but(m, heads__0__out_proj__weight=ones(8, 8)),
        ["unexpected: heads.0.out_proj.weight"]),
    "another torch name": (mha(), lambda m: but(m, bias_k=ones(1, 1, 8)), ["unexpected: bias_k"]),
    "many": (v2(), lambda m: other(m) | {f"x{i}": ones() for i in range(20)}, ["x0, x1,", "and 12 more"]),
    "too large": (v2(), lambda m: but(m, W_key__weight=np.full((8, 6), 1e300)),
        ["too large: W_key.weight holds numbers beyond the range of float32"]),
    "ragged": (v2(), lambda m: but(m, W_key__weight=[[1], [1, 2]]), ["W_key.weight cannot be read as an array"]),
}  # fmt: skip
WRONG_TYPE: dict[str, tuple[Any, Callable[[Any], Any], list[str]]] = {
    "complex": (v2(), lambda m: but(m, W_key__weight=ones(8, 6) * 1j), ["W_key.weight has dtype complex64"]),
    "text": (v2(), lambda m: but(m, W_key__weight="no"), ["W_key.weight has dtype"]),
    "masked": (v2(), lambda m: but(m, W_key__weight=np.ma.ones((8, 6))), ["W_key.weight is a masked array"]),
    "keys": (v2(), lambda m: other(m) | {3: ones()}, ["keys of state_dict must be strings, got int: 3"]),
    "a list": (v2(), lambda m: [ones()], ["state_dict must be a mapping of names to arrays, got list"]),
}  # fmt: skip


@pytest.mark.promise("state_dict")
@pytest.mark.parametrize("case", [*REFUSED, *WRONG_TYPE])
def test_a_wrong_state_is_refused_and_changes_nothing(case: str) -> None:
    error = ValueError if case in REFUSED else TypeError
    module, make, messages = (REFUSED | WRONG_TYPE)[case]
    before = {key: (value, value.copy()) for key, value in module.state_dict().items()}
    state = make(module)
    with pytest.raises(error) as caught:
        module.load_state_dict(state)
    for message in messages:
        assert message in str(caught.value)
    for key, (array, content) in before.items():
        assert module.state_dict()[key] is array
        assert_same_bits(array, content)


def test_a_load_that_is_not_strict_takes_the_entries_that_fit() -> None:
    module = mha(groups=2)
    before, new = dict(module.state_dict()), other(module)
    part = {"W_key.weight": new["W_key.weight"], "out_proj.bias": new["out_proj.bias"], "norm.scale": ones(8)}
    result = module.load_state_dict(part, strict=False)
    assert result.unexpected_keys == ["norm.scale"]
    assert set(result.missing_keys) == set(before) - set(part)
    assert_state(module, before | {key: new[key] for key in part if key in new})
    for wrong in ({"W_key.weight": ones(3, 6)}, {"W_key.weight": ones(4, 6), "W_k.weight": ones(4, 6)}):
        with pytest.raises(ValueError, match=r"wrong shape|ambiguous"):
            module.load_state_dict(wrong, strict=False)


def test_a_module_may_load_its_own_state() -> None:
    module = v1(8, 8)
    module.W_query = module.W_key.T  # shares memory, and is not contiguous
    expected = {key: value.copy() for key, value in module.state_dict().items()}
    module.load_state_dict(module.state_dict())
    assert_state(module, expected)
    assert not np.shares_memory(module.W_query, module.W_key)


def test_a_subclass_with_another_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    class Gated(cattn.MultiHeadAttention):
        def __init__(self, rng: int) -> None:
            super().__init__(4, 4, 16, 0.0, 2, rng=rng)
            self.gate = cattn.Linear(4, 4, rng=rng)

    source, target = Gated(1), Gated(2)
    expected = {key: value.copy() for key, value in source.state_dict().items()}
    assert "gate.weight" in expected
    target.load_state_dict({f"model.{key}": value for key, value in expected.items()})
    assert_state(target, expected)
    source.save(tmp_path / "gated.npz")
    again = Gated(3)
    again.load(tmp_path / "gated.npz")
    assert_state(again, expected)
    with pytest.raises(ValueError, match=r"missing: gate\.weight"):
        target.load_state_dict({key: value for key, value in expected.items() if "gate" not in key})
    np.savez(tmp_path / "less.npz", **{key: value for key, value in expected.items() if "gate" not in key})
    with pytest.raises(ValueError, match=r"less\.npz: cannot load into .*\n.*missing: gate\.weight"):
        target.load(tmp_path / "less.npz")
    with pytest.raises(ValueError, match="unexpected: other"):
        target.load_state_dict(expected | {"other": np.ones((4, 4))})


@pytest.mark.parametrize("d_in", [6, 8])
def test_biases_beside_bare_matrices_are_loaded(d_in: int) -> None:
    for module in (v2(d_in, 8, True), mha(d_in, 8)):
        expected = other(module)
        state = {}
        for role in ("query", "key", "value"):
            state[f"attn.W_{role}"] = expected[f"W_{role}.weight"].T
            state[f"attn.bias_{role[0]}"] = expected[f"W_{role}.bias"]
        state |= {f"attn.{key}": value for key, value in expected.items() if key.startswith("out")}
        assert module.load_state_dict(state) == ([], [])
        assert_state(module, expected)


def test_errors_say_whether_the_output_projection_has_a_bias() -> None:
    with_bias = cattn.MultiHeadAttention(6, 8, 16, 0.0, 4)
    without = cattn.MultiHeadAttention(6, 8, 16, 0.0, 4, out_bias=False)
    assert "out_proj.bias" not in without.state_dict()
    with pytest.raises(ValueError, match=r"missing: out_proj.bias; make the class with out_bias=False$"):
        with_bias.load_state_dict(without.state_dict())
    with pytest.raises(ValueError, match=r"unexpected: out_proj.bias; make the class with out_bias=True$"):
        without.load_state_dict(with_bias.state_dict())


# ---- files -----------------------------------------------------------------------------------------------------------
FILES = ["weights.npz", "weights.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", [mha, wrapper, v1, v2, causal, lambda: cattn.Linear(6, 4, rng=rng())])
def test_a_saved_module_loads_again(name: str, make: Callable[[], Any], tmp_path: Path) -> None:
    module, twin = make(), make()
    module.load_state_dict(other(module))
    assert module.save(tmp_path / name) is None
    assert twin.load(str(tmp_path / name)) == ([], [])
    assert_state(twin, module.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) & 0o400


@pytest.mark.parametrize("name", FILES)
def test_transposed_views_are_saved(name: str, tmp_path: Path) -> None:
    module, twin = v1(6, 8), v1(6, 8)
    module.W_query = np.random.default_rng(3).standard_normal((8, 6)).astype(np.float32).T
    module.save(tmp_path / name)
    twin.load(tmp_path / name)
    assert_same_bits(twin.W_query, module.W_query)


def test_safetensors_files_of_torch_are_loaded(tmp_path: Path) -> None:
    torch, files = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    expected = other(causal())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tensors = {f"attn.{key}": torch.from_numpy(value).to(dtype) for key, value in expected.items()}
        files.save_file(tensors, tmp_path / "x.safetensors")
        module = causal()
        module.load(tmp_path / "x.safetensors")
        assert_state(module, {key: t.float().numpy() for key, t in zip(expected, tensors.values(), strict=True)})


def test_safetensors_dtypes_that_numpy_lacks_are_named(tmp_path: Path) -> None:
    """bfloat16 loads although nobody has imported ml_dtypes. Another dtype is named, not reported as damage."""
    torch, files = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    path = tmp_path / "x.safetensors"
    files.save_file({"a": torch.ones(3, dtype=torch.bfloat16)}, path)
    code = f"from cattn.nn._files import load_arrays; print(load_arrays({str(path)!r})['a'].dtype)"
    done = run_command([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("bfloat16\n", "")
    files.save_file({"b": torch.ones(3).to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ValueError, match=r"x\.safetensors: b is of type F8_E4M3, which NumPy does not have"):
        load_arrays(path)


@pytest.mark.promise("whole files")
@pytest.mark.parametrize("name", FILES)
def test_a_file_is_replaced_whole_or_not_at_all(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    module = v2()
    module.save(path)
    before = path.read_bytes()
    module.load_state_dict(other(module))

    def full_disk(*args: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("cattn.nn._files.os.replace", full_disk)
        with pytest.raises(OSError, match="no space"):
            module.save(path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [name]
    module.save(path)
    assert path.read_bytes() != before


@needs_links
@pytest.mark.parametrize("name", FILES)
def test_saving_to_a_link_replaces_its_target(name: str, tmp_path: Path) -> None:
    path, module = tmp_path / name, v1()
    path.write_bytes(b"")
    link = tmp_path / f"link{path.suffix}"
    link.symlink_to(path)
    module.save(link)
    assert link.is_symlink()
    assert path.stat().st_size > 0


@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    path, module = tmp_path / name, v2()
    with pytest.raises(FileNotFoundError, match=name):
        module.load(path)
    module.save(path)
    content = path.read_bytes()
    for damage in (b"", b"nonsense", content[:40], content[:-30]):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=r"is no \.\w+ file"):
            module.load(path)


def test_lack_of_memory_is_not_reported_as_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = v2()
    module.save(tmp_path / "w.npz")
    monkeypatch.setattr(np, "load", lambda *args, **kwargs: no_memory())
    with pytest.raises(MemoryError):
        module.load(tmp_path / "w.npz")


def no_memory() -> Any:
    raise MemoryError


def test_other_file_types_and_pickles_are_refused(tmp_path: Path) -> None:
    module = v2()
    for path in (tmp_path / "w.pt", tmp_path / "w"):
        with pytest.raises(ValueError, match=r"files of weights end in \.npz or \.safetensors"):
            module.save(path)
        with pytest.raises(ValueError, match="files of weights end in"):
            module.load(path)
    np.savez(tmp_path / "objects.npz", W_query=np.array([{}], object))
    (tmp_path / "pickle.npz").write_bytes(pickle.dumps({}))
    for name in ("objects.npz", "pickle.npz"):
        with pytest.raises(ValueError, match=r"is no \.npz file of numbers.*never unpickles") as caught:
            module.load(tmp_path / name)
        assert "allow_pickle" not in str(caught.value)
    np.save(tmp_path / "one.npy", np.ones(3, np.float32))
    os.rename(tmp_path / "one.npy", tmp_path / "one.npz")
    with pytest.raises(ValueError, match=r"is no \.npz file of numbers"):
        module.load(tmp_path / "one.npz")
    with pytest.raises(FileNotFoundError, match=r"absent[/\\]+w\.npz'$"):
        module.save(tmp_path / "absent" / "w.npz")


def test_the_extra_is_named_if_safetensors_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'cattn\[safetensors\]'"):
        v2().save(tmp_path / "w.safetensors")
    assert not list(tmp_path.iterdir())
    v2().save(tmp_path / "w.npz")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_pipe_stays_and_takes_the_file(folder: Path) -> None:
    """As root, to replace a device such as /dev/null would take it from all programs."""
    os.mkfifo("pipe.npz")
    reader = subprocess.Popen([sys.executable, "-c", "open('copy.npz', 'wb').write(open('pipe.npz', 'rb').read())"])
    weights = {"w": np.arange(6.0).reshape(2, 3)}
    save_arrays("pipe.npz", weights)
    finish(reader)
    assert reader.returncode == 0
    assert stat.S_ISFIFO(os.stat("pipe.npz").st_mode)
    assert_same_bits(load_arrays("copy.npz")["w"], weights["w"])


# ---- weights that a user assigns -------------------------------------------------------------------------------------
MODULES: dict[str, Any] = {
    "Linear": lambda: cattn.Linear(3, 4, rng=1),
    "SelfAttention_v1": lambda: cattn.SelfAttention_v1(3, 4, rng=1),
    "SelfAttention_v2": lambda: cattn.SelfAttention_v2(3, 4, rng=1),
    "CausalAttention": lambda: cattn.CausalAttention(3, 4, 8, 0.1, rng=1),
    "MultiHeadAttentionWrapper": lambda: cattn.MultiHeadAttentionWrapper(3, 4, 8, 0.1, 2, rng=1),
    "MultiHeadAttention": lambda: cattn.MultiHeadAttention(3, 4, 8, 0.1, 2, rng=1),
}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (0, 3)])
def test_backward_without_tokens_gives_zero_gradients(name: str, shape: tuple[int, ...]) -> None:
    module = MODULES[name]()
    x = np.zeros(shape, np.float32)
    assert module.backward(module(x)).shape == shape
    assert all((gradient == 0).all() for gradient in module.grads.values())
    assert module.grads.keys() == dict(module.named_parameters()).keys()


def test_integer_weights_have_gradients_in_float64() -> None:
    x, grad = np.array([[1.0, 2.0]]), np.array([[0.5, 0.25]])
    layer, bare = cattn.Linear(2, 2, rng=1), cattn.SelfAttention_v1(2, 2, rng=1)
    layer.weight, layer.bias = np.eye(2, dtype=int), np.array([1, 2])
    np.testing.assert_array_equal(layer(x), [[2.0, 4.0]])
    for _ in range(2):  # gradients accumulate
        layer.backward(grad)
    np.testing.assert_array_equal(layer.grads["weight"], 2 * grad.T @ x)
    np.testing.assert_array_equal(layer.grads["bias"], 2 * grad[0])
    bare.W_value = np.eye(2, dtype=int)
    bare(x)
    bare.backward(grad)
    np.testing.assert_array_equal(bare.grads["W_value"], x.T @ grad)
    assert {gradient.dtype for gradient in layer.grads.values()} == {np.dtype(float)}


@pytest.mark.promise("parameters")
@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (np.ones((3, 4)), ValueError, r"has shape \(3, 4\), wanted \(4, 3\)"),
        (np.float32(2), ValueError, r"has shape \(\), wanted \(4, 3\)"),
        (None, TypeError, "must be an array of real numbers, got NoneType"),
        ("text", TypeError, "has dtype <U4"),
    ],
)
def test_a_weight_of_the_wrong_kind_is_named(wrong: Any, error: type[Exception], message: str) -> None:
    for module in (cattn.Linear(3, 4, rng=1), cattn.MultiHeadAttention(3, 4, 8, 0.1, 2, rng=1)):
        layer = module if isinstance(module, cattn.Linear) else module.W_key
        layer.weight = wrong
        with pytest.raises(error, match=f"Linear.weight {message}"):
            module(np.ones((2, 3), np.float32))


def test_a_bias_or_a_bare_matrix_of_the_wrong_shape_is_named() -> None:
    layer, bare = cattn.Linear(3, 4, rng=1), cattn.SelfAttention_v1(3, 4, rng=1)
    layer.bias = np.float32(2)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"Linear.bias has shape \(\), wanted \(4,\)"):
        layer(np.ones((2, 3)))
    bare.W_key = np.ones((4, 3))
    with pytest.raises(ValueError, match=r"SelfAttention_v1.W_key has shape \(4, 3\), wanted \(3, 4\)"):
        bare(np.ones((2, 3)))


def test_a_parameter_of_pytorch_is_refused_by_name() -> None:
    torch = pytest.importorskip("torch")
    layer = cattn.Linear(3, 4, rng=1)
    layer.weight = torch.nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(TypeError, match=r"Linear\.weight is a tensor that requires grad"):
        layer(np.ones((2, 3)))
