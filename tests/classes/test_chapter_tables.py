"""Every number that the chapter's notebooks print, computed from the stored weights and from the seeds alone.

tests/data/seed_tables.json holds 68 cases (inputs, weights, formula, values, tolerance). Each is computed in every way
that the public functions offer, in float32 and float64: from the stored weights by the library and by its NumPy
reference, and from the seed alone by the library, whose classes draw the weights without torch.

The outputs of the classes and their windows come after these.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cattn
import cattn.reference
from support import ROOT, assert_same_bits, looped

CASES: list[dict[str, Any]] = json.loads((ROOT / "tests" / "data" / "seed_tables.json").read_text())
LIBRARIES = {"cattn": cattn, "reference": cattn.reference}
Ways = dict[str, Any]


def drawn(case: dict[str, Any]) -> tuple[np.ndarray | None, dict[str, np.ndarray]]:
    """Return the inputs and weights drawn from the seed of a case. Inputs are None where they are not random."""
    recipe = case["recipe"]
    if not case.get("weights"):
        return None, {}
    names = recipe["layer_order"]
    generator = cattn.manual_seed(recipe["seed"])
    if recipe["init"] == "torch.randn":
        weights = {name: generator.randn(np.shape(case["weights"][name])) for name in names}
        return generator.randn(recipe["input_shape"]), weights
    if recipe["init"] == "nn.Linear":
        v2 = cattn.SelfAttention_v2(3, 2)
        return None, {name: getattr(v2, name).weight for name in names}
    v1 = cattn.SelfAttention_v1(3, 2)
    if recipe["init"] == "exercise 3.1":  # v1 takes the weights of v2; the printed version forgets W_key
        cattn.manual_seed(recipe["seed"])
        state = cattn.SelfAttention_v2(3, 2).state_dict()
        if case["id"].endswith("as-printed"):
            state["W_key.weight"] = v1.W_key.T
        v1.load_state_dict(state)
    else:
        assert recipe["init"] == "torch.rand"
    return None, {name: getattr(v1, name) for name in names}


class Chapter:
    """One case: queries, keys and values projected from its inputs, and the steps of the chapter as methods."""

    def __init__(self, case: dict[str, Any], lib: types.ModuleType, dtype: type, *, from_seed: bool = False) -> None:
        recipe = case["recipe"]
        self.case, self.lib, self.dtype, self.from_seed = case, lib, dtype, from_seed
        self.scale: float = recipe.get("scale") or 1.0
        inputs, stored = drawn(case) if from_seed else (None, case.get("weights") or {})
        self.x = np.array(recipe.get("inputs", np.zeros((6, 6))) if inputs is None else inputs, dtype)
        weights = {name: np.array(w, dtype) for name, w in stored.items()}
        if case.get("weights_layout") == "out_in":
            weights = {name: w.T for name, w in weights.items()}
        projected = [self.x @ weights[name] if weights else self.x for name in ("W_query", "W_key", "W_value")]
        if len(recipe["input_shape"]) == 3:  # the same sentence twice
            self.x = np.stack([self.x] * 2)
            projected = [np.stack([p] * 2) for p in projected]
        self.q, self.k, self.v = projected
        self.tokens = self.q.shape[-2]
        self.tril = lib.causal_mask(self.tokens)

    def one_query(self) -> Chapter:
        """Keep only the query of the second token, "journey"."""
        self.q = self.q[..., 1:2, :]
        return self

    # Attention does not return scores, but they follow from the weights and the log-sum-exp.
    def scores(self) -> np.ndarray:
        result = self.lib.scaled_dot_product_attention(
            self.q, self.k, self.v, scale=1.0, return_weights=True, return_lse=True
        )
        return np.log(result.weights) + result.lse[..., None]

    def weights(self) -> Ways:
        s = self.scores()
        return {
            "attention_weights": self.lib.attention_weights(self.q, self.k, scale=self.scale),
            "softmax": self.lib.softmax(s, scale=self.scale),
            "masked_softmax, no mask": self.lib.masked_softmax(s, scale=self.scale),
            "softmax over axis 0": self.lib.softmax(np.moveaxis(s, -1, 0), axis=0, scale=self.scale).T,
            "return_weights": self.lib.scaled_dot_product_attention(
                self.q, self.k, self.v, scale=self.scale, return_weights=True
            ).weights,
        }

    def masked(self) -> Ways:
        s, lib = self.scores(), self.lib
        ways = {"softmax, where": lib.softmax(s, where=self.tril, scale=self.scale)}
        for method in ("neg_inf", "renormalize"):
            ways[method] = lib.masked_softmax(s, is_causal=True, scale=self.scale, method=method)
            ways[method + ", mask"] = lib.masked_softmax(s, self.tril, scale=self.scale, method=method)
        ways["attention_weights"] = lib.attention_weights(self.q, self.k, is_causal=True, scale=self.scale)
        ways["bias"] = lib.attention_weights(
            self.q, self.k, bias=np.where(self.tril, 0.0, -np.inf).astype(self.dtype), scale=self.scale
        )
        simple = self.tril * lib.attention_weights(self.q, self.k, scale=self.scale)
        ways["by hand"] = simple / simple.sum(-1, keepdims=True)
        return ways

    def masked_simple(self) -> np.ndarray:
        return self.lib.attention_weights(self.q, self.k, scale=self.scale) * self.tril

    def context(self) -> Ways:
        ways = {f"{name} @ v": w @ self.v for name, w in self.weights().items()}
        ways["sdpa"] = self.lib.scaled_dot_product_attention(self.q, self.k, self.v, scale=self.scale)
        return ways

    def causal_context(self) -> Ways:
        q, k, v, sdpa = self.q, self.k, self.v, self.lib.scaled_dot_product_attention
        ways = {
            "causal_attention": self.lib.causal_attention(q, k, v, scale=self.scale),
            "sdpa, is_causal": sdpa(q, k, v, is_causal=True, scale=self.scale),
            "sdpa, mask": sdpa(q, k, v, self.tril, scale=self.scale),
            "sdpa, 4-D": sdpa(*(a[..., None, :, :] for a in (q, k, v)), is_causal=True, scale=self.scale)[..., 0, :, :],
        }
        return ways | {f"{name} @ v": w @ v for name, w in self.masked().items()}

    def dropped(self, x: np.ndarray) -> np.ndarray:
        """Apply dropout, drawn from the seed, or else with the stored mask and the factor that the library uses."""
        spec = self.case["recipe"]["dropout"]
        if self.from_seed:
            generator = cattn.manual_seed(spec["seed"])
            for _ in range(spec["call"]):
                cattn.dropout(x, spec["p"], rng=generator)
            return cattn.dropout(x, spec["p"], rng=generator)
        ones = np.ones(200, self.dtype)
        result, mask = self.lib.dropout(ones, spec["p"], rng=spec["seed"], return_mask=True)
        assert 0 < mask.sum() < mask.size
        assert np.all(result[~mask] == 0)
        (factor,) = np.unique(result[mask])
        return np.where(self.case["dropout_mask"], x * factor, 0)


# The computation of each step, in the order of the chapter.
STEPS: dict[str, Callable[[Chapter], Ways]] = {
    "attn_scores": lambda c: {"scores": c.scores()},
    "attn_scores_row": lambda c: {"row": c.one_query().scores()[0]},
    "attn_score": lambda c: {"score": c.one_query().scores()[0, 1]},
    "query_row": lambda c: {"value of a single key": c.lib.scaled_dot_product_attention(c.k, c.k[:1], c.q[1:2])[1]},
    "attn_weights": Chapter.weights,
    "attn_weights_row": lambda c: {name: w[0] for name, w in c.one_query().weights().items() if "axis 0" not in name},
    "context_vec": Chapter.context,
    "context_vec_row": lambda c: {
        "sdpa": c.one_query().lib.scaled_dot_product_attention(c.q, c.k, c.v, scale=c.scale)[0]
    },
    "mask_tril": lambda c: {"causal_mask": c.tril},
    "mask_triu": lambda c: {"causal_mask": ~c.tril},
    "masked_simple": lambda c: {"weights * mask": c.masked_simple()},
    "masked_simple_norm": Chapter.masked,
    "masked_inf_scores": lambda c: {"where": np.where(c.tril, c.scores(), -np.inf)},
    "masked_inf": Chapter.masked,
    "dropout_ones": lambda c: {"factor": c.dropped(c.x)},
    "dropout_attn_weights": lambda c: {name: c.dropped(w) for name, w in c.masked().items()},
    "context_vec_masked": Chapter.causal_context,
}
# Sums and shapes: their id tells which array they belong to.
BY_ID: dict[str, Callable[[Chapter], Ways]] = {
    "000-sa_v2-context-shape": lambda c: {name: out.shape for name, out in c.context().items()},
    "000-batch-shape": lambda c: {"dropout": c.lib.dropout(c.x, training=False).shape},
    "000-causal-batch-shape": lambda c: {name: out.shape for name, out in c.causal_context().items()},
    "001-causal-context-shape": lambda c: {name: out.shape for name, out in c.causal_context().items()},
    "003-x-shape": lambda c: {"softmax": c.lib.softmax(c.x).shape},
    "004-3.3.1-weights-sum-norm": lambda c: {"row": (s := c.one_query().scores()[0]) / s.sum()},
    "004-3.3.1-scores-sum": lambda c: {"sum": c.one_query().scores().sum()},
    "004-3.3.1-weights-sum-norm-sum": lambda c: {"sum": ((s := c.one_query().scores()[0]) / s.sum()).sum()},
    "004-3.3.1-softmax-custom-sum": lambda c: {"sum": c.lib.softmax(c.one_query().scores()).sum()},
    "004-3.3.1-softmax-sum": lambda c: {"sum": c.lib.attention_weights(c.one_query().q, c.k, scale=1.0).sum()},
    "004-3.3.2-row-sums": lambda c: {name: w.sum(-1) for name, w in c.weights().items()},
    "004-3.3.2-first-row-sum": lambda c: {name: w[0].sum() for name, w in c.weights().items()},
    "004-3.3.2-first-column-sum": lambda c: {name: w[:, :1].sum(0) for name, w in c.weights().items()},
    "004-3.5.1-row-sums-keepdim": lambda c: {"sums": c.masked_simple().sum(-1, keepdims=True)},
    "004-3.5.1-row-sums": lambda c: {"sums": c.masked_simple().sum(-1)},
}


def steps_of(case: dict[str, Any]) -> Callable[[Chapter], Ways]:
    return BY_ID.get(case["id"]) or STEPS[case["step"]]


@pytest.mark.promise("textbook tables")
def test_all_68_cases_are_covered() -> None:
    assert len(CASES) == 68
    assert len({case["id"] for case in CASES}) == 68
    for case in CASES:
        assert steps_of(case)
    assert set(BY_ID) <= {case["id"] for case in CASES}
    assert set(STEPS) <= {case["step"] for case in CASES}


def assert_table(ways: Ways, case: dict[str, Any]) -> None:
    expected = np.array(case["values"], np.float64)  # "-inf" reads as -inf
    assert ways
    for way, result in ways.items():
        result = np.asarray(result, np.float64)
        assert result.shape == expected.shape, way
        hidden = np.isneginf(expected)
        np.testing.assert_array_equal(np.isneginf(result), hidden, err_msg=way)
        difference = np.abs(result[~hidden] - expected[~hidden])
        assert difference.max(initial=0.0) <= case["tolerance"], f"{way}: {difference.max()}"


@pytest.mark.parametrize("library", LIBRARIES)
@looped("case", CASES, ids=lambda case: case["id"])
def test_stored_weights_give_every_table(case: dict[str, Any], library: str, dtype: type) -> None:
    assert_table(steps_of(case)(Chapter(case, LIBRARIES[library], dtype)), case)


@pytest.mark.promise("textbook tables")
@looped("case", CASES, ids=lambda case: case["id"])
def test_seeds_alone_give_every_table(case: dict[str, Any], dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import of it raises
    chapter = Chapter({**case, "dropout_mask": None}, cattn, dtype, from_seed=True)
    assert_table(steps_of(case)(chapter), case)


def test_results_have_the_dtype_of_the_inputs(dtype: type) -> None:
    case = next(case for case in CASES if case["id"] == "002-attn-weights")
    chapter = Chapter(case, cattn, dtype)
    assert chapter.masked_simple().dtype == dtype
    for way, weights in (chapter.weights() | chapter.masked() | chapter.causal_context()).items():
        assert weights.dtype == dtype, way


# ---- the outputs that the chapter prints for its classes -------------------------------------------------------------
PRINTED: dict[str, Any] = {
    case["id"]: case for case in json.loads((ROOT / "tests" / "data" / "seed_tables.json").read_text())
}


def inputs(case: dict[str, Any]) -> np.ndarray:
    x = np.array(case["recipe"]["inputs"], np.float32)
    return np.stack([x] * 2) if len(case["recipe"]["input_shape"]) == 3 else x


CAUSAL_KINDS = [cattn.CausalAttention, cattn.MultiHeadAttentionWrapper]


def drawn_by(case: dict[str, Any]) -> list[type]:
    """Return the classes that draw the weights in the order of the case."""
    if case["step"] == "context_vec_masked":
        return CAUSAL_KINDS
    return [cattn.SelfAttention_v1 if case["weights_layout"] == "in_out" else cattn.SelfAttention_v2]


def build(kind: type, *, rng: Any = None) -> Any:
    sizes = {cattn.CausalAttention: (6, 0.5), cattn.MultiHeadAttentionWrapper: (6, 0.0, 1)}.get(kind, ())
    return kind(3, 2, *sizes, rng=rng).eval()


# All cases that show the output of a class. Not 003: its d_v differs from its head_dim, as in no class of the book.
CONTEXTS = [
    name for name, case in PRINTED.items() if case["step"] in ("context_vec", "context_vec_masked")
    and case.get("weights") and not name.startswith("003")
]  # fmt: skip


def assert_printed(case: dict[str, Any], result: np.ndarray) -> None:
    expected = np.array(case["values"])
    assert result.shape == expected.shape
    assert np.abs(result - expected).max() <= case["tolerance"]


@pytest.mark.parametrize("name", CONTEXTS)
def test_stored_weights_give_the_printed_tables(name: str) -> None:
    """Every class loads the weights, whether they are stored as (in, out) or as (out, in)."""
    case = PRINTED[name]
    bare = case["weights_layout"] == "in_out"
    state = {key if bare else f"{key}.weight": np.array(value) for key, value in case["weights"].items()}
    causal = case["step"] == "context_vec_masked"
    for kind in CAUSAL_KINDS if causal else [cattn.SelfAttention_v1, cattn.SelfAttention_v2]:
        module = build(kind, rng=0)
        module.load_state_dict(state)
        assert_printed(case, module(inputs(case)))


def test_nine_tables_show_the_output_of_a_class() -> None:
    assert len(CONTEXTS) == 9


@pytest.mark.parametrize("name", [name for name in CONTEXTS if "ex3.1-v1" not in name])
def test_seeds_give_the_printed_tables(name: str) -> None:
    case = PRINTED[name]
    for kind in drawn_by(case):
        cattn.manual_seed(case["recipe"]["seed"])
        module = build(kind)
        assert_printed(case, module(inputs(case)))
        for key, value in case["weights"].items():
            layer = getattr(module.heads[0] if hasattr(module, "heads") else module, key)
            np.testing.assert_array_equal(getattr(layer, "weight", layer), np.array(value, np.float32))


def test_exercise_3_1_gives_the_printed_and_the_correct_table() -> None:
    """The chapter assigns W_query twice and W_key never, and prints the result. A state dict refuses that slip."""
    printed, correct = PRINTED["004-ex3.1-v1-as-printed"], PRINTED["004-ex3.1-v1-correct"]
    cattn.manual_seed(123)
    v1 = cattn.SelfAttention_v1(3, 2)
    cattn.manual_seed(123)
    v2 = cattn.SelfAttention_v2(3, 2)
    own_key = v1.W_key
    v1.W_query = v2.W_query.weight.T
    v1.W_query = v2.W_query.weight.T
    v1.W_value = v2.W_value.weight.T
    assert_printed(printed, v1(inputs(printed)))

    slip = {"W_query": v2.W_query.weight.T, "W_value": v2.W_value.weight.T}
    with pytest.raises(ValueError, match="missing: W_key"):
        v1.load_state_dict(slip)
    assert v1.W_key is own_key

    v1.load_state_dict(v2.state_dict())
    assert_printed(correct, v1(inputs(correct)))
    assert_same_bits(v1(inputs(correct)), v2(inputs(correct)))


# ---- windows, and output projections without a bias ------------------------------------------------------------------
WINDOWED: dict[str, Callable[..., Any]] = {
    "causal": lambda **k: cattn.CausalAttention(6, 5, 64, 0.0, **k),
    "wrapper": lambda **k: cattn.MultiHeadAttentionWrapper(6, 5, 64, 0.0, 3, **k),
    "groups": lambda **k: cattn.MultiHeadAttention(6, 8, 64, 0.0, 4, num_kv_groups=2, out_bias=False, **k),
}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_hides_the_tokens_before_it(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 12, 6))
    module = WINDOWED[name](window_size=cattn.sliding_window(4), dtype=np.float64, rng=1).eval()
    everything = WINDOWED[name](dtype=np.float64, rng=1).eval()
    context, weights = module(x, return_weights=True)
    near = np.arange(12)[:, None] - np.arange(12) < 4
    assert np.all(weights[..., ~near] == 0)
    expected = everything(x, return_weights=True)[1] * near
    np.testing.assert_allclose(weights, expected / expected.sum(-1, keepdims=True), rtol=1e-12)
    kv_heads, head_dim = module._kv_heads, module._head_dim
    cache = cattn.KVCache((2,), num_kv_heads=kv_heads, max_len=12, head_dim=head_dim, dtype=np.float64)
    steps = [module(x[:, t : t + 1], cache=cache) for t in range(12)]
    np.testing.assert_allclose(np.concatenate(steps, axis=1), context, rtol=1e-12)


@pytest.mark.parametrize("name", WINDOWED)
def test_gradients_through_a_window(name: str) -> None:
    x = np.random.default_rng(0).standard_normal((1, 9, 6))
    module = WINDOWED[name](window_size=(2, 0), dtype=np.float64, rng=1)
    out = module(x)
    direction = np.random.default_rng(1).standard_normal(out.shape)
    grad = module.backward(direction)
    step = 1e-6 * np.random.default_rng(2).standard_normal(x.shape)
    difference = ((module(x + step) - module(x - step)) * direction).sum() / 2
    np.testing.assert_allclose((grad * step).sum(), difference, rtol=1e-6)


def test_a_wrong_window_is_refused_when_the_class_is_made() -> None:
    assert "window_size=(3, 0)" in repr(cattn.CausalAttention(6, 5, 64, 0.0, window_size=(3, 0)))
    assert "out_bias=False" in repr(cattn.MultiHeadAttention(6, 8, 64, 0.0, 4, out_bias=False))
    for name, make in WINDOWED.items():
        with pytest.raises((TypeError, ValueError), match="window_size"):
            make(window_size=(1, 2, 3))
        assert make(window_size=None).window_size is None, name
