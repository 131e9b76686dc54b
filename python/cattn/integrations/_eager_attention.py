"""What the code of a model of transformers says about its attention: keywords, causality, the use of the interface."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch


def _constant(function: Callable[[type], Any]) -> Callable[[type], Any]:
    """Return a function of a class that looks at its code once; the compiler takes the result as it is."""
    cached = functools.cache(function)

    def find(cls: type) -> Any:
        return cached(cls)

    constant: Any = torch.compiler.assume_constant_result
    return functools.update_wrapper(constant(find), function)


def _constants(code: CodeType) -> Iterator[str]:
    """Yield the strings of a function, with the keywords that it writes into calls."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _constants(constant)
        else:
            yield from (x for x in (constant if isinstance(constant, tuple) else (constant,)) if isinstance(x, str))


def _methods(cls: type) -> list[FunctionType]:
    """Return the functions of a layer's class and of its bases, without those that every layer or model has."""
    found: list[Any] = []
    for base in cls.__mro__:
        if not base.__module__.startswith(("torch.", "transformers.modeling_utils")):
            found += [inspect.unwrap(x) for x in vars(base).values() if inspect.isfunction(x)]
    return [x for x in found if isinstance(x, FunctionType)]


@_constant
def find_keywords(layer: type) -> frozenset[str] | None:
    """Return the keywords that a layer writes itself and that its eager attention reads; None if it has none.

    Layers pass on to attention whatever the caller of the model gave. Such a keyword has a meaning only if the model's
    own function of eager attention looks at it, or if the layer gives it: sparse layers give `indices` to all functions
    but eager attention, for which they hide the keys in the mask.
    """
    methods = _methods(layer)
    scopes = {method.__module__: method.__globals__ for method in methods}
    functions = [
        inspect.unwrap(x)
        for scope in scopes.values()
        for name, x in scope.items()
        if "eager" in name.lower() and inspect.isfunction(x)
    ]
    if not functions:
        return None
    found = {x for function in (*methods, *functions) for x in _constants(function.__code__)}
    for function in functions:
        found.update(inspect.signature(function).parameters)
    return frozenset(found)


def asks_the_interface(layer: type) -> bool:
    """Return whether a layer takes its attention function from transformers' interface."""
    return any("ALL_ATTENTION_FUNCTIONS" in method.__code__.co_names for method in _methods(layer))


@functools.cache
def _find_model(config: type) -> Any:
    """Return the class of a model without a head, by the class of its configuration."""
    from transformers import MODEL_MAPPING

    found = MODEL_MAPPING.get(config, None)
    return found[0] if isinstance(found, tuple) else found


def has_attention_of_its_own(config: type) -> bool:
    """Return whether a model is known not to use the attention interface, by transformers' own test."""
    model = _find_model(config)
    return model is not None and not bool(model._can_set_attn_implementation())


@_constant
def knows_eager_alone(layer: type) -> bool:
    """Return whether no model of a layer's file allows PyTorch's own function, for which `is_causal` has a meaning."""
    from transformers import PreTrainedModel

    scope = vars(sys.modules[layer.__module__]).values()
    models: list[Any] = [x for x in scope if isinstance(x, type) and issubclass(x, PreTrainedModel)]
    models = [x for x in models if x.__module__ == layer.__module__]
    return bool(models) and not any(x._supports_sdpa for x in models)


@_constant
def wants_a_tensor(config: type) -> bool:
    """Return whether a model asks if its mask is a tensor: it lengthens the mask then, and only then."""
    model = _find_model(config)
    if model is None:
        return False
    return "isinstance(attention_mask, torch.Tensor)" in inspect.getsource(sys.modules[model.__module__])
