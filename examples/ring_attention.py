"""Causal attention over a sequence that is spread over MPI processes: a zigzag ring.

    mpirun -n 4 python examples/ring_attention.py

With n processes the sequence has 2n slices, and process r holds the slices r and 2n-1-r. Causality hides most keys from
an early slice and few from a late one, so that all processes have equal work. Keys and values travel around the ring
while the processes attend to those that they have; no process holds the whole sequence.
"""

import numpy as np
from mpi4py import MPI

import cattn


def ring_attention(comm, query, key, value):
    """Return the output for this process's two slices: arrays of shape (2, ..., length, head_dim)."""
    n, rank, length = comm.size, comm.rank, query.shape[-2]
    held, incoming = np.stack([key, value]), np.empty((2, *key.shape), key.dtype)
    totals = [None, None]
    for step in range(n):
        owner = (rank - step) % n
        requests = []
        if step < n - 1:
            requests = [comm.Isend(held, (rank + 1) % n), comm.Irecv(incoming, (rank - 1) % n)]
        for i, mine in enumerate((rank, 2 * n - 1 - rank)):
            for j, theirs in enumerate((owner, 2 * n - 1 - owner)):
                if theirs > mine:  # causality hides the whole slice
                    continue
                offset = (mine - theirs) * length  # position of the first query, counted from the first key
                out, _, lse, *_ = cattn.causal_attention(
                    query[i], held[0, j], held[1, j], query_offset=offset, return_lse=True
                )
                if totals[i] is not None:
                    out, lse = cattn.merge_attention([totals[i][0], out], [totals[i][1], lse])
                totals[i] = out, lse
        MPI.Request.Waitall(requests)
        held, incoming = incoming, held
    return np.stack([out for out, _ in totals])


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    length, slices = 256, 2 * comm.size
    # For the check at the end only, every process makes the whole problem: 4 heads of 64.
    whole = np.random.default_rng(0).standard_normal((3, 4, slices * length, 64), dtype=np.float32)
    cut = np.stack(np.split(whole, slices, axis=-2), axis=1)  # (3, slice, head, length, 64)
    mine = [comm.rank, slices - 1 - comm.rank]
    out = ring_attention(comm, *(np.ascontiguousarray(x[mine]) for x in cut))
    expected = np.stack(np.split(cattn.causal_attention(*whole), slices, axis=-2))[mine]
    error = comm.allreduce(float(np.abs(out - expected).max()), MPI.MAX)
    if comm.rank == 0:
        print(f"{comm.size} processes, {slices * length} tokens, largest difference from one call: {error:.1e}")
    assert error < 1e-5
