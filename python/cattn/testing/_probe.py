"""Inputs for the function under test: chosen numbers, masks for them, and the formula's view of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ._formulas import Positions, Problem
from ._subject import Projections, Subject, is_module

Floats = NDArray[np.float64]


class Probe:
    """Calls one subject with chosen inputs."""

    def __init__(
        self,
        subject: Subject,
        kind: str,
        num_heads: int,
        projections: Projections | None,
        num_tokens: int,
        width: int | None,
    ) -> None:
        self.subject = subject
        self.causal = kind in ("causal", "multi_head")
        self.kind = kind
        self.projections = projections
        self.splits = kind.startswith("multi_head") and subject.num_inputs == 3 and projections is None
        subject.keeps_width = subject.num_inputs == 3 and projections is None
        self.num_heads = num_heads
        self.positions: Positions | None = None
        self.alignment = "lower_right"
        self.T = num_tokens
        self.width = width or (projections.d_in if projections else self._width_of_module())

    def _width_of_module(self) -> int | None:
        """Return the width that the first matrix of a module takes, for a module whose weights have unknown names."""
        if self.subject.num_inputs == 1 and is_module(self.subject.function):
            for parameter in self.subject.function.parameters():
                if parameter.ndim == 2:
                    return int(parameter.shape[1])
        return None

    def is_only_attention(self) -> bool:
        """Return whether the module has no norm, and no other layer than projections."""
        if self.projections is not None or not is_module(self.subject.function):
            return True
        parameters = list(self.subject.function.named_parameters())
        norms = [name for name, array in parameters if name.endswith("weight") and array.ndim == 1]
        return not norms and sum(array.ndim == 2 for _, array in parameters) <= 4

    def shape(
        self, ndim: int, T: int | None = None, lead: int | None = None, depth: int | None = None
    ) -> tuple[int, ...]:
        """Return the shape of inputs. By default all numbers differ, so that a wrong axis does not fit by chance."""
        T = self.T if T is None else T
        if depth is None and self.splits:
            depth = 4 * self.num_heads
        D = self.width or depth or next(n for n in (8, 9) if n != T)
        used = {T, D}
        free = [n for n in (2, 3, 4, 6, 7) if n not in used and not (self.splits and n == self.num_heads)]
        sizes = free[: ndim - 2] if lead is None else [lead] * (ndim - 2)
        return (*sizes, T, D)

    def draw(self, shape: tuple[int, ...], seed: int, *, small: bool = False) -> tuple[Floats, ...]:
        """Return inputs: numbers around 1, larger for modules, whose weights are small; or small integers."""
        rng = np.random.default_rng(seed)
        if small:
            return tuple(rng.integers(-2, 3, shape).astype(float) for _ in range(self.subject.num_inputs))
        size = 3.0 if self.subject.num_inputs == 1 or self.projections is not None else 1.0
        return tuple(size * rng.standard_normal(shape) for _ in range(self.subject.num_inputs))

    def draw_like(self, inputs: tuple[Floats, ...], seed: int) -> tuple[Floats, ...]:
        """Return other inputs of the same shapes."""
        largest = tuple(max(sizes) for sizes in zip(*(array.shape for array in inputs), strict=True))
        drawn = self.draw(largest, seed)
        return tuple(array[tuple(slice(n) for n in own.shape)] for array, own in zip(drawn, inputs, strict=True))

    def problem(self, inputs: tuple[Floats, ...], **masks: Any) -> Problem:
        """Return the formula's view of the inputs: after the projections of a module."""
        if self.projections is not None:
            batches = [array if array.ndim == 3 else array[None] for array in inputs]
            q, k, v = self.projections.project(*(batches if len(batches) == 3 else batches * 3))
            return Problem(
                q, k, v, self.causal, num_heads=self.num_heads, finish=self.projections.finish,
                flat=inputs[0].ndim == 2, inputs=tuple(batches * (3 // len(batches))),
                positions=self.positions, **masks,
            )  # fmt: skip
        q, k, v = inputs if len(inputs) == 3 else inputs * 3
        heads = self.num_heads if self.splits else None
        return Problem(
            q, k, v, self.causal, num_heads=heads, same=len(inputs) == 1, inputs=(q, k, v), positions=self.positions,
            alignment=self.alignment, **masks,
        )  # fmt: skip

    def call(self, inputs: tuple[Floats, ...], **masks: Any) -> Floats:
        """Call the function in the way of evaluation; a mask argument that exists gets a mask that hides nothing."""
        T, names = inputs[-1].shape[-2], self.subject.masks
        if names.mask is not None and masks.get("mask") is None:
            masks["mask"] = np.ones((inputs[0].shape[-2], T), np.bool_)
        if names.padding is not None and masks.get("padding") is None and inputs[0].ndim > 2:
            masks["padding"] = np.zeros((inputs[0].shape[0], T), np.bool_)
        if names.dropout is not None:
            masks.setdefault("dropout_p", 0.0)
        return self.subject(inputs, **masks)

    def call_of_x(self, x: Floats, **masks: Any) -> Floats:
        """Call the function of one array, for properties."""
        return self.call((x,), **masks)

    def named(self, inputs: tuple[Floats, ...]) -> dict[str, Any]:
        """Return inputs by the names of the arguments."""
        return dict(zip(("x",) if len(inputs) == 1 else ("query", "key", "value"), inputs, strict=True))

    def small_inputs(self, ndim: int, leads: tuple[int, ...] = (1, 2)) -> Iterator[tuple[Floats, ...]]:
        """Yield inputs of small integers, the smallest first."""
        step = self.num_heads if self.splits else 1
        depths = [self.width] if self.width else [step * n for n in (1, 2, 3)]
        shapes = {
            self.shape(ndim, T=T, lead=lead, depth=depth)
            for T in range(1, self.T + 1) for lead in (leads if ndim > 2 else (1,)) for depth in depths
        }  # fmt: skip
        for shape in sorted(shapes, key=lambda s: (int(np.prod(s)), s)):
            for seed in range(4):
                yield self.draw(shape, seed, small=True)

    def masks_like(self, masks: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
        """Return the masks for smaller inputs: their upper left corners, or the last tokens of the padding."""
        T, found = shape[-2], {}
        if "mask" in masks:
            found["mask"] = masks["mask"][:T, :T]
        if "padding" in masks:
            found["padding"] = np.zeros((shape[0], T), np.bool_)
            found["padding"][-1, self.padded(T, min(1, T - 1))] = True
        return found

    def example_mask(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """Return a mask in which every token sees itself and the first token, or padding of two tokens."""
        T = shape[-2]
        if name == "mask":
            mask = np.random.default_rng(3).random((T, T)) < 0.5
            mask[1, 2], mask[2, 1] = True, False  # not symmetric
            mask[0, 1] = False
            return {"mask": mask | np.eye(T, dtype=np.bool_) | (np.arange(T) == 0)}
        padding = np.zeros((shape[0], T), np.bool_)
        padding[-1, self.padded(T, 2)] = True
        return {"padding": padding}

    def padded(self, T: int, number: int) -> slice:
        """Return the place of padding: before a causal text, because causal tokens never see padding at the end."""
        return slice(number) if self.causal else slice(T - number, T)
