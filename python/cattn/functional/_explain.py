"""A description of how a call of attention would be computed."""

from __future__ import annotations

from typing import Any, NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from .._input.objects import Stored
from .._input.types import Alignment, html_table
from ._options import ExtraOptions, implemented_in_c

__all__ = ["Explanation", "explain"]

REASONS = {
    "tile": "many queries share the keys of a head: blocks of queries meet blocks of keys",
    "rows": "few queries share the keys of a head: keys and values stream by them once",
    "split": "few queries, many keys and idle threads: pieces of the keys are shared out, and merged in order",
    "tiny": "it is small: done at once on this thread, without plan or allocation",
}


class Explanation(NamedTuple):
    """The result of `explain`. An interpreter and a notebook show it as text.

    Attributes
    ----------
    outputs : dict
        The shape and dtype of each result that the call returns, by its name in `AttentionOutput`.
    path : {"tile", "rows", "split", "tiny"}
        The algorithm. All paths give the same bits.
    reason : str
        The reason for this path.
    instruction_set : str
        The kernels in use.
    threads : int
        Number of threads that may take part.
    tasks : int
        Tasks that are handed to threads.
    rows_per_task : int
        Largest number of queries in a task.
    key_blocks_visited, key_blocks_skipped : int
        Blocks of 192 keys that tasks compute, and those that they skip because of causality, window and lengths.
    visible_pairs : int
        Pairs of a query and a key in its range; masks per element may hide some of them.
    flops : int
        Floating-point operations of the two products over these pairs.
    scratch_bytes_per_thread : int
        Scratch memory of a thread. A call allocates nothing else but its outputs.
    """

    outputs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
    path: str
    reason: str
    instruction_set: str
    threads: int
    tasks: int
    rows_per_task: int
    key_blocks_visited: int
    key_blocks_skipped: int
    visible_pairs: int
    flops: int
    scratch_bytes_per_thread: int

    def _rows(self) -> dict[str, str]:
        blocks = self.key_blocks_visited + self.key_blocks_skipped
        used = min(self.threads, self.tasks)
        return {
            "returns": ", ".join(f"{name} {dtype} {shape}" for name, (shape, dtype) in self.outputs.items()),
            "path": f"{self.path}: {self.reason}",
            "kernels": self.instruction_set,
            "tasks": f"{self.tasks} of at most {self.rows_per_task} queries, {used} at a time",
            "keys": f"{self.key_blocks_visited} of {blocks} blocks of 192 keys visited, the others skipped",
            "work": f"{self.flops:.3g} floating-point operations",
            "memory": f"{self.scratch_bytes_per_thread:,} bytes a thread, beyond the outputs",
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:<10}{text}" for name, text in self._rows().items())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table("Explanation", self._rows().items())


@implemented_in_c
def explain(  # type: ignore[empty-body]
    query: ArrayLike,
    key: Stored,
    value: Stored,
    attn_mask: ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: Alignment = False,
    **options: Unpack[ExtraOptions],
) -> Explanation:
    """Describe what `scaled_dot_product_attention` would return, and how it would compute it, without computing it.

    The arguments are checked, with the errors of the call. The contents of query, key, value and masks are not read, so
    that arrays without memory of their own do, such as ``np.broadcast_to(np.float32(0), shape)``.

    Parameters
    ----------
    query : array_like, shape (..., T_q, head_dim)
        This and every other argument are the same as in `scaled_dot_product_attention`. Nothing is drawn from rng. A
        `TorchGenerator` for dropout and returned weights of float16 or bfloat16 turn the path "split" into "rows",
        which is not shown.

    Returns
    -------
    Explanation
        The plan for the threads and kernels in use now.

    Other Parameters
    ----------------
    layout : {"bhtd", "bthd"}
        Order of heads and tokens in query, key and value.
    return_weights : bool
        Also return the weights.
    return_lse : bool, np.float32 or np.float64
        Also return the log-sum-exp, in this dtype.
    return_dropout_mask : bool
        Also return the dropout mask.

    Raises
    ------
    TypeError, ValueError
        As for `scaled_dot_product_attention`.

    See Also
    --------
    show_mask : Which keys each query sees.
    show_config : Instruction set, threads and build.
    scaled_dot_product_attention : The call itself.

    Examples
    --------
    >>> import numpy as np
    >>> import cattn
    >>> x = np.zeros((1, 12, 4096, 64), np.float32)
    >>> plan = cattn.explain(x, x, x, is_causal="lower_right", window_size=(255, 0))
    >>> plan.path, plan.key_blocks_visited, plan.key_blocks_skipped
    ('tile', 1248, 10104)
    >>> plan.outputs
    {'out': ((1, 12, 4096, 64), dtype('float32'))}
    """


def make_explanation(depth: int, **fields: Any) -> Explanation:
    """Return the explanation with reason and flops, which C does not fill in; depth is head_dim + d_v."""
    return Explanation(reason=REASONS[fields["path"]], flops=2 * fields["visible_pairs"] * depth, **fields)
