"""Measurements that need a process of their own: peak memory and the time of an import.

python child.py memory cattn 12 4096 64  ->  bytes beyond inputs and output
python child.py import numpy cattn       ->  seconds of the second import
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def status(field: str) -> int:
    """Return a field of this process's memory, in bytes (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in /proc/self/status")


def attention(name: str) -> Any:
    """Return causal attention by one contestant, as f(q, k, v, out)."""
    if name == "torch":
        import torch

        torch.set_num_threads(1)

        def by_torch(q: Any, k: Any, v: Any, out: Any) -> Any:
            tensors = [torch.from_numpy(a) for a in (q, k, v)]
            return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)

        return by_torch
    if name == "numpy":
        sys.path.insert(0, str(Path(__file__).parent.parent))
        from benchmarks.contestants import textbook

        return lambda q, k, v, out: textbook(q, k, v)
    import cattn

    cattn.set_num_threads(1)
    return lambda q, k, v, out: cattn.causal_attention(q, k, v, out=out)


def memory(name: str, heads: int, tokens: int, head_dim: int) -> int:
    """Return the peak memory of a call in bytes, beyond inputs and output."""
    import numpy as np

    call = attention(name)
    small = [np.zeros((1, 1, 200, head_dim), np.float32) for _ in range(4)]
    call(*small)  # libraries load, pools start
    arrays = [np.ones((1, heads, tokens, head_dim), np.float32) for _ in range(4)]
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    result = call(*arrays)
    peak = status("VmHWM") - before
    own = 0 if name == "cattn" else int(np.asarray(result).nbytes)
    return max(0, peak - own)


def seconds_of_import(before: str, name: str) -> float:
    """Return the seconds of an import in a fresh process, after another import."""
    __import__(before)
    start = time.perf_counter()
    __import__(name)
    return time.perf_counter() - start


if __name__ == "__main__":
    what, name, *more = sys.argv[1:]
    print(memory(name, *map(int, more)) if what == "memory" else seconds_of_import(name, *more))
