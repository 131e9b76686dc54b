"""The contestants: cattn and its peers, those that are installed.

To add a peer of attention, write a function that prepares its call and put it into PEERS. Tables, pictures and versions
follow. A peer that cannot compute a problem raises LeftOutError with the reason.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cattn

Array = NDArray[Any]
Calls = dict[str, Callable[[], object]]
TOLERANCE = 2e-5  # of float32 outputs of order 1: they add up thousands of products in different orders
# The largest RMS error of the row's arithmetic, in units of the error of rounding the exact result once. In rows of
# halves, contestants that compute in float32 have 1, those that round the weights 1.4, those that round the scores
# or the sums too 2.2 and more. In rows of float32, other orders of summation reach 50, bfloat16 products 1e5.
ROUNDINGS = {"float16": 1.7, "bfloat16": 1.7, "float32": 500.0, "float64": 500.0}
WRONG = 0.1  # no arithmetic explains a larger error of outputs of order 1


class CheckedCalls(dict[str, Callable[[], object]]):
    """The calls of a row by name, and notes that are kept with the row: errors, and peers that are left out."""

    def __init__(self, calls: Calls, notes: dict[str, Any]) -> None:
        super().__init__(calls)
        self.notes = notes


def textbook(query: Array, key: Array, value: Array, causal: bool = True, first: int = 0) -> Array:
    """Compute attention as a NumPy user writes it: scores, mask, softmax, product, from query `first` on."""
    scores = query @ key.swapaxes(-1, -2)
    scores *= query.dtype.type(1 / np.sqrt(query.shape[-1]))
    if causal:
        scores[..., ~np.tri(*scores.shape[-2:], first, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights @ value


def torch_or_none() -> Any:
    """Return torch with one thread, or None."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def jax_or_none() -> Any:
    """Return jax with one thread, or None. Call it before anything else imports jax."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("XLA_FLAGS", flags)
    os.environ.setdefault("NPROC", "1")
    try:
        import jax
    except ImportError:
        return None
    jax.config.update("jax_enable_x64", True)
    return jax


def matrix_products(dtype: str, flops: float) -> Calls:
    """Return the matrix products of the libraries: of square matrices, with at most so many flops."""
    n = product_size(flops)
    a, b = (np.random.default_rng(seed).standard_normal((n, n)).astype(dtype) for seed in range(2))
    calls: Calls = {"numpy": lambda: a @ b, "cattn": lambda: cattn.functional.linear(a, b)}
    torch = torch_or_none()
    if torch is not None:
        ours = [torch.from_numpy(array) for array in (a, b)]
        calls["torch"] = lambda: torch.mm(*ours)
    return calls


def product_size(flops: float) -> int:
    """Return the rows of square matrices whose product has at most so many flops: a multiple of 16."""
    return max(16, int((flops / 2) ** (1 / 3)) // 16 * 16)


def as_tensor(torch: Any, array: Array) -> Any:
    """Return a tensor on the array's memory; NumPy and PyTorch exchange bfloat16 as integers."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def as_floats(result: Any) -> Array:
    """Return any contestant's result as an array of float64."""
    if getattr(result, "is_cpu", False):  # a tensor, possibly of bfloat16
        result = result.double().numpy()
    return np.asarray(result).astype(np.float64)


class Result:
    """Return this from a timed call to convert its result to an array only where results are compared."""

    def __init__(self, convert: Callable[[], Array]) -> None:
        self.convert = convert

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self.convert()


# ---- attention -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Problem:
    """The attention of one row; every array has the shape (B, H, T, head_dim), or the textbook's two or three axes."""

    query: Array
    key: Array
    value: Array
    causal: bool = True  # query i sees the keys 0 to i; otherwise every query sees all keys
    threads: int = 1

    @property
    def arrays(self) -> tuple[Array, Array, Array]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    @property
    def dtype(self) -> str:
        """Return the name of the dtype."""
        return str(self.query.dtype.name)

    @property
    def group(self) -> int:
        """Return how many query heads share a key head."""
        return self.query.shape[-3] // self.key.shape[-3] if self.query.ndim > 2 else 1

    def exact(self) -> Array:
        """Compute the result in float64, 1,024 queries of a head at a time: the scores of long sequences need GBs."""
        result = np.empty((*self.query.shape[:-1], self.value.shape[-1]))
        for place in np.ndindex(*self.query.shape[:-2]):
            shared = (*place[:-1], place[-1] // self.group) if place else place
            query, key, value = (self.query[place], self.key[shared], self.value[shared])
            key, value = key.astype(np.float64), value.astype(np.float64)
            for first in range(0, len(query), 1024):
                rows = query[first : first + 1024].astype(np.float64)
                result[place][first : first + 1024] = textbook(rows, key, value, self.causal, first)
        return result


class LeftOutError(Exception):
    """A peer cannot compute a problem; the text says why."""


def needs(possible: bool, reason: str) -> None:
    """Leave a peer out for a reason, unless it can compute the problem."""
    if not possible:
        raise LeftOutError(reason)


@dataclass(frozen=True)
class Peer:
    """One peer of attention."""

    title: str  # in tables and pictures
    package: str  # the distribution whose version is kept with the results
    # Returns the call to time. Raises LeftOutError, or ImportError if the peer is not installed.
    prepare: Callable[[Problem], Callable[[], object]]
    keeps_scores: bool = False  # holds the whole matrix of scores: left out where sequences are long


def torch_call(problem: Problem) -> Callable[[], object]:
    """Prepare PyTorch's fused function on tensors that share the arrays' memory."""
    import torch

    tensors = [as_tensor(torch, array) for array in problem.arrays]
    options = {"is_causal": problem.causal, "enable_gqa": problem.group > 1}
    fused = torch.nn.functional.scaled_dot_product_attention
    return torch_threads(problem.threads, functools.partial(fused, *tensors, **options))


def torch_threads(threads: int, call: Callable[[], object]) -> Callable[[], object]:
    """Return a call that has this many of PyTorch's threads; their number belongs to the process."""
    import torch

    torch.set_num_threads(1)

    def with_threads() -> object:
        torch.set_num_threads(threads)
        try:
            return call()
        finally:
            torch.set_num_threads(1)

    return call if threads == 1 else with_threads


def flex_call(problem: Problem) -> Callable[[], object]:
    """Prepare PyTorch's compiled function, which skips the hidden blocks of a block mask. Compilation takes seconds."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    needs(problem.query.ndim == 4, "takes four axes")
    needs(problem.dtype == "float32", "other dtypes are not measured")
    tensors = [as_tensor(torch, array) for array in problem.arrays]
    lengths = problem.query.shape[2], problem.key.shape[2]
    mask = None
    if problem.causal:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, *lengths, device="cpu")
    torch._dynamo.config.recompile_limit = 100  # each shape is compiled for itself
    options = {"block_mask": mask, "enable_gqa": problem.group > 1}
    compiled = functools.partial(torch.compile(flex_attention, dynamic=False), *tensors, **options)
    call = torch_threads(problem.threads, compiled)
    try:
        call()
    except Exception as error:
        raise LeftOutError(f"did not compile: {type(error).__name__}") from error
    return call


def products_call(problem: Problem) -> Callable[[], object]:
    """Prepare PyTorch's matrix products by hand: they read the keys of a group once."""
    import torch

    needs(problem.query.shape[-2] == 1 and not problem.causal, "measured with one query")
    query, key, value = (as_tensor(torch, array) for array in problem.arrays)

    def call() -> Any:
        grouped = query.reshape(*key.shape[:2], -1, query.shape[-1])
        weights = torch.softmax(grouped @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, dim=-1)
        return (weights @ value).reshape(query.shape)

    return torch_threads(problem.threads, call)


def numpy_call(problem: Problem) -> Callable[[], object]:
    """Prepare the textbook's formula."""
    needs(problem.group == 1, "has no shared key heads")
    needs(problem.dtype in ("float32", "float64"), "has no matrix products of halves in BLAS")
    needs(problem.threads == 1, "its threads are set for the process")
    return lambda: textbook(*problem.arrays, problem.causal)


def jax_call(problem: Problem) -> Callable[[], object]:
    """Prepare JAX's function, compiled, on JAX arrays in JAX's order of axes."""
    jax = jax_or_none()
    needs(jax is not None, "not installed")
    needs(problem.query.ndim == 4, "takes four axes")
    needs(problem.dtype in ("float32", "float64"), "refuses float16 on a CPU, and bfloat16 is not measured")
    needs(problem.threads == 1, "its threads are set for the process")
    given = [jax.numpy.asarray(array.swapaxes(1, 2)) for array in problem.arrays]
    compiled = jax.jit(functools.partial(jax.nn.dot_product_attention, is_causal=problem.causal))

    def call() -> Result:
        out = compiled(*given).block_until_ready()
        return Result(lambda: np.asarray(out).swapaxes(1, 2))

    return call


def onnxruntime_call(problem: Problem, operator: str, quantized: bool = False) -> Callable[[], object]:
    """Prepare one of onnxruntime's operators; arrays are bound to the session, and no thread spins.

    The operators of com.microsoft take (B, T, H * head_dim). GroupQueryAttention takes the keys before the new ones
    from a cache; the new keys are written into it. A quantized cache is int8, with one scale for keys and one for
    values.
    """
    import onnxruntime as ort
    from onnx import helper

    needs(problem.query.ndim == 4, "takes four axes")
    needs(problem.dtype in ("float32", "float16"), f"has no {problem.dtype} kernel")
    (batch, heads, tokens, _), (kv_heads, keys) = problem.query.shape, problem.key.shape[1:3]
    out = np.empty((*problem.query.shape[:-1], problem.value.shape[-1]), problem.dtype)
    result = {"Y": out if operator == "Attention" else in_rows(out)}
    given = dict(zip("QKV", problem.arrays, strict=True))
    options: dict[str, Any] = {"is_causal": int(problem.causal)}
    if operator == "MultiHeadAttention":
        needs(problem.group == 1, "has no shared key heads")
        options = {"unidirectional": int(problem.causal), "num_heads": heads, "domain": "com.microsoft"}
        given = {name: in_rows(array) for name, array in given.items()}
    elif operator == "GroupQueryAttention":
        needs(tokens == (keys if problem.causal else 1), "has no option for all keys visible")
        options = {"num_heads": heads, "kv_num_heads": kv_heads, "domain": "com.microsoft"}
        given = {name: in_rows(array[:, :, -tokens:]) for name, array in given.items()}
        given |= {"past_K": problem.key.copy(), "past_V": problem.value.copy()}
        given |= {"last": np.full(batch, keys - 1, np.int32), "keys": np.array([keys], np.int32)}
    names = list(given)
    if quantized:
        options |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": 8}
        for name in ("past_K", "past_V"):
            given[name], scale = cattn.quantize(given[name], axis=None)
            given[name + "_scale"] = scale.reshape(1)
        names += [""] * 5 + ["past_K_scale", "past_V_scale"]  # rotary tables, positions, a bias and sinks are absent

    inputs = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
    outputs = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in result.items()}
    outputs |= {"new_" + name: inputs[name] for name in ("past_K", "past_V") if name in inputs}
    kind = helper.np_dtype_to_tensor_dtype
    graph = helper.make_graph(
        [helper.make_node(operator, names, list(outputs), **options)], operator,
        [helper.make_tensor_value_info(name, kind(array.dtype), array.shape) for name, array in given.items()],
        [helper.make_tensor_value_info(name, kind(value.numpy().dtype), None) for name, value in outputs.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = problem.threads, 3
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    except Exception as error:  # an older onnxruntime does not have the operator
        raise LeftOutError(f"refuses the model: {type(error).__name__}") from error
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in outputs.items():
        binding.bind_ortvalue_output(name, value)

    def convert() -> Array:
        array = outputs["Y"].numpy()
        return array if operator == "Attention" else array.reshape(batch, tokens, heads, -1).swapaxes(1, 2)

    def call() -> Result:
        session.run_with_iobinding(binding)
        return Result(convert)

    return call


def in_rows(array: Array) -> Array:
    """Return (B, H, T, head_dim) as a new array (B, T, H * head_dim)."""
    batch, _, tokens, _ = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2).reshape(batch, tokens, -1))


def openvino_call(problem: Problem, precision: str) -> Callable[[], object]:
    """Prepare OpenVINO's operator on its CPU plug-in, with one stream.

    It has no shared key heads: with one query, the query heads of a group become the queries of one head.
    """
    import openvino
    from openvino import opset13

    needs(problem.query.ndim == 4, "takes four axes")
    needs(problem.dtype != "float64", "has no float64 kernel")
    needs((problem.dtype, precision) != ("bfloat16", "bf16"), "openvino itself computes in bfloat16 here")
    folds = problem.group > 1 and problem.query.shape[2] == 1 and not problem.causal
    needs(folds or problem.group == 1, "has no shared key heads")
    shape = problem.query.shape
    query = problem.query.reshape(*problem.key.shape[:2], -1, shape[-1]) if folds else problem.query
    kind = {"float32": openvino.Type.f32, "float16": openvino.Type.f16, "bfloat16": openvino.Type.bf16}[problem.dtype]
    tensors = []
    for array in (query, problem.key, problem.value):
        tensors.append(openvino.Tensor(kind, openvino.Shape(array.shape)))
        tensors[-1].data.view(array.dtype)[...] = array  # of bfloat16, `data` shows the bits as float16
    inputs = [opset13.parameter(list(tensor.shape), kind) for tensor in tensors]
    model = openvino.Model([opset13.scaled_dot_product_attention(*inputs, causal=problem.causal)], inputs)
    settings = {
        "INFERENCE_PRECISION_HINT": precision, "NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": problem.threads,
        "ENABLE_CPU_PINNING": False,
    }  # fmt: skip
    compiled = openvino.Core().compile_model(model, "CPU", settings)
    used = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
    needs(used == precision, f"computes in {used} on this CPU")
    request = compiled.create_infer_request()
    for index, tensor in enumerate(tensors):
        request.set_input_tensor(index, tensor)

    def convert() -> Array:
        out = request.get_output_tensor(0).data
        return (out if out.dtype == np.float32 else out.view(problem.query.dtype)).reshape(shape)

    def call() -> Result:
        request.infer()
        return Result(convert)

    return call


def ggml_call(problem: Problem, quantized: bool = False) -> Callable[[], object]:
    """Prepare ggml's operator. Its mask is an array, and query and result are float32.

    A quantized cache is q8_0: int8, with a float16 scale for each 32 columns.
    """
    import ggml

    needs(problem.query.ndim == 4, "takes four axes")
    kinds = {"float32": ggml.GGML_TYPE_F32, "float16": ggml.GGML_TYPE_F16, "bfloat16": ggml.GGML_TYPE_BF16}
    needs(problem.dtype in kinds, f"has no {problem.dtype} kernel")
    arrays = [problem.query.astype(np.float32), problem.key, problem.value]
    types = [kinds[array.dtype.name] for array in arrays]
    shapes = [array.shape for array in arrays]
    if quantized:
        types[1:3] = [ggml.GGML_TYPE_Q8_0] * 2
        arrays[1:3] = [ggml_quantized(ggml, array) for array in arrays[1:3]]
    if problem.causal:
        visible = np.tri(problem.query.shape[2], problem.key.shape[2], dtype=bool)
        arrays.append(np.where(visible, 0, -np.inf).astype(np.float16)[None, None])
        types.append(ggml.GGML_TYPE_F16)
        shapes.append(arrays[3].shape)
    backend = ggml.ggml_backend_cpu_init()
    ggml.ggml_backend_cpu_set_n_threads(backend, problem.threads)
    context = ggml.ggml_init(ggml.ggml_init_params(mem_size=2**20, mem_buffer=None, no_alloc=True))
    tensors = [ggml.ggml_new_tensor_4d(context, kind, *shape[::-1]) for kind, shape in zip(types, shapes, strict=True)]
    mask = tensors[3] if problem.causal else None
    out = ggml.ggml_flash_attn_ext(context, *tensors[:3], mask, problem.query.shape[-1] ** -0.5, 0.0, 0.0)
    graph = ggml.ggml_new_graph(context)
    ggml.ggml_build_forward_expand(graph, out)
    buffer = ggml.ggml_backend_alloc_ctx_tensors(context, backend)
    for tensor, array in zip(tensors, arrays, strict=True):
        ggml.ggml_backend_tensor_set(tensor, array.ctypes.data, 0, array.nbytes)
    batch, heads, tokens, _ = problem.query.shape
    result = np.empty((batch, tokens, heads, problem.value.shape[-1]), np.float32)

    def convert() -> Array:
        ggml.ggml_backend_tensor_get(out, result.ctypes.data, 0, result.nbytes)
        return result.swapaxes(1, 2)

    def call() -> Result:
        status = ggml.ggml_backend_graph_compute(backend, graph)
        if status != ggml.GGML_STATUS_SUCCESS:
            raise RuntimeError(f"ggml returned status {status}")
        return Result(convert)

    weakref.finalize(call, free_ggml, ggml, context, buffer, backend)
    return call


def ggml_quantized(ggml: Any, array: Array) -> Array:
    """Return the bytes of an array in q8_0: 34 for each 32 numbers."""
    import ctypes

    result = np.empty(array.size // 32 * 34, np.uint8)
    rows = array.size // array.shape[-1]
    pointer = ctypes.POINTER(ctypes.c_float)
    source = np.ascontiguousarray(array, np.float32).ctypes.data_as(pointer)
    ggml.ggml_quantize_chunk(
        ggml.GGML_TYPE_Q8_0, source, result.ctypes.data_as(ctypes.c_void_p), 0, rows, array.shape[-1], None
    )
    return result


def free_ggml(ggml: Any, context: Any, buffer: Any, backend: Any) -> None:
    """Free the memory of a call of ggml."""
    ggml.ggml_free(context)
    ggml.ggml_backend_buffer_free(buffer)
    ggml.ggml_backend_free(backend)


PEERS = {
    "torch": Peer("PyTorch SDPA", "torch", torch_call),
    "torch matmul": Peer("PyTorch products", "torch", products_call),
    "torch flex": Peer("PyTorch flex", "torch", flex_call),
    "numpy": Peer("NumPy textbook", "numpy", numpy_call, keeps_scores=True),
    "onnxruntime": Peer(
        "onnxruntime Attention", "onnxruntime", functools.partial(onnxruntime_call, operator="Attention")
    ),
    "onnxruntime MHA": Peer(
        "onnxruntime MHA", "onnxruntime", functools.partial(onnxruntime_call, operator="MultiHeadAttention")
    ),
    "onnxruntime GQA": Peer(
        "onnxruntime GQA", "onnxruntime", functools.partial(onnxruntime_call, operator="GroupQueryAttention")
    ),
    "openvino": Peer("OpenVINO", "openvino", functools.partial(openvino_call, precision="f32")),
    "openvino bf16": Peer("OpenVINO bfloat16", "openvino", functools.partial(openvino_call, precision="bf16")),
    "ggml": Peer("ggml", "ggml-python", ggml_call),
    "jax": Peer("JAX", "jax", jax_call, keeps_scores=True),
}


# Those with quantized caches, whose errors are of the size of a step of int8.
QUANTIZED_PEERS = {
    "onnxruntime int8": Peer(
        "onnxruntime GQA, int8",
        "onnxruntime",
        functools.partial(onnxruntime_call, operator="GroupQueryAttention", quantized=True),
    ),
    "ggml q8_0": Peer("ggml, q8_0", "ggml-python", functools.partial(ggml_call, quantized=True)),
}


def quantized_calls(query: Array, key: Array, value: Array) -> CheckedCalls:
    """Return attention of one query over keys and values in int8, and over the same in other dtypes of cattn."""
    import ml_dtypes

    out, attend = np.empty((*query.shape[:-1], value.shape[-1]), np.float32), cattn.scaled_dot_product_attention
    calls: Calls = {"float32": lambda: attend(query, key, value, out=out)}
    for name, dtype in (("cattn", "int8"), ("float8", "float8_e4m3fn")):
        small_key, small_value = (cattn.quantize(array, dtype=dtype) for array in (key, value))
        calls[name] = functools.partial(attend, query, small_key, small_value, out=out)
    halves = (array.astype(ml_dtypes.bfloat16) for array in (query, key, value))
    calls["bfloat16"] = functools.partial(attend, *halves)
    problem, left_out = Problem(query, key, value, causal=False), {}
    for name, peer in QUANTIZED_PEERS.items():
        try:
            calls[name] = peer.prepare(problem)
        except (LeftOutError, ImportError) as error:
            left_out[name] = str(error) if isinstance(error, LeftOutError) else "not installed"
    exact = problem.exact()
    errors = {name: float(np.abs(as_floats(call()) - exact).max()) for name, call in calls.items()}
    if max(errors.values()) > 0.1 * np.abs(exact).max():
        raise AssertionError(f"a result is wrong: the largest errors are {errors}")
    facts = {"errors": errors, "other_arithmetic": [], "left_out": left_out}
    return CheckedCalls({"cattn": calls.pop("cattn")} | calls, facts)


def best_peer(ratios: dict[str, float], other_arithmetic: Collection[str] = ()) -> str | None:
    """Return the fastest peer that computes in the row's arithmetic. Other ratios of a row are cattn's own."""
    libraries = {name.split()[0] for name in PEERS}
    peers = [name for name in ratios if name.replace(",", " ").split()[0] in libraries and name not in other_arithmetic]
    return min(peers, key=lambda name: ratios[name], default=None)


def attention_calls(query: Array, key: Array, value: Array, *, matrix: bool = True, **options: Any) -> CheckedCalls:
    """Return attention, causal or over all keys, by cattn and by every peer that can compute it.

    Without `matrix`, peers that keep the whole matrix of scores are left out. `options` belong to Problem.
    """
    problem = Problem(query, key, value, **options)
    out = np.empty((*query.shape[:-1], value.shape[-1]), query.dtype)
    attend, alignment = cattn.scaled_dot_product_attention, "upper_left" if problem.causal else False
    ours = functools.partial(attend, query, key, value, is_causal=alignment, out=out)
    calls: Calls = {"cattn": ours}
    if query.dtype.name == "bfloat16":  # OpenVINO's products in these rows, too
        calls["bfloat16 products"] = functools.partial(ours, compute_dtype="bfloat16")
    left_out = {}
    for name, peer in PEERS.items():
        try:
            needs(matrix or not peer.keeps_scores, "holds the whole matrix of scores")
            calls[name] = peer.prepare(problem)
        except (LeftOutError, ImportError) as error:
            left_out[name] = str(error) if isinstance(error, LeftOutError) else "not installed"
    errors, other = checked(calls, problem.exact(), query.dtype)
    return CheckedCalls(calls, {"errors": errors, "other_arithmetic": other, "left_out": left_out})


def checked(calls: Calls, exact: Array, dtype: Any) -> tuple[dict[str, float], list[str]]:
    """Return the largest error of each call, and the peers that err more than the row's arithmetic explains."""
    errors, other = {}, []
    scale = max(1.0, np.abs(exact).max())
    unit = rms(as_floats(exact.astype(dtype)) - exact) if dtype != "float64" else rms(exact) * 2.0**-54
    for name, call in calls.items():
        error = as_floats(call()) - exact
        errors[name] = float(np.abs(error).max())
        if not errors[name] <= WRONG * scale:
            raise AssertionError(f"{name} is wrong: its largest error is {errors[name]:.3g}")
        if rms(error) > ROUNDINGS[dtype.name] * unit:
            other.append(name)
    if "cattn" in other:
        raise AssertionError(f"cattn is wrong: its largest error is {errors['cattn']:.3g}")
    return errors, other


def rms(array: Array) -> float:
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.square(array))))


def agreeing(calls: Calls, tolerance: float = TOLERANCE) -> Calls:
    """Return the calls, after comparing their results in float32 with cattn's."""
    right = as_floats(calls["cattn"]())
    for name, call in calls.items():
        atol = tolerance * max(1.0, np.abs(right).max())
        np.testing.assert_allclose(as_floats(call()), right, rtol=0, atol=atol, err_msg=name)
    return calls


# ---- others --------------------------------------------------------------------------------------------------------
def numpy_dropout(x: Array, p: float) -> Callable[[], Array]:
    """Prepare the fastest dropout in NumPy: every step writes into an existing array."""
    rng = np.random.default_rng(0)
    noise, out = np.empty_like(x), np.empty_like(x)
    keep = x.dtype.type(1 - p)

    def call() -> Array:
        rng.random(out=noise, dtype=x.dtype)
        np.multiply(x, 1 / keep, out=out)
        np.multiply(out, noise < keep, out=out)
        return out

    return call


def book_module(torch: Any, d: int, context_length: int, num_heads: int, fused: bool) -> Any:
    """Return multi-head attention as textbooks write it in PyTorch, or with PyTorch's fused function inside."""
    nn = torch.nn

    class MultiHeadAttention(nn.Module):  # type: ignore[misc, name-defined, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.W_query, self.W_key, self.W_value = (nn.Linear(d, d, bias=False) for _ in range(3))
            self.out_proj, self.dropout = nn.Linear(d, d), nn.Dropout(0.1)
            self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), diagonal=1))

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            q, k, v = (
                layer(x).view(batch, tokens, num_heads, d // num_heads).transpose(1, 2)
                for layer in (self.W_query, self.W_key, self.W_value)
            )
            if fused:
                context = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(2, 3)
                scores.masked_fill_(self.mask.bool()[:tokens, :tokens], -torch.inf)
                context = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1)) @ v
            return self.out_proj(context.transpose(1, 2).reshape(batch, tokens, d))

    return MultiHeadAttention().eval()
