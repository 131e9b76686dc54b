"""The order of operations of cattn, executable: attention, softmax and a step of linear attention, with every bit.

Read it from top to bottom to write cattn's attention in another language. It needs nothing of cattn, and of NumPy sums,
products, quotients, comparisons, conversions and powers of two (ldexp, frexp). The numbers of a row are float32, or
float64 where the inputs are; every operation rounds to nearest even and keeps subnormal numbers. The first axis of
arrays is the rows, which have nothing to do with each other. docs/bit_contract.md explains each section.
"""

from typing import Any

import numpy as np

__all__ = ["attention", "linear_attention_step", "softmax"]

Array = Any  # of NumPy, or a number
Three = tuple[Array, Array, Array]  # a state: the largest score, the sum of exponentials, the sum of values
CHAIN, RUN, HALF, BLOCK, CHUNK = 16, 512, 96, 192, 1536  # terms, columns of a softmax, keys


# ---- FMA: a product and a sum, rounded once. Most languages have it, NumPy does not. ---------------------------------
def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b, and the error of its rounding: together they are exactly the sum."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def odd_sum(a: Array, b: Array) -> Array:
    """Return a + b of float64, rounded to odd: a sum between two numbers becomes the one whose last bit is 1."""
    total, error = two_sum(a, b)
    wrong = ((error < 0) | (error > 0)) & (total.view(np.int64) % 2 == 0)
    return np.where(wrong, np.nextafter(total, np.copysign(np.inf, error)), total)


def fma(a: Any, b: Any, c: Any) -> Array:
    """Return a * b + c: in float32 by float64, in float64 by the errors of product and sum, or by integers."""
    if np.result_type(a, b, c) == np.float32:  # float64 holds the product, and has two bits to spare for the sum
        return odd_sum(np.float64(a) * np.float64(b), np.float64(c)).astype(np.float32)
    a, b, c = np.broadcast_arrays(a, b, c)
    product, (a_high, b_high) = a * b, (x * (2.0**27 + 1) - (x * (2.0**27 + 1) - x) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    high, rest = two_sum(c, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low)
    total, more = two_sum(product, high)
    is_exact = (abs(product) > 2.0**-960) & (np.maximum(abs(a), np.maximum(abs(b), abs(c))) < 2.0**490)
    result = np.where(is_exact, total + odd_sum(rest, more), product + c)
    for at in map(tuple, np.argwhere(~is_exact & (a * 0 == 0) & (b * 0 == 0) & (a != 0) & (b != 0) & (c == c))):
        try:
            (i, j), (k, m), (p, q) = (float(x[at]).as_integer_ratio() for x in (a, b, c))
            result[at] = (i * k * q + p * j * m) / (j * m * q)  # of integers, so that there is one rounding
        except OverflowError:
            result[at] = np.copysign(np.inf, c[at] if np.isinf(c[at]) else product[at])
    return result


# ---- Functions: exponential, hyperbolic tangent, logistic function, logarithm. ---------------------------------------
# A number that rounds others to integers, the least and the greatest x of exp, 1 / ln 2, ln 2 in two parts, and the
# coefficients of (exp(r) - 1) / r.
HEX = {
    np.float32: """0x1.8p23 -0x1.5d589ep6 0x1.62e42ep6 0x1.715476p0 0x1.62e4p-1 0x1.7f7d1cp-20
        0x1p0 0x1.fffffcp-2 0x1.555492p-3 0x1.5558f2p-5 0x1.1239e2p-7 0x1.6a2434p-10""",
    np.float64: """0x1.8p52 -0x1.6232bdd7abcd2p9 0x1.62e42fefa39efp9 0x1.71547652b82fep0 0x1.62e42fefa3800p-1
        0x1.ef35793c76730p-45 0x1p0 0x1.000000000000ap-1 0x1.55555555554fap-3 0x1.555555555088dp-5 0x1.1111111127b92p-7
        0x1.6c16c184261aap-10 0x1.a01a012a6bfd9p-13 0x1.a0199a17bfbb3p-16 0x1.71df253711dfap-19 0x1.28ad67da0addcp-22
        0x1.ad7f7cfc0e86ep-26""",
}
NUMBERS: Any = {real: [real(float.fromhex(word)) for word in text.split()] for real, text in HEX.items()}


def reduced(x: Array) -> tuple[Array, Array, Array]:
    """Return n, r and p with x = n ln 2 + r and exp(r) = 1 + p r."""
    magic, _, _, log2e, ln2_high, ln2_low, *coefficients, p = NUMBERS[x.dtype.type]
    n = fma(x, log2e, magic) - magic
    r = fma(n, -ln2_low, fma(n, -ln2_high, x))
    for coefficient in reversed(coefficients):
        p = fma(p, r, coefficient)
    return np.where(np.isfinite(n), n, 0).astype(np.int32), r, p


def exp(x: Array, maximum: Any = 0) -> Array:
    """Return exp(x - maximum), +0 if it is subnormal. A maximum of -inf, of a row that has seen none, counts as 0."""
    x = x - np.where(maximum == -np.inf, 0, maximum).astype(x.dtype)
    real, (_, least, greatest, *_) = x.dtype.type, NUMBERS[x.dtype.type]
    n, r, p = reduced(x)
    return np.where(x < least, real(0), np.where(x > greatest, real(np.inf), np.ldexp(fma(p, r, real(1)), n)))


def tanh(x: Array) -> Array:
    """Return tanh(x) from exp(-2|x|) = q = 1 + e."""
    y = np.maximum(NUMBERS[x.dtype.type][1], -2 * abs(x))
    n, r, p = reduced(y)
    power, m = np.ldexp(x.dtype.type(1), n), p * r
    q, e = fma(m, power, power), fma(m, power, power - 1)
    t = np.where(y < -1.125, (q + q) / (e + 2) - 1, e / (e + 2))
    return np.where(x == 0, x, np.where(x < 0, t, -t))


def logistic(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), where exp(-|x|) = (1 + m) * 2^n."""
    n, r, p = reduced(np.maximum(x.dtype.type(-760), -abs(x)))
    m = p * r
    large = 1 / (1 + np.ldexp(1 + m, n))
    return np.where(x < 0, np.ldexp(fma(large, m, large), n), large)


def log(x: Array) -> Array:
    """Return the logarithm of a positive normal float64, by a series of (m - 1) / (m + 1), m near 1."""
    m, exponent = np.frexp(x)  # x = m * 2^exponent, with m from 1/2 to 1
    is_low = m <= float.fromhex("0x1.6a09e667f3bcdp-1")  # the root of 1/2
    m, exponent = np.where(is_low, 2 * m, m), exponent - is_low
    s = (m - 1) / (m + 1)
    z, series = s * s, 0.0
    for k in range(23, 1, -2):
        series = (series + 1 / k) * z
    return exponent * NUMBERS[np.float64][4] + (exponent * NUMBERS[np.float64][5] + 2 * (s + s * series))


# ---- Sums: of products, in chains of 16 terms; of weights, in 8 chains and a tree. -----------------------------------
def dot(a: Array, b: Array, start: float = 0.0, seen: Any = True) -> Array:
    """Return start + the sum over the last axis of a * b, without the terms that are not seen."""
    a, b, seen = np.broadcast_arrays(a, b, seen)
    total = np.full(a.shape[:-1], start, a.dtype)
    for first in range(0, a.shape[-1], CHAIN):
        chain = np.zeros_like(total)
        for i in range(first, min(first + CHAIN, a.shape[-1])):
            chain = np.where(seen[..., i], fma(a[..., i], b[..., i], chain), chain)
        total = total + chain
    return total


def tree_sum(terms: Array) -> Array:
    """Return the sum over the last axis, which keeps one element."""
    c = np.zeros((8, *terms.shape[:-1], 1), terms.dtype)
    for i in range(terms.shape[-1]):
        c[i % 8] += terms[..., i, None]
    return ((c[0] + c[4]) + (c[2] + c[6])) + ((c[1] + c[5]) + (c[3] + c[7]))


# ---- Scores: scaled products, softcap, slopes. -----------------------------------------------------------------------
def score(query: Array, key: Array, scale: Any, softcap: Any, slope: Any, position: Array) -> Array:
    """Return the scores (T, n) of T queries and n keys. Positions (T, 1) count from the first key."""
    scores = dot((query * scale)[:, None], key, start=-0.0 if key.shape[-1] else 0.0)  # -0 + x is x, also if x is -0
    if softcap > 0:
        scores = softcap * tanh(scores / softcap)
    k = np.arange(len(key))
    distance = (position - k // BLOCK * BLOCK).astype(query.dtype) - (k % BLOCK).astype(query.dtype)
    return fma(-slope, np.where(distance > 0, distance, -distance), scores) if slope >= 0 else scores  # |0| is -0


# ---- Dropout: the bits of Philox4x32-10 decide which weights are kept. -----------------------------------------------
def keeps(probability: float, seed: int, entry: int, head: int, position: Array, n: int) -> Array:
    """Return which of n weights are kept in the rows at positions (T, 1). Eight keys share a counter."""
    low, j, threshold, digits = 2**32 - 1, np.arange(n), round(probability * 2**32), []
    for draw in (0, 1):
        a, b, c, d = map(np.uint64, (j // 64 * 8 + j % 8, position & low, head, 2 * entry + draw))
        for i in range(10):
            left, right = (seed + i * 0x9E3779B9) & low, ((seed >> 32) + i * 0xBB67AE85) & low
            p, q = a * 0xD2511F53, c * 0xCD9E8D57
            a, b, c, d = (q >> 32) ^ b ^ left, q & low, (p >> 32) ^ d ^ right, p & low
        word = np.choose(j // 16 % 4, np.broadcast_arrays(a, b, c, d))
        digits.append(word >> (j // 8 % 2 * 16).astype(np.uint64) & 0xFFFF)
    return np.where(digits[0] == threshold >> 16, digits[1] < (threshold & 0xFFFF), digits[0] < threshold >> 16)


# ---- Blocks: softmax block by block of 192 keys, in chunks of 1536. --------------------------------------------------
def add_block(state: Three, scores: Array, visible: Array, kept: Array, value: Array, is_small: bool) -> Three:
    """Return the state after a block of keys. A maximum ignores NaN."""
    maximum, total, acc = state
    now = np.fmax(maximum, np.fmax.reduce(scores, axis=-1, keepdims=True))
    alpha, w = exp(maximum, now), exp(scores, now)
    total = fma(total, alpha, tree_sum(w))
    w = np.where(kept, w, w.dtype.type(0))
    if is_small:  # a weight that is not 0 does not become 0
        w = np.where(w > 0, np.maximum(w * w.dtype.type(2.0**-64), np.finfo(w.dtype).smallest_subnormal), w)
    first, second = (dot(w[:, None, k], value[k].T, seen=visible[:, None, k]) for k in (np.s_[:HALF], np.s_[HALF:]))
    return now, total, fma(acc, alpha, first) + second


def walk(scores: Array, visible: Array, kept: Array, value: Array, is_small: bool = False) -> Three:
    """Return the state after all keys. A chunk starts with nothing; chunks are merged in order."""
    column, (n, width) = np.zeros_like(scores, shape=(len(scores), 1)), value.shape
    state = nothing = column - np.inf, column, column.repeat(width, axis=1)
    for chunk in range(0, n, CHUNK):
        part = nothing
        for first in range(chunk, min(chunk + CHUNK, n), BLOCK):
            keys = slice(first, first + BLOCK)
            part = add_block(part, scores[:, keys], visible[:, keys], kept[:, keys], value[keys], is_small)
        (m1, l1, o1), (m2, l2, o2) = state, part
        now = np.fmax(m1, m2)
        a1, a2 = exp(m1, now), exp(m2, now)
        state = now, fma(l2, a2, l1 * a1), fma(o2, a2, o1 * a1)
    return state


# ---- Rows: from the state to output, weights and log-sum-exp. --------------------------------------------------------
def finish(scores: Array, visible: Array, kept: Array, value: Array, dropout_p: float, sink: Any, gate: Any) -> Three:
    """Return output (T, D), weights (T, n) and, in float64, log-sum-exp (T, 1)."""
    real, most, keep_scale = scores.dtype.type, np.finfo(scores.dtype).max, 1 / (1 - dropout_p) if dropout_p < 1 else 0
    scores = np.where(visible, scores, real(-np.inf))  # by selection: a hidden score may be NaN
    maximum, total, acc = walk(scores, visible, kept, value)
    now = np.fmax(maximum, sink)  # a sink is one more score, without a value; -inf is none
    alpha = exp(maximum, now)
    total = fma(total, alpha, exp(sink, now))
    sees = visible.any(axis=-1, keepdims=True)
    factor = np.where(total == 0, np.where(sees, real(np.nan), real(0)), 1 / total * real(keep_scale) * alpha)
    out = acc * factor + 0
    if not np.isfinite(out).all():  # sums may overflow where their mean does not: once more, with smaller weights
        small = walk(scores, visible, kept, value, is_small=True)[2] * factor
        mean, is_mean = small * real(2.0**64), np.isfinite(small) & (keep_scale == 1)
        out = np.where(np.isfinite(out), out, np.where(is_mean, np.clip(mean, -most, most), mean) + 0)
    out = np.where(sees, out * logistic(gate), real(0))  # of inf it is 1
    weights = np.where(1 / total < np.inf, exp(scores, now) * (1 / total), np.where(visible, real(np.nan), real(0)))
    lse = np.where(total == 0, -np.inf, now.astype(np.float64) + log(total.astype(np.float64)))
    return out, weights, lse


# ---- Arrays: heads on the third last axis, what each query sees, and the dtypes of the results. ----------------------
def stored(x: Array, dtype: Any) -> Array:
    """Return x in a dtype, with one NaN in the place of all."""
    return np.where(np.isnan(x), x.dtype.type(np.nan), x).astype(dtype)


@np.errstate(all="ignore")
def attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: Any = False, *,
    scale: float | None = None, bias: Any = None, query_offset: Any = None, query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None, key_value_seq_starts: Any = None, window_size: Any = (-1, -1),
    softcap: float | None = None, alibi_slopes: Any = None, sinks: Any = None, block_mask: Any = None,
    block_size: int = 2**62, key_indices: Any = None, gate: Any = None, rng: int = 0,
) -> Three:  # fmt: skip
    """Return output, weights and log-sum-exp (float64). `cattn.scaled_dot_product_attention` explains the options."""
    inputs = [a.astype(np.float64) if a.dtype.kind in "biu" else a for a in map(np.asarray, (query, key, value))]
    real, dtype = np.result_type(np.float32, *inputs).type, np.result_type(*inputs)
    heads, T, n = max((1, *a.shape)[-3] for a in inputs), inputs[0].shape[-2], inputs[1].shape[-2]
    inputs = [a.repeat(heads // max(1, a.shape[-3]), axis=-3) if a.ndim > 2 else a for a in inputs]
    lead = np.broadcast_shapes(*(a.shape[:-2] for a in inputs))  # batch and heads
    q, k, v = (np.broadcast_to(a.astype(real), (*lead, *a.shape[-2:])) for a in inputs)
    scale = 1 / np.sqrt(q.shape[-1] or 1) if scale is None else scale
    left, right = (np.inf if side in (None, -1) else side for side in window_size or (-1, -1))
    i, j, has_lists = np.arange(T)[:, None], np.arange(n), key_indices is not None
    given = (attn_mask, True), (bias, True), (block_mask, True), (key_indices, j), (gate, np.inf), (alibi_slopes, -1)
    counts = (query_offset, 0), (query_seq_lengths, T), (key_value_seq_lengths, n), (key_value_seq_starts, 0)
    mask, bias, blocks, lists, gate, slopes = (np.asarray(b if a is None else a) for a, b in given)
    lists = np.broadcast_to(lists, (*lead, T, lists.shape[-1]))
    gate = np.broadcast_to(gate.astype(real), (*lead, T, v.shape[-1]))
    blocks = np.broadcast_to(blocks, (*lead, -(-T // block_size), -(-n // block_size)))
    shown, added = blocks[..., i // block_size, j // block_size], np.full((*lead, T, n), -0.0, real)
    for term in (mask, bias):
        shown = shown & (term if term.dtype == bool else term != -np.inf)
        added = added if term.dtype == bool else added + term.astype(real)
    added = np.where(added == -np.inf, np.finfo(real).min, added)  # a sum of finite numbers hides nothing
    of_entries = [np.broadcast_to(b if a is None else a, lead[:-1]) for a, b in counts]
    of_heads = [np.broadcast_to(a, (*lead[:-1], heads)) for a in (slopes, -np.inf if sinks is None else sinks)]
    out, weights, lse = np.zeros(gate.shape, real), np.zeros(lists.shape, real), np.zeros((*lead, T, 1))
    for number, at in enumerate(np.ndindex(lead)):
        entry, head = divmod(number, heads)
        offset, length, end, start = (int(a.flat[entry]) for a in of_entries)
        slope, sink = (real(a.flat[number]) for a in of_heads)
        position = i + (end - length if is_causal == "lower_right" else offset)
        near = (j >= position - left) & (j <= position + (0 if is_causal else right))
        in_range = near & (i < length) & (j >= start) & (j < end)
        groups: Any = [(i[:, 0], j[start:end], j[start:end])]  # of rows: the places of keys in their list, and the keys
        if has_lists:
            places = [[c for c, x in enumerate(keys) if x >= 0 and in_range[r, x]] for r, keys in enumerate(lists[at])]
            groups = [(i[r], c, lists[at][r, c]) for r, c in enumerate(places)]
        for rows, columns, keys in groups:
            pairs, p = np.ix_(rows, keys), position[rows] - start  # the position among the keys
            scores = score(q[at][rows], k[at][keys], real(scale), real(softcap or 0), slope, p) + added[at][pairs]
            visible, kept = (shown[at] & in_range)[pairs], keeps(1 - dropout_p, int(rng), entry, head, p, len(keys))
            results = finish(scores, visible, kept, v[at][keys], dropout_p, sink, gate[at][rows])
            out[at][rows], weights[at][np.ix_(rows, columns)], lse[at][rows] = results
    return stored(out, dtype), stored(weights, dtype), stored(lse, lse.dtype)[..., 0]


# ---- Softmax, of whole rows: runs of 512 columns, added in order. ----------------------------------------------------
@np.errstate(all="ignore")
def softmax(x: Any, mask: Any = None) -> Array:
    """Return the softmax over the last axis of the columns that the mask shows."""
    x, visible = np.asarray(x), np.broadcast_to(True if mask is None else mask, np.shape(x))
    x = x.astype(np.float64) if x.dtype.kind in "biu" else x
    real = np.result_type(np.float32, x).type
    scores = np.where(visible, x.astype(real), real(-np.inf))
    w, total = exp(scores - np.fmax.reduce(scores, axis=-1, keepdims=True, initial=-np.inf)), real(0)
    for first in range(0, x.shape[-1], RUN):
        total = total + tree_sum(w[..., first : first + RUN])
    return stored(np.where(total > 0, w / total, np.where(visible, real(np.nan), real(0))), x.dtype)


# ---- Linear attention: one token of one head. ------------------------------------------------------------------------
@np.errstate(all="ignore")
def linear_attention_step(
    query: Any, key: Any, value: Any, state: Any, decay: Any = 0.0, beta: Any = None, scale: float | None = None
) -> tuple[Array, Array]:
    """Return output (D,) and the next state (H, D). The decay is one number, or one of each row of the state, (H,)."""
    real, (q, k, v) = state.dtype.type, (np.asarray(x).astype(state.dtype) for x in (query, key, value))
    factor = exp(np.asarray(decay, real))
    row, number = (factor, real(1)) if factor.ndim else (real(1), factor)
    update = v if beta is None else real(beta) * (v - number * dot(state.T, k * row))
    scale = 1 / np.sqrt(len(k) or 1) if scale is None else scale
    out = real(scale) * fma(dot(q, k), update, number * dot(state.T, q * row))
    return stored(out, np.asarray(value).dtype), stored(fma(k[:, None], update, state * factor.reshape(-1, 1)), real)
