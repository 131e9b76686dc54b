"""Benchmarks of cattn and its peers; README.md in this folder describes them.

This package is imported before NumPy, so it can limit the peers' thread pools to one thread: a pool that spins would
disturb the next contestant. OpenMP threads wait without spinning, for the rows where PyTorch has two threads.
"""

import os

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
