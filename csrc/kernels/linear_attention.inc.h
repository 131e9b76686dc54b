/* linear_attention.inc.h -- linear attention with a state, columns of the state in the lanes; and a short convolution.
 * docs/bit_contract.md ("Linear attention") has the order, which is the recurrence itself for any number of tokens.
 *
 * A strip of columns stays in the nearest cache for all tokens. The update by a token and the sums for the next one are
 * one pass over it; so an update is pending between two passes.
 */

/* Vectors of columns in a strip. */
#define STRIP 4
_Static_assert(STRIP *LANES <= CATTN_STRIP_COLUMNS, "the scratch holds a strip");

#if REAL_BITS == 32
#define EXP_MOST 0x1.62e42ep6f /* the largest number whose exp is finite */
#else
#define EXP_MOST 0x1.62e42fefa39efp9
#endif

/* exp(x) for any x. */
INLINE vf factor_of(vf x) {
    vf n, r = reduce(x, &n);
    const vf half = vf_scale2(vf_fma(exp_horner(r), r, vf_set1(1)), n - vf_set1(1));
    const vf grown = vf_select(vf_lt(vf_set1(EXP_MOST), x), vf_set1((real)INFINITY), half + half);
    return vf_select(vf_lt(vf_set1(0), x), grown, vf_exp(x));
}

/* The sum over i of a[i] * b[i], by chains that are computed together. */
static real sum_of_products(const real *a, const real *b, int64_t n) {
    enum { TOGETHER = 8, TERMS = TOGETHER * CATTN_CHAIN_TERMS };
    real sum = 0;
    int64_t first = 0;
    for (; first + TERMS <= n; first += TERMS) {
        real chain[TOGETHER] = {0};
        for (int i = 0; i < CATTN_CHAIN_TERMS; i++)
            UNROLLED(c, TOGETHER) {
                const int64_t k = first + c * CATTN_CHAIN_TERMS + i;
                chain[c] = REAL_FMA(a[k], b[k], chain[c]);
            }
        for (int c = 0; c < TOGETHER; c++)
            sum += chain[c];
    }
    for (; first < n; first += CATTN_CHAIN_TERMS) {
        real chain = 0;
        for (int64_t k = first; k < min64(first + CATTN_CHAIN_TERMS, n); k++)
            chain = REAL_FMA(a[k], b[k], chain);
        sum += chain;
    }
    return sum;
}

/* The sum of n numbers, by the same chains. */
static real sum_of_numbers(const real *x, int64_t n) {
    real sum = 0;
    for (int64_t first = 0; first < n; first += CATTN_CHAIN_TERMS) {
        real chain = 0;
        for (int64_t k = first; k < min64(first + CATTN_CHAIN_TERMS, n); k++)
            chain += x[k];
        sum += chain;
    }
    return sum;
}

INLINE real one_nan(real x) { return isnan(x) ? CANONICAL_NAN : x; }

/* ---- the tokens of a block, in scratch ---- */

/* Rows of d_k numbers. Row 0 of keys and factors belongs to the token before the block, whose update is pending. */
struct token_block {
    real *key, *factor;          /* [1 + CATTN_STATE_TOKENS]; factors only of a decay by rows */
    real *read_key, *read_query; /* [tokens], [query][tokens]: times the decay, which saves decaying the state first */
    real *query;
    real number[1 + CATTN_STATE_TOKENS]; /* the factor of the state, 1 with a decay by rows */
    real *dot;                           /* [query][tokens]: the products of query and key */
};

static struct token_block token_block(const struct cattn_state_columns *s) {
    const int64_t rows = CATTN_STATE_TOKENS * s->d_k;
    struct token_block b;
    b.key = s->tokens;
    b.query = b.key + rows + s->d_k;
    b.dot = b.query + rows * s->n_queries;
    b.factor = b.read_key = b.key;
    b.read_query = b.query;
    if (s->decay_by_row) {
        b.factor = b.dot + CATTN_STATE_TOKENS * s->n_queries;
        b.read_key = b.factor + rows + s->d_k;
        b.read_query = b.read_key + rows;
    } else {
        b.read_key = b.key + s->d_k;
    }
    b.number[0] = 1;
    return b;
}

/* A state of more rows is long: a pass over it takes as long as a poll may wait for. */
#define LONG_STATE 16384

/* The tokens of a block, fewer of a long state. Their number shows in no bit. */
INLINE int64_t tokens_together(int64_t d_k) {
    const int64_t n = CATTN_STATE_TOKENS * (int64_t)LONG_STATE / (d_k > LONG_STATE ? d_k : LONG_STATE);
    return n > 0 ? n : 1;
}

INLINE const void *token_of(const struct cattn_state_columns *s, const struct cattn_strided *tensor, int64_t head,
                            int64_t token) {
    return stored_at(s->storage, tensor->data, head * tensor->head + token * tensor->row);
}

/* The same of a result. */
INLINE void *result_of(const struct cattn_state_columns *s, const struct cattn_strided *tensor, int64_t head,
                       int64_t token) {
    return (char *)tensor->data + (head * tensor->head + token * tensor->row) * (int64_t)stored_size(s->storage);
}

/* The factors of n tokens from `token` on. */
static void read_factors(const struct cattn_state_columns *s, struct token_block *b, int64_t token, int n) {
    const real *decay = s->decay.data;
    for (int t = 0; t < n && (s->decay_by_row || !decay); t++)
        b->number[1 + t] = 1;
    if (!decay)
        return;
    decay += token * s->decay.row;
    if (!s->decay_by_row) {
        real padded[CATTN_STATE_TOKENS + LANES];
        for (int t = 0; t < n; t += LANES)
            vf_storeu(padded + t,
                      factor_of(load_strided(decay + t * s->decay.row, s->decay.row, (int)min64(LANES, n - t))));
        memcpy(b->number + 1, padded, (size_t)n * sizeof(real));
        return;
    }
    for (int t = 0; t < n; t++)
        for (int64_t i = 0; i < s->d_k; i += LANES) {
            const int lanes = (int)min64(LANES, s->d_k - i);
            const vf x = load_strided(decay + t * s->decay.row + i * s->decay.col, s->decay.col, lanes);
            vf_storeu_n(b->factor + (1 + t) * s->d_k + i, factor_of(x), lanes);
        }
}

INLINE void multiply_row(const real *a, const real *b, int64_t n, real *to) {
    for (int64_t i = 0; i < n; i++)
        to[i] = a[i] * b[i];
}

/* Copies n tokens from `token` on to the rows from 1 on. */
static void read_rows(const struct cattn_state_columns *s, struct token_block *b, int64_t token, int n) {
    const int64_t d_k = s->d_k;
    read_factors(s, b, token, n);
    for (int t = 0; t < n; t++) {
        widen_row(s->storage, token_of(s, &s->key, 0, token + t), s->key.col, d_k, b->key + (1 + t) * d_k);
        for (int64_t h = 0; h < s->n_queries; h++)
            widen_row(s->storage, token_of(s, &s->query, h, token + t), s->query.col, d_k,
                      b->query + (h * CATTN_STATE_TOKENS + t) * d_k);
    }
}

/* The same after a block of `before` tokens, whose last one becomes row 0, with what a forward pass reads besides. */
static void read_tokens(const struct cattn_state_columns *s, struct token_block *b, int before, int64_t token, int n) {
    const int64_t d_k = s->d_k;
    if (before > 0)
        memcpy(b->key, b->key + before * d_k, (size_t)d_k * sizeof(real));
    if (before > 0 && s->decay_by_row)
        memcpy(b->factor, b->factor + before * d_k, (size_t)d_k * sizeof(real));
    b->number[0] = b->number[before];
    read_rows(s, b, token, n);
    for (int t = 0; t < n; t++) {
        const real *key = b->key + (1 + t) * d_k, *factor = b->factor + (1 + t) * d_k;
        if (s->decay_by_row)
            multiply_row(factor, key, d_k, b->read_key + t * d_k);
        for (int64_t h = 0; h < s->n_queries; h++) {
            const int64_t row = h * CATTN_STATE_TOKENS + t;
            const real *query = b->query + row * d_k;
            b->dot[row] = sum_of_products(query, key, d_k);
            if (s->decay_by_row)
                multiply_row(factor, query, d_k, b->read_query + row * d_k);
        }
    }
}

/* ---- a strip of w vectors of columns ---- */

/* A strip: where its rows are, in the caller's state before the first update, then in scratch. */
struct strip {
    const real *from;
    int64_t row; /* elements from one row to the next */
    real *scratch;
};

/* What a pass over the state reads of two tokens. */
struct pass {
    const real *last_key, *last_factor; /* the pending update */
    real last_number;
    const real *key, *query; /* by which the new state is read */
};

/* Applies the pending update unless this is the `first` pass, and sums the state over its rows: by the key, if
 * `retrieves`, and by the query. */
INLINE void run_pass(struct strip *strip, const struct pass *pass, int64_t d_k, int w, bool first, bool by_row,
                     bool retrieves, const vf *update, vf *retrieved, vf *read) {
    const vf number = vf_set1(pass->last_number);
    UNROLLED(j, w)
        retrieved[j] = read[j] = vf_set1(0);
    for (int64_t begin = 0; begin < d_k; begin += CATTN_CHAIN_TERMS) {
        const int64_t end = min64(begin + CATTN_CHAIN_TERMS, d_k);
        vf by_key[STRIP], by_query[STRIP];
        UNROLLED(j, w)
            by_key[j] = by_query[j] = vf_set1(0);
        for (int64_t i = begin; i < end; i++) {
            const vf k = vf_set1(pass->key[i]), q = vf_set1(pass->query[i]);
            const vf pending = vf_set1(first ? 0 : pass->last_key[i]);
            const vf decay = by_row && !first ? vf_set1(pass->last_factor[i]) : number;
            const real *from = strip->from + i * strip->row;
            real *to = strip->scratch + i * w * LANES;
            UNROLLED(j, w) {
                vf x = vf_loadu(from + j * LANES);
                if (!first) {
                    x = vf_fma(pending, update[j], x * decay);
                    vf_storeu(to + j * LANES, x);
                }
                if (retrieves)
                    by_key[j] = vf_fma(x, k, by_key[j]);
                by_query[j] = vf_fma(x, q, by_query[j]);
            }
        }
        UNROLLED(j, w) {
            retrieved[j] = retrieved[j] + by_key[j];
            read[j] = read[j] + by_query[j];
        }
    }
    if (!first) {
        strip->from = strip->scratch;
        strip->row = w * LANES;
    }
}

/* Asks for n elements of a token's row, which begin at `first`. */
INLINE void prefetch_row(const struct cattn_state_columns *s, const struct cattn_strided *rows, int64_t token,
                         int64_t first, int64_t n) {
    const size_t size = stored_size(s->storage);
    for (int64_t i = 0; i < n && rows->col == 1; i += LINE_BYTES / (int64_t)size)
        prefetch_far((uintptr_t)rows->data, token * rows->row + first + i, size);
}

/* Asks for what the next block reads and writes where this one has `token`. If heads lie side by side, each row is on a
 * page of its own, which no processor foresees. */
INLINE void prefetch_next(const struct cattn_state_columns *s, int64_t token, int64_t column, int n_columns) {
    const int64_t next = token + CATTN_STATE_TOKENS;
    if (next >= s->n_tokens)
        return;
    prefetch_row(s, &s->key, next, 0, s->d_k);
    for (int64_t h = 0; h < s->n_queries; h++)
        prefetch_row(s, &s->query, next, h * s->query.head, s->d_k);
    prefetch_row(s, &s->value, next, column, n_columns);
    prefetch_row(s, &s->out, next, column, n_columns);
}

/* Functions of their own, so that all sums stay in registers. */
typedef void pass_function(struct strip *strip, const struct pass *pass, int64_t d_k, bool first, const vf *update,
                           vf *retrieved, vf *read);
#define PASS(name, w, by_row, retrieves)                                                                               \
    NOINLINE void name(struct strip *strip, const struct pass *pass, int64_t d_k, bool first, const vf *update,        \
                       vf *retrieved, vf *read) {                                                                      \
        if (first)                                                                                                     \
            run_pass(strip, pass, d_k, w, true, by_row, retrieves, update, retrieved, read);                           \
        else                                                                                                           \
            run_pass(strip, pass, d_k, w, false, by_row, retrieves, update, retrieved, read);                          \
    }
PASS(pass_linear, STRIP, false, false)
PASS(pass_delta, STRIP, false, true)
PASS(pass_by_row, STRIP, true, false)
PASS(pass_delta_by_row, STRIP, true, true)
PASS(narrow_linear, 1, false, false)
PASS(narrow_delta, 1, false, true)
PASS(narrow_by_row, 1, true, false)
PASS(narrow_delta_by_row, 1, true, true)

/* The sums by another query of the same state. */
INLINE void read_again(const struct strip *strip, int64_t d_k, int w, const real *query, vf *read) {
    UNROLLED(j, w)
        read[j] = vf_set1(0);
    for (int64_t begin = 0; begin < d_k; begin += CATTN_CHAIN_TERMS) {
        const int64_t end = min64(begin + CATTN_CHAIN_TERMS, d_k);
        vf chain[STRIP];
        UNROLLED(j, w)
            chain[j] = vf_set1(0);
        for (int64_t i = begin; i < end; i++)
            UNROLLED(j, w)
                chain[j] = vf_fma(vf_loadu(strip->from + i * strip->row + j * LANES), vf_set1(query[i]), chain[j]);
        UNROLLED(j, w)
            read[j] = read[j] + chain[j];
    }
}

/* Columns of the strip from its vector j on, at most LANES; 0 or less: none. */
INLINE int columns_from(int n_columns, int j) { return n_columns - j * LANES < LANES ? n_columns - j * LANES : LANES; }

/* The tokens of a block. */
INLINE void run_block(const struct cattn_state_columns *s, const struct token_block *b, struct strip *strip,
                      int64_t token, int n, int64_t column, int n_columns, int w, pass_function *run, vf *update) {
    const int64_t d_k = s->d_k;
    const bool retrieves = s->beta.data != NULL;
    const vf scale = vf_set1((real)s->scale);
    for (int t = 0; t < n; t++) {
        vf retrieved[STRIP], read[STRIP];
        const vf number = vf_set1(b->number[1 + t]);
        const struct pass pass = {b->key + t * d_k, b->factor + t * d_k, b->number[t], b->read_key + t * d_k,
                                  b->read_query + t * d_k};
        run(strip, &pass, d_k, token + t == 0, update, retrieved, read);
        prefetch_next(s, token + t, column, n_columns);
        const real beta = retrieves ? ((const real *)s->beta.data)[(token + t) * s->beta.row] : 1;
        UNROLLED(j, w) {
            const int lanes = columns_from(n_columns, j);
            update[j] = lanes > 0 ? load_stored(s->storage, token_of(s, &s->value, 0, token + t),
                                                (column + j * LANES) * s->value.col, s->value.col, lanes)
                                  : vf_set1(0);
            if (retrieves)
                update[j] = vf_set1(beta) * (update[j] - number * retrieved[j]);
        }
        for (int64_t h = 0; h < s->n_queries; h++) {
            const int64_t row = h * CATTN_STATE_TOKENS + t;
            void *out = result_of(s, &s->out, h, token + t);
            if (h > 0)
                read_again(strip, d_k, w, b->read_query + row * d_k, read);
            UNROLLED(j, w) {
                const int lanes = columns_from(n_columns, j);
                if (lanes > 0)
                    store_stored(s->storage, out, (column + j * LANES) * s->out.col, s->out.col,
                                 scale * vf_fma(vf_set1(b->dot[row]), update[j], number * read[j]), lanes);
            }
        }
    }
}

/* The state before the first token: in place if whole vectors can be read there. */
INLINE struct strip begin_strip(const struct cattn_state_columns *s, int64_t column, int n_columns, int w) {
    const real *state = s->state.data;
    if (state && s->state.col == 1 && n_columns == w * LANES)
        return (struct strip){state + column, s->state.row, s->strip};
    for (int64_t i = 0; i < s->d_k; i++)
        UNROLLED(j, w) {
            const int lanes = columns_from(n_columns, j);
            const int64_t at = i * s->state.row + (column + j * LANES) * s->state.col;
            vf_storeu((real *)s->strip + (i * w + j) * LANES,
                      state && lanes > 0 ? load_strided(state + at, s->state.col, lanes) : vf_set1(0));
        }
    return (struct strip){s->strip, w * LANES, s->strip};
}

/* The row i of the state after the pending update by token t of the block, counted from 1. */
INLINE void updated_row(const struct strip *strip, const struct token_block *b, int64_t d_k, int64_t i, int t, int w,
                        bool by_row, const vf *update, vf *row) {
    const vf decay = vf_set1(by_row ? b->factor[t * d_k + i] : b->number[t]), key = vf_set1(b->key[t * d_k + i]);
    UNROLLED(j, w) {
        row[j] = vf_loadu(strip->from + i * strip->row + j * LANES);
        if (t > 0)
            row[j] = vf_fma(key, update[j], row[j] * decay);
    }
}

/* The rows of whole vectors. */
INLINE void store_rows(const struct strip *strip, const struct token_block *b, int64_t d_k, int t, int w, bool by_row,
                       const vf *update, real *to, int64_t row) {
    vf x[STRIP];
    for (int64_t i = 0; i < d_k; i++) {
        updated_row(strip, b, d_k, i, t, w, by_row, update, x);
        UNROLLED(j, w)
            vf_storeu(to + i * row + j * LANES, with_one_nan(x[j]));
    }
}

NOINLINE void store_whole_rows(const struct strip *strip, const struct token_block *b, int64_t d_k, int t, bool by_row,
                               const vf *update, real *to, int64_t row) {
    if (by_row)
        store_rows(strip, b, d_k, t, STRIP, true, update, to, row);
    else
        store_rows(strip, b, d_k, t, STRIP, false, update, to, row);
}

/* Writes the state. */
INLINE void store_state(const struct cattn_state_columns *s, const struct token_block *b, const struct strip *strip,
                        int t, int64_t column, int n_columns, int w, const vf *update) {
    const struct cattn_strided *to = &s->state_out;
    vf x[STRIP];
    if (to->col == 1 && n_columns == STRIP * LANES) {
        store_whole_rows(strip, b, s->d_k, t, s->decay_by_row, update, (real *)to->data + column, to->row);
        return;
    }
    for (int64_t i = 0; i < s->d_k; i++) {
        updated_row(strip, b, s->d_k, i, t, w, s->decay_by_row, update, x);
        UNROLLED(j, w) {
            const int lanes = columns_from(n_columns, j);
            if (lanes > 0)
                store_stored(CATTN_STORED_PLAIN, to->data, i * to->row + (column + j * LANES) * to->col, to->col, x[j],
                             lanes);
        }
    }
}

INLINE void run_strip(const struct cattn_state_columns *s, int64_t column, int n_columns, int w, pass_function *run) {
    struct token_block b = token_block(s);
    struct strip strip = begin_strip(s, column, n_columns, w);
    vf update[STRIP];
    int before = 0;
    UNROLLED(j, w)
        update[j] = vf_set1(0);
    const int64_t together = tokens_together(s->d_k);
    for (int64_t token = 0; token < s->n_tokens && !stops(&s->stop); token += together) {
        const int n = (int)min64(together, s->n_tokens - token);
        read_tokens(s, &b, before, token, n);
        run_block(s, &b, &strip, token, n, column, n_columns, w, run, update);
        before = n;
    }
    if (s->state_out.data)
        store_state(s, &b, &strip, before, column, n_columns, w, update);
}

static void state_columns(const struct cattn_state_columns *s) {
    static pass_function *const runs[2][2] = {{pass_linear, pass_delta}, {pass_by_row, pass_delta_by_row}};
    static pass_function *const narrow[2][2] = {{narrow_linear, narrow_delta}, {narrow_by_row, narrow_delta_by_row}};
    const bool retrieves = s->beta.data != NULL;
    for (int64_t c = 0; c < s->n_columns && !stops(&s->stop); c += STRIP * LANES) {
        const int n_columns = (int)min64(STRIP * LANES, s->n_columns - c);
        if (n_columns > LANES)
            run_strip(s, c, n_columns, STRIP, runs[s->decay_by_row][retrieves]);
        else
            run_strip(s, c, n_columns, 1, narrow[s->decay_by_row][retrieves]);
    }
}

/* ---- the short convolution before it ---- */

/* Channels whose sums stay in the nearest cache. */
#define CONV_PART 256

static void conv_row(const struct cattn_conv_row *row) {
    for (int64_t first = 0; first < row->n; first += CONV_PART) {
        const int64_t n = min64(CONV_PART, row->n - first);
        real sums[CONV_PART];
        for (int64_t c = 0; c < n; c += LANES) {
            const int lanes = (int)min64(LANES, n - c);
            vf sum = vf_set1(0);
            for (int64_t j = 0; j < row->width; j++)
                if (row->rows[j])
                    sum =
                        vf_fma(load_stored(row->storage, row->rows[j], (first + c) * row->cols[j], row->cols[j], lanes),
                               load_strided((const real *)row->weight + j * row->n + first + c, 1, lanes), sum);
            if (row->bias)
                sum = sum + load_strided((const real *)row->bias + (first + c) * row->bias_col, row->bias_col, lanes);
            store_strided(sums + c, 1, sum, lanes);
        }
        if (row->silu) {
            const struct cattn_activation_row run = {.which = CATTN_SILU, .n = n, .x = sums, .out = sums};
            activation_row(&run);
        }
        narrow_row(row->storage, sums, n, (char *)row->out + first * row->out_col * (int64_t)stored_size(row->storage),
                   row->out_col);
    }
}
