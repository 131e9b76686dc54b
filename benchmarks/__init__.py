"""Benchmarks of cattn against its peers; see README.md in this folder.

Importing the package comes before importing NumPy, so the thread pools of the peers are kept to one thread here: a pool
that spins would disturb whatever runs beside it.
"""

import os

for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
