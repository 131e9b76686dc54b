"""The function or module under test: how to call it, its weights, and the inputs that are chosen for it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .._input.arrays import check_tensors, read_array
from ._formulas import Positions, Problem

Array = NDArray[Any]
Floats = NDArray[np.float64]


class RefusedError(Exception):
    """The function raised, or returned what is no result of attention: the text is a sentence about it."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


class Masks(NamedTuple):
    """How the function takes masks and dropout: names of its arguments."""

    mask: str | None = None
    padding: str | None = None
    dropout: str | None = None
    true_hides: bool = False


def _torch() -> Any:
    """Return the module torch if somebody imported it, else None."""
    return sys.modules.get("torch")


def is_module(function: Any) -> bool:
    """Return whether this is a module of PyTorch."""
    torch = _torch()
    return torch is not None and isinstance(function, torch.nn.Module)


def _mentions_torch(function: Any) -> bool:
    """Return whether the code of a function names PyTorch or an object of it, also in functions that it calls."""
    waiting, seen = [function], set[int]()
    while waiting and len(seen) < 50:
        each = inspect.unwrap(waiting.pop()) if callable(function) else function
        each = getattr(each, "func", each)  # functools.partial
        each = getattr(each, "__func__", each)
        code = getattr(each, "__code__", None)
        if code is None or id(each) in seen:
            continue
        seen.add(id(each))
        cells = [cell.cell_contents for cell in each.__closure__ or () if _filled(cell)]
        names = (each.__globals__.get(name) for name in code.co_names)
        for value in [*cells, *names]:
            module = value.__name__ if inspect.ismodule(value) else getattr(value, "__module__", None)
            if is_module(value) or (isinstance(module, str) and module.split(".")[0] == "torch"):
                return True
            if inspect.isfunction(value):
                waiting.append(value)
    return False


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - an empty cell raises
    except ValueError:
        return False
    return True


def takes_batch_second(function: Any) -> bool:
    """Return whether a module says, by its batch_first, that it takes (T, B, D). A class of PyTorch says it inside."""
    if not is_module(function):
        return False
    own = type(function).__module__.split(".")[0] == "torch"
    return False in [getattr(m, "batch_first", None) for m in (function.modules() if own else [function])]


def inner_batch_second(function: Any) -> str | None:
    """Return the class of a module inside this one that takes (T, B, D), or None."""
    modules = function.modules() if is_module(function) else ()
    return next((type(m).__name__ for m in modules if getattr(m, "batch_first", None) is False), None)


def number_of_inputs(function: Any) -> int:
    """Return 1 for function(x), and 3 for function(query, key, value)."""
    target = function.forward if is_module(function) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return 3
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return 3
    return 1 if len(required) == 1 or len(positional) < 3 else 3


class Subject:
    """Calls the function under test with NumPy arrays and returns a NumPy array of float64."""

    def __init__(self, function: Any, num_inputs: int, masks: Masks, library: str, dtype: Any) -> None:
        self.function = function
        self.num_inputs = num_inputs
        self.masks = masks
        self.library = library
        self.dtype = self._dtype(dtype)
        self.changed_inputs = False
        self.keeps_width = num_inputs == 3  # the output has the shape of the query
        self.heads = 1  # into which the function itself splits its arrays
        self.swaps = takes_batch_second(function)  # arrays are (T, B, D)
        self.pristine = _copied(function)  # as it was before the first call

    def _dtype(self, dtype: Any) -> Any:
        if self.library == "numpy":
            return np.dtype(np.float64 if dtype is None else dtype)
        torch = _torch()
        if dtype is not None:
            return dtype if isinstance(dtype, torch.dtype) else getattr(torch, np.dtype(dtype).name)
        if is_module(self.function):
            for parameter in self.function.parameters():
                if parameter.is_floating_point():
                    return parameter.dtype
        return torch.float32

    @property
    def tolerance(self) -> float:
        """The largest relative difference that is no mistake: formulas differ by more, rounding by less."""
        if self.library == "numpy":
            from ._close import _FORMATS

            eps = 2.0 ** (1 - _FORMATS[self.dtype.name][0]) if self.dtype.name in _FORMATS else 1e-7
        else:
            eps = float(_torch().finfo(self.dtype).eps)
        return max(1e-4, 16 * eps)

    def _convert(self, array: Array, *, mask: bool = False) -> Any:
        if self.library == "numpy":
            return array.copy() if mask else array.astype(self.dtype)
        torch = _torch()
        device = next((p.device for p in self.function.parameters()), "cpu") if is_module(self.function) else "cpu"
        return torch.tensor(array, dtype=None if mask else self.dtype, device=device)

    def __call__(
        self,
        inputs: tuple[Floats, ...],
        *,
        mask: NDArray[np.bool_] | None = None,
        padding: NDArray[np.bool_] | None = None,
        dropout_p: float | None = None,
    ) -> Floats:
        """Return the result. `mask` is True where a key is visible, `padding` is True where a token is none."""
        keywords: dict[str, Any] = {}
        if mask is not None and self.masks.mask is not None:
            keywords[self.masks.mask] = self._convert(~mask if self.masks.true_hides else mask, mask=True)
        if padding is not None and self.masks.padding is not None:
            keywords[self.masks.padding] = self._convert(padding if self.masks.true_hides else ~padding, mask=True)
        if dropout_p is not None and self.masks.dropout is not None:
            keywords[self.masks.dropout] = dropout_p
        swaps = self.swaps and inputs[0].ndim == 3
        given = [self._convert(array.swapaxes(0, 1) if swaps else array) for array in inputs]
        before = [_plain(each) for each in given]
        try:
            with _quiet(self.library):
                result = self.function(*given, **keywords)
        except Exception as error:
            message = " ".join(str(error).split())
            shapes = " and ".join(dict.fromkeys(str(array.shape) for array in inputs))
            text = f"It raises {type(error).__name__} for arrays of {shapes}: {message[:300]}"
            raise RefusedError("raises", text + "." * (not text.endswith("."))) from error
        after = [_plain(each) for each in given]
        self.changed_inputs |= any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(before, after, strict=True))
        return self._read(result, inputs[0], swaps)

    def _read(self, result: Any, query: Floats, swaps: bool) -> Floats:
        if isinstance(result, (tuple, list)) and len(result) and hasattr(result[0], "shape"):
            result = result[0]  # the output comes first, then the weights
        if result is None:
            raise RefusedError("wrong_shape", "It returns None: is there a return statement?")
        try:
            out = _plain(result)
        except (TypeError, ValueError):
            text = f"It returns {type(result).__name__}, which is neither an array nor a tensor."
            raise RefusedError("wrong_shape", text) from None
        out = out.swapaxes(0, 1) if swaps and out.ndim == 3 else out
        lead, T = query.shape[:-1], query.shape[-2]
        columns = "any number of columns"
        fits = out.shape == query.shape if self.keeps_width else out.ndim == query.ndim and out.shape[:-1] == lead
        if not fits:
            wanted = query.shape if self.keeps_width else (*lead, columns)
            hint = " That is the shape of the weights." if out.shape[-2:] == (T, T) else ""
            if self.heads > 1 and out.shape == (*lead, query.shape[-1] // self.heads):
                hint = " That is the width of one head: the heads must be joined, not averaged or summed."
            text = f"It returns an array of {out.shape} for arrays of {query.shape}, wanted {wanted}.{hint}"
            raise RefusedError("wrong_shape", text.replace("'", ""))
        return out


def _plain(given: Any) -> Floats:
    """Return an array or a tensor as a new array of float64."""
    check_tensors(given, "result")
    given = given.detach().cpu() if hasattr(given, "detach") else given
    if hasattr(given, "double"):
        given = given.double()
    array = np.asarray(read_array(given, "result"))
    if array.dtype.kind == "c" or array.dtype.kind not in "fiubV":
        raise TypeError(f"no numbers: {array.dtype}")
    return array.astype(np.float64)


def _copied(function: Any) -> Any:
    """Return a copy with the same parameters and its own state, or None for a function or what cannot be copied."""
    shared = {id(each): each for each in (function.parameters() if is_module(function) else ())}
    try:
        other = copy.deepcopy(function, shared)
    except Exception:
        return None
    return None if other is function else other


def _seed_generators(seed: int) -> None:
    """Seed the global generators of NumPy and PyTorch."""
    np.random.seed(seed)  # noqa: NPY002
    if (torch := _torch()) is not None:
        torch.manual_seed(seed)


@contextlib.contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Compute without gradients and without warnings, such as NumPy's about tensors that it is given on trial."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(np.errstate(all="ignore"))
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if library == "torch":
            stack.enter_context(_torch().no_grad())
        yield


@contextlib.contextmanager
def prepared(function: Any, seed: int = 0) -> Iterator[None]:
    """Switch a module to evaluation, seed the global generators, use one thread; put everything back at the end."""
    torch, state = _torch(), np.random.get_state()  # noqa: NPY002 - the user's function may draw from it
    modules = {m: m.training for m in function.modules()} if is_module(function) else {}
    other = getattr(function, "training", None) if not modules and hasattr(function, "eval") else None
    with contextlib.ExitStack() as stack:
        if torch is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # on arrays as small as these, threads wait for each other
        _seed_generators(seed)
        try:
            if modules or isinstance(other, bool):
                function.eval()
            yield
        finally:
            np.random.set_state(state)  # noqa: NPY002
            for module, training in modules.items():
                module.training = training
            if other is True:
                function.train()


def library_of(function: Any) -> list[str]:
    """Return the libraries whose arrays the function may want, the likelier first."""
    if is_module(function):
        return ["torch"]
    if _torch() is None:
        return ["numpy"]
    return ["torch", "numpy"] if _mentions_torch(function) else ["numpy", "torch"]


# ---- weights -------------------------------------------------------------------------------------------------------
class Projections(NamedTuple):
    """The projections of a module, (in, out) with biases."""

    weights: tuple[Floats, Floats, Floats]
    biases: tuple[Floats, Floats, Floats]
    out: Floats | None
    out_bias: Floats | None

    @property
    def d_in(self) -> int:
        """The width of the input."""
        return int(self.weights[0].shape[0])

    def project(self, *inputs: Floats) -> tuple[Floats, Floats, Floats]:
        """Return query, key and value of three inputs."""
        q, k, v = (x @ w + b for x, w, b in zip(inputs, self.weights, self.biases, strict=True))
        return q, k, v

    def narrowed(self, columns: int) -> Projections:
        """Return the projections with an output of the first columns only."""
        out = None if self.out is None else np.ascontiguousarray(self.out[:, :columns])
        return self._replace(out=out, out_bias=None if self.out_bias is None else self.out_bias[:columns])

    def finish(self, context: Floats) -> Floats:
        """Return the output of the module, given the output of all heads."""
        if self.out is None:
            return context
        if context.shape[-1] != len(self.out):  # it takes one head, or the mean of all: the right result is unknown
            return np.full((*context.shape[:-1], self.out.shape[1]), np.nan)
        return np.asarray(context @ self.out + (0.0 if self.out_bias is None else self.out_bias))


def find_state(function: Any) -> dict[str, Any]:
    """Return the arrays of a module by their names: its state_dict, or the attributes of an object."""
    if hasattr(function, "state_dict"):
        return dict(function.state_dict())
    owner = getattr(function, "__self__", function)
    state = {}
    for name, value in getattr(owner, "__dict__", {}).items():
        if hasattr(value, "shape") and getattr(value, "ndim", 0) in (1, 2):
            state[name] = value
    return state


def find_num_heads(function: Any, state: Mapping[str, Any]) -> int | None:
    """Return the number of heads that a module says it has; None if it does not say it."""
    for name in ("num_heads", "n_heads", "n_head", "num_attention_heads", "nhead"):
        if isinstance(found := getattr(function, name, None), int):
            return found
    numbers = {key.split("heads.")[1].split(".")[0] for key in state if "heads." in key}
    return len(numbers) or None


def unknown_weights(state: Mapping[str, Any]) -> list[str]:
    """Return the names of weights that are no projection of attention. A module that has them has another formula."""
    from ..nn._state_dict import _parse

    return [key for key in state if key.endswith(".weight") and _parse(key) is None]


def possible_heads(projections: Projections) -> list[int]:
    """Return the numbers of heads, up to 64, into which the columns can be split: 1 first, then the usual ones."""
    widths = [weight.shape[1] for weight in projections.weights]
    numbers = [n for n in range(2, min(64, widths[0]) + 1) if _splits(widths, n)]
    one = [1] if widths[0] == widths[1] else []
    return one + sorted(numbers, key=lambda n: abs(np.log(widths[0] / n / 64)))  # usual heads have 64 columns


def possible_positions(function: Any) -> list[Positions]:
    """Return the positions with which a module without learned ones is compared: rotations, and ALiBi."""
    owners = [*function.modules()] if is_module(function) else [function]
    own = {
        float(theta)
        for owner in owners for name in ("theta", "rope_theta", "theta_base", "base", "rotary_base")
        if isinstance(theta := getattr(owner, name, None), (int, float)) and theta > 1
    }  # fmt: skip
    thetas = sorted({*own, 10_000.0, 500_000.0})
    rotary = [Positions("rotary", interleaved, theta) for theta in thetas for interleaved in (False, True)]
    return [*rotary, Positions("ALiBi")]


def _splits(widths: list[int], heads: int) -> bool:
    """Return whether query, key and value of these widths have so many heads, of which several may share a key."""
    query, key, value = widths
    if query % heads or key % (d := query // heads):
        return False
    return heads % (key // d) == 0 and value % (key // d) == 0


def find_projections(state: Mapping[str, Any], num_heads: int | None) -> Projections | None:
    """Return the projections if the names belong to a scheme that `load_state_dict` knows, else None.

    Keys and values may have fewer columns than queries, if they have fewer heads.
    """
    from ..nn._state_dict import _parse, match

    sizes: dict[str, int] = {}
    d_in = fused = 0
    last: tuple[int, ...] = ()
    for key, value in state.items():
        name, shape = _parse(key), tuple(getattr(value, "shape", ()))
        if name is None or name.part != "weight" or len(shape) != 2:
            continue
        rows, columns = shape[::-1] if name.bare else shape
        if name.role == "out":
            last = (rows, columns)
        elif "query, key" in name.role:
            fused, d_in = (columns, rows) if rows < columns else (rows, columns)
        else:
            sizes[name.role] = sizes.get(name.role, 0) + rows
            d_in = columns
    if fused:
        query = last[1] if last and last[1] < fused and (fused - last[1]) % 2 == 0 else fused // 3
        sizes = {"query": query, "key": (fused - query) // 2, "value": (fused - query) // 2}
    if set(sizes) != {"query", "key", "value"} or not sizes["key"] or sizes["query"] % sizes["key"]:
        return None
    width = sizes["value"] * (sizes["query"] // sizes["key"])  # of all heads together
    own: dict[str, Array] = {}
    for role in ("query", "key", "value"):
        own[f"W_{role}.weight"], own[f"W_{role}.bias"] = np.zeros((sizes[role], d_in)), np.zeros(sizes[role])
    if last and num_heads and last[1] * num_heads == width:
        width = last[1]
    d_out = last[0] if last else width
    own |= {"out_proj.weight": np.zeros((d_out, width)), "out_proj.bias": np.zeros(d_out)}
    try:
        new, _ = match(state, own, strict=False, what="the formula of diagnose")
    except (TypeError, ValueError):
        return None
    found = {name: np.asarray(array, np.float64) for name, array in new.items()}
    roles = [role for role in ("query", "key", "value") if f"W_{role}.weight" in found]
    weights = [np.ascontiguousarray(found[f"W_{role}.weight"].T) for role in roles]  # stacks multiply faster
    biases = [found.get(f"W_{role}.bias", np.zeros(sizes[role])) for role in ("query", "key", "value")]
    if len(weights) < 3 or (num_heads and not _splits([weight.shape[1] for weight in weights], num_heads)):
        return None
    out = found.get("out_proj.weight")
    return Projections(
        (weights[0], weights[1], weights[2]), (biases[0], biases[1], biases[2]), None if out is None else out.T,
        found.get("out_proj.bias"),
    )  # fmt: skip


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
        self.causal = kind in ("causal", "multi_head", "linear")
        self.linear = kind == "linear"
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
        D = self.width or depth or next(n for n in (10, 12) if n != T)  # 8 is the root of the width of usual heads
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
                positions=self.positions, linear=self.linear, **masks,
            )  # fmt: skip
        q, k, v = inputs if len(inputs) == 3 else inputs * 3
        heads = self.num_heads if self.splits else None
        return Problem(
            q, k, v, self.causal, num_heads=heads, same=len(inputs) == 1, inputs=(q, k, v), positions=self.positions,
            alignment=self.alignment, linear=self.linear, **masks,
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

    def call_untouched(self, first: tuple[Floats, ...], then: tuple[Floats, ...], seed: int) -> Floats | None:
        """Return the second result of a copy from before all calls, or None for a function, which cannot be copied."""
        called = self.subject.function
        if self.subject.pristine is None:
            return None
        self.subject.function = _copied(self.subject.pristine)
        _seed_generators(seed)
        try:
            self.call(first)
            return self.call(then)
        finally:
            self.subject.function = called

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
