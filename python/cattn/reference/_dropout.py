"""Random bits as a function of position, and dropout."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ._shared import Bools, Floats, deliver, new_seed, numbers, probability, quiet


def philox4x32(counter: tuple[ArrayLike, ArrayLike, ArrayLike, ArrayLike], seed: int) -> NDArray[np.uint64]:
    """Return Philox4x32-10 of Random123: four random 32-bit words for each counter of four 32-bit words.

    `seed` is the 64-bit key. The parts of `counter` broadcast to a shape S; the result is uint64 of shape ``(4, *S)``.

    Examples
    --------
    >>> [hex(word) for word in philox4x32((0, 0, 0, 0), seed=0).tolist()]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = (np.asarray(c).astype(np.uint64) & low for c in np.broadcast_arrays(*counter))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> half) ^ c1 ^ np.uint64(k0), b & low, (a >> half) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def dropout_keep(p: float, seed: int, batch: ArrayLike, head: ArrayLike, position: ArrayLike, T_k: int) -> Bools:
    """Return the dropout mask of attention weights: rows of `T_k` bits, each a function of seed and position only.

    64 keys share eight counters: key j reads counter 8 (j // 64) + j % 8, and of its four words the 16-bit digit
    number (j // 8) % 8. A digit is compared with the upper half of round((1 - p) 2**32); where they are equal, a digit
    of a second draw is compared with the lower half, so that the probability is exact to 2**-32.

    `p` is the probability of dropping a weight, `seed` the 64-bit key. `batch`, `head` and `position` are the flat
    index of the batch dimensions, the query head and the absolute query position i + query_offset of each row. They
    broadcast to a shape S; the result is bool, ``(*S, T_k)``, True where the element is kept.

    Examples
    --------
    >>> dropout_keep(0.5, seed=123, batch=0, head=0, position=[0, 1], T_k=6).astype(int)
    array([[1, 1, 1, 0, 0, 0],
           [0, 0, 1, 0, 0, 1]])
    """
    upper, lower = divmod(round((1.0 - p) * 2**32), 2**16)
    blocks = -(-T_k // 64)
    batch, head, position = (np.asarray(part, np.int64)[..., None] for part in (batch, head, position))

    def digits(draw: int) -> NDArray[np.uint64]:
        words = philox4x32((np.arange(8 * blocks), position, head, 2 * batch + draw), seed)
        halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=1)  # word, half, *S, block * 8 + r
        by_block = halves.reshape(8, *halves.shape[2:-1], blocks, 8)  # digit, *S, block, r
        return np.moveaxis(by_block, 0, -2).reshape(*halves.shape[2:-1], 64 * blocks)[..., :T_k]

    first = digits(0)
    return np.asarray((first < upper) | ((first == upper) & (digits(1) < lower)))


@quiet
def dropout(
    x: ArrayLike,
    p: float = 0.5,
    *,
    training: bool = True,
    rng: int | None = None,
    return_mask: bool = False,
    out: Floats | None = None,
) -> Floats | tuple[Floats, Bools]:
    """Set elements of `x` to 0 with probability `p` and multiply the others by 1 / (1 - p).

    The factor preserves the expected value of each element, so that no correction is needed after training:
    ``training=False`` returns a copy. `rng` is a 64-bit seed, or None for a random one. With ``return_mask=True`` the
    result is a pair of the output and the mask, True where the element is kept.
    """
    x = numbers(x, "x")
    p = probability(p, "p") if training else 0.0
    # Element n of x in C order has the bit of key n. "Head" 0xD0D0 makes these bits differ from attention's.
    mask = dropout_keep(p, new_seed(rng), batch=0, head=0xD0D0, position=0, T_k=x.size).reshape(x.shape)
    result = deliver(apply_dropout(x, mask, p), out)
    return (result, mask) if return_mask else result


def apply_dropout(x: Floats, mask: Bools, p: float) -> Floats:
    return np.where(mask, x * (1.0 / (1.0 - p)), 0.0) if p < 1 else np.zeros_like(x)
