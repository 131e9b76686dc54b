"""Pickles, and the modules that public objects name."""

import pickle
import re

import numpy as np

import cattn
from support import find


def test_pickles_name_public_modules() -> None:
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
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(layer)).W_query.weight, layer.W_query.weight)


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
        extra = {"cache", "functional", "integrations", "nn", "random"} if module is cattn else set()
        assert shown == {name for name in module.__all__ if name != "__version__"} | extra
        assert all(hasattr(module, name) for name in dir(module))
