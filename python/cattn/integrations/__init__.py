"""Bridges to other libraries, each in a module of its own that imports the library: none is needed to use cattn."""

from importlib import import_module
from typing import Any

from .._input.names import public_names

__all__ = ["dask", "jax", "keras", "onnx", "torch", "transformers"]
__dir__ = public_names(globals())


def __getattr__(name: str) -> Any:
    """Import a bridge, and with it its library, at its first use."""
    if name in __all__:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
