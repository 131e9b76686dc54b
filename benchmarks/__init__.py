"""Benchmarks of cattn against its peers; see README.md in this folder.

Importing the package comes before importing NumPy, so the thread pools of the peers are kept to one thread here: a pool
that spins would disturb whatever runs beside it. Where PyTorch is given two threads, they wait without spinning: else
they would keep a core from whoever comes next.
"""

import os

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
