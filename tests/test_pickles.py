"""Pickles: which modules they name, and that those of an earlier layout are read."""

import pickle
import re

import numpy as np

import cattn
from support import find


def test_pickles_name_public_modules_and_those_of_an_earlier_layout_are_read() -> None:
    """The names of private modules change: a pickle must not depend on them."""
    layer = cattn.MultiHeadAttention(4, 4, 8, dropout=0.1, num_heads=2, rng=1)
    x = np.zeros((2, 2))
    warning, explained = cattn.CausalAlignmentWarning("x"), cattn.explain(x, x, x)
    cache, generator = cattn.KVCache(2, 2, 3, 4), cattn.TorchGenerator(3)
    results = (cattn.AttentionOutput(1), warning, explained)
    for original in (layer, cattn.Linear(2, 2), cache, generator, cattn.num_threads(2), *results):
        content = pickle.dumps(original, protocol=0)
        assert not re.search(rb"cattn[.\w]*\._", content.replace(b"cattn.random\n_restored", b""))
        assert type(pickle.loads(content)) is type(original)
    content = re.sub(rb"ccattn\.nn\n(Linear|Dropout)", rb"ccattn._layers\n\1", pickle.dumps(layer, protocol=0))
    assert b"cattn._layers\nLinear" in content
    np.testing.assert_array_equal(pickle.loads(content).W_query.weight, layer.W_query.weight)
    for module, name in (
        ("_types", "AttentionOutput"),
        ("_types", "CausalAlignmentWarning"),
        ("_explain", "Explanation"),
        ("cache", "KVCache"),
        ("random", "TorchGenerator"),
        ("functional._attention", "causal_attention"),
        ("functional._softmax", "softmax"),
        ("functional._masks", "show_mask"),
    ):
        assert pickle.loads(f"ccattn.{module}\n{name}\n.".encode()) is getattr(cattn, name)


def test_pickles_of_caches_of_an_earlier_layout_are_read() -> None:
    cache = cattn.KVCache(2, 2, 3, 4)
    cache.append(np.ones((2, 2, 1, 4), np.float32), np.ones((2, 2, 1, 4), np.float32))
    content = pickle.dumps(cache, protocol=0)
    former = content.replace(b"ccattn\nKVCache", b"ccattn.cache\nKVCache")
    assert former != content
    assert repr(pickle.loads(former)) == repr(cache)


def test_public_objects_name_their_public_module() -> None:
    for name in {*cattn.__all__, *cattn.functional.__all__}:
        value = find(name)
        if name not in cattn.__all__:
            assert value.__module__ == "cattn.functional", name
            assert pickle.loads(pickle.dumps(value)) is value
        elif callable(value):
            assert value.__module__ == ("cattn.nn" if name in cattn.nn.__all__ else "cattn"), name
            assert pickle.loads(pickle.dumps(value)) is value


def test_completion_shows_public_names_only() -> None:
    for module in (cattn, cattn.nn, cattn.functional):
        shown = {name for name in dir(module) if not name.startswith("__")}
        extra = {"cache", "functional", "nn", "random"} if module is cattn else set()
        assert shown == {name for name in module.__all__ if name != "__version__"} | extra
        assert all(hasattr(module, name) for name in dir(module))
