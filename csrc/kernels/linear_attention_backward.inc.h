/* linear_attention_backward.inc.h -- the gradients of linear attention, columns or rows of the state in the lanes.
 * docs/bit_contract.md ("Linear attention") has the order.
 */

/* With G the gradient of the state, from the last token to the first:
 *
 *     G += scale * q grad_out';  grad_u = G' k;  grad_v = beta grad_u;  grad_retrieved = -grad_v
 *     G += k grad_retrieved';  G = exp(decay) G
 *
 * These sums run over rows, so columns are independent: `gradient_columns` computes them and, before, v - retrieved by
 * a forward pass. The other gradients are sums over columns, with rows in the lanes, of the transposed matrices:
 *
 *     grad_q = scale * S grad_out;  grad_k = G u + S~ grad_retrieved;  grad_decay = the sum of G * S~ after G += ...
 *
 * with S~ the decayed state before the update. `gradient_rows` computes them from a forward pass, which keeps the state
 * before each block of tokens, and then from the last block to the first, with the states of a block again, a chain of
 * columns at a time.
 */

/* Vectors of rows that are computed together. */
#define ROW_STRIP 2
_Static_assert(ROW_STRIP *LANES <= CATTN_STRIP_ROWS, "the scratch holds them");

INLINE const void *grad_out_of(const struct cattn_state_gradient *g, int64_t head, int64_t token) {
    return stored_at(g->forward.storage, g->grad_out.data, head * g->grad_out.head + token * g->grad_out.row);
}

INLINE real *real_row(const struct cattn_strided *tensor, int64_t head, int64_t token) {
    return (real *)tensor->data + head * tensor->head + token * tensor->row;
}

INLINE real beta_of(const struct cattn_state_columns *s, int64_t token) {
    return s->beta.data ? ((const real *)s->beta.data)[token * s->beta.row] : 1;
}

static void scale_queries(const struct cattn_state_columns *s, struct token_block *b) {
    const int64_t n = s->n_queries * CATTN_STATE_TOKENS * s->d_k;
    for (int64_t i = 0; i < n; i++)
        b->query[i] *= (real)s->scale;
}

/* v - retrieved, or v without beta, of a strip of columns. */
INLINE void find_residuals(const struct cattn_state_gradient *g, int64_t column, int n_columns, int w,
                           pass_function *run) {
    struct cattn_state_columns forward = g->forward;
    const struct cattn_state_columns *s = &forward;
    forward.n_queries = 0; /* only the keys' sums are needed here */
    struct token_block b = token_block(s);
    struct strip strip = begin_strip(s, column, n_columns, w);
    vf update[STRIP], retrieved[STRIP], read[STRIP];
    int before = 0;
    UNROLLED(j, w)
        update[j] = retrieved[j] = vf_set1(0);
    const int64_t together = tokens_together(s->d_k);
    for (int64_t token = 0; token < s->n_tokens && !stops(&s->stop); token += together) {
        const int n = (int)min64(together, s->n_tokens - token);
        if (run)
            read_tokens(s, &b, before, token, n);
        before = n;
        for (int t = 0; t < n; t++) {
            const struct pass pass = {b.key + t * s->d_k, b.factor + t * s->d_k, b.number[t], b.read_key + t * s->d_k,
                                      b.read_key + t * s->d_k};
            if (run)
                run(&strip, &pass, s->d_k, token + t == 0, update, retrieved, read);
            UNROLLED(j, w) {
                const int lanes = columns_from(n_columns, j);
                vf v = vf_set1(0);
                if (lanes > 0)
                    v = load_stored(s->storage, token_of(s, &s->value, 0, token + t),
                                    (column + j * LANES) * s->value.col, s->value.col, lanes);
                if (run)
                    v = v - vf_set1(b.number[1 + t]) * retrieved[j];
                update[j] = vf_set1(beta_of(s, token + t)) * v;
                if (lanes > 0)
                    vf_storeu_n(real_row(&g->residual, 0, token + t) + column + j * LANES, v, lanes);
            }
        }
    }
}

/* What one backward step reads of its token, and of the next token, whose update has not been applied yet. */
struct step_back {
    const real *query, *key, *last_key, *last_factor;
    real last_number;
    const vf *grad_retrieved, *grad_out; /* of the token after it; of this query */
};

/* Applies what is pending, adds the gradient from one query, and sums over the rows by the key. */
INLINE void run_step_back(real *state, const struct step_back *step, int64_t d_k, int w, bool pending, bool retrieves,
                          bool by_row, vf *grad_update) {
    const vf number = vf_set1(step->last_number);
    vf grad_retrieved[STRIP], grad_out[STRIP], sum[STRIP];
    UNROLLED(j, w) {
        grad_retrieved[j] = step->grad_retrieved[j];
        grad_out[j] = step->grad_out[j];
        sum[j] = vf_set1(0);
    }
    for (int64_t begin = 0; begin < d_k; begin += CATTN_CHAIN_TERMS) {
        const int64_t end = min64(begin + CATTN_CHAIN_TERMS, d_k);
        vf chain[STRIP];
        UNROLLED(j, w)
            chain[j] = vf_set1(0);
        for (int64_t i = begin; i < end; i++) {
            const vf key = vf_set1(step->key[i]), query = vf_set1(step->query[i]);
            const vf last = vf_set1(pending && retrieves ? step->last_key[i] : 0);
            const vf decay = pending && by_row ? vf_set1(step->last_factor[i]) : number;
            real *row = state + i * w * LANES;
            UNROLLED(j, w) {
                vf x = vf_loadu(row + j * LANES);
                if (pending && retrieves)
                    x = vf_fma(last, grad_retrieved[j], x);
                if (pending)
                    x = x * decay;
                x = vf_fma(query, grad_out[j], x);
                vf_storeu(row + j * LANES, x);
                chain[j] = vf_fma(x, key, chain[j]);
            }
        }
        UNROLLED(j, w)
            sum[j] = sum[j] + chain[j];
    }
    UNROLLED(j, w)
        grad_update[j] = sum[j];
}

typedef void step_back_function(real *state, const struct step_back *step, int64_t d_k, bool pending, vf *grad_update);
#define STEP_BACK(name, w, retrieves, by_row)                                                                          \
    NOINLINE void name(real *state, const struct step_back *step, int64_t d_k, bool pending, vf *grad_update) {        \
        if (pending)                                                                                                   \
            run_step_back(state, step, d_k, w, true, retrieves, by_row, grad_update);                                  \
        else                                                                                                           \
            run_step_back(state, step, d_k, w, false, retrieves, by_row, grad_update);                                 \
    }
STEP_BACK(back_linear, STRIP, false, false)
STEP_BACK(back_delta, STRIP, true, false)
STEP_BACK(back_by_row, STRIP, false, true)
STEP_BACK(back_delta_by_row, STRIP, true, true)
STEP_BACK(narrow_back_linear, 1, false, false)
STEP_BACK(narrow_back_delta, 1, true, false)
STEP_BACK(narrow_back_by_row, 1, false, true)
STEP_BACK(narrow_back_delta_by_row, 1, true, true)

/* What is pending of the first token of a block. */
INLINE void settle_back(real *state, const struct cattn_state_columns *s, const struct token_block *b, int w,
                        const vf *grad_retrieved) {
    const int64_t d_k = s->d_k;
    for (int64_t i = 0; i < d_k; i++) {
        const vf decay = vf_set1(s->decay_by_row ? b->factor[d_k + i] : b->number[1]);
        UNROLLED(j, w) {
            vf x = vf_loadu(state + (i * w + j) * LANES);
            if (s->beta.data)
                x = vf_fma(vf_set1(b->key[d_k + i]), grad_retrieved[j], x);
            vf_storeu(state + (i * w + j) * LANES, x * decay);
        }
    }
}

INLINE void load_strip(const struct cattn_strided *from, real *strip, int64_t n_rows, int64_t column, int n_columns,
                       int w) {
    const real *first = from->data;
    for (int64_t i = 0; i < n_rows; i++)
        UNROLLED(j, w) {
            const int lanes = columns_from(n_columns, j);
            vf v = vf_set1(0);
            if (first && lanes > 0)
                v = load_strided(first + i * from->row + (column + j * LANES) * from->col, from->col, lanes);
            vf_storeu(strip + (i * w + j) * LANES, v);
        }
}

INLINE void store_strip(const real *strip, const struct cattn_strided *to, int64_t n_rows, int64_t column,
                        int n_columns, int w) {
    for (int64_t i = 0; i < n_rows; i++)
        UNROLLED(j, w) {
            const int lanes = columns_from(n_columns, j);
            if (lanes > 0)
                store_stored(CATTN_STORED_PLAIN, to->data, i * to->row + (column + j * LANES) * to->col, to->col,
                             vf_loadu(strip + (i * w + j) * LANES), lanes);
        }
}

INLINE void run_columns_back(const struct cattn_state_gradient *g, int64_t column, int n_columns, int w,
                             step_back_function *step) {
    const struct cattn_state_columns *s = &g->forward;
    struct token_block b = token_block(s);
    real *const state = s->strip;
    vf grad_retrieved[STRIP], grad_out[STRIP], grad_update[STRIP];
    UNROLLED(j, w)
        grad_retrieved[j] = vf_set1(0);
    load_strip(&g->grad_final, state, s->d_k, column, n_columns, w);
    const int64_t together = tokens_together(s->d_k), last = (s->n_tokens - 1) / together * together;
    for (int64_t token = last; s->n_tokens > 0 && token >= 0 && !stops(&s->stop); token -= together) {
        const int n = (int)min64(together, s->n_tokens - token);
        read_rows(s, &b, token, n);
        scale_queries(s, &b);
        for (int t = n - 1; t >= 0; t--) {
            for (int64_t h = 0; h < s->n_queries; h++) {
                const struct step_back args = {b.query + (h * CATTN_STATE_TOKENS + t) * s->d_k,
                                               b.key + (1 + t) * s->d_k,
                                               b.key + (2 + t) * s->d_k,
                                               b.factor + (2 + t) * s->d_k,
                                               t < n - 1 ? b.number[2 + t] : 1,
                                               grad_retrieved,
                                               grad_out};
                UNROLLED(j, w) {
                    const int lanes = columns_from(n_columns, j);
                    grad_out[j] = vf_set1(0);
                    if (lanes > 0)
                        grad_out[j] = load_stored(s->storage, grad_out_of(g, h, token + t),
                                                  (column + j * LANES) * g->grad_out.col, g->grad_out.col, lanes);
                }
                step(state, &args, s->d_k, t < n - 1 && h == 0, grad_update); /* the last query has the sums */
            }
            UNROLLED(j, w) {
                const int lanes = columns_from(n_columns, j);
                grad_retrieved[j] = vf_set1(0) - vf_set1(beta_of(s, token + t)) * grad_update[j];
                if (lanes > 0)
                    vf_storeu_n(real_row(&g->grad_value, 0, token + t) + column + j * LANES, grad_update[j], lanes);
            }
        }
        settle_back(state, s, &b, w, grad_retrieved);
    }
    if (g->grad_state.data)
        store_strip(state, &g->grad_state, s->d_k, column, n_columns, w);
}

static void gradient_columns(const struct cattn_state_gradient *g) {
    static pass_function *const passes[2][2] = {{narrow_delta, narrow_delta_by_row}, {pass_delta, pass_delta_by_row}};
    static step_back_function *const steps[2][2] = {{back_linear, back_delta}, {back_by_row, back_delta_by_row}};
    static step_back_function *const narrow[2][2] = {{narrow_back_linear, narrow_back_delta},
                                                     {narrow_back_by_row, narrow_back_delta_by_row}};
    const struct cattn_state_columns *s = &g->forward;
    const bool retrieves = s->beta.data != NULL;
    for (int64_t c = g->begin; c < g->end && !stops(&s->stop); c += STRIP * LANES) {
        const int n_columns = (int)min64(STRIP * LANES, g->end - c);
        pass_function *pass = retrieves ? passes[n_columns > LANES][s->decay_by_row] : NULL;
        if (n_columns > LANES) {
            find_residuals(g, c, n_columns, STRIP, pass);
            run_columns_back(g, c, n_columns, STRIP, steps[s->decay_by_row][retrieves]);
        } else {
            find_residuals(g, c, n_columns, 1, pass);
            run_columns_back(g, c, n_columns, 1, narrow[s->decay_by_row][retrieves]);
        }
    }
}

/* ---- rows in the lanes ---- */

/* The rows of a block of tokens that are read by columns, in scratch: [token][d_v], grad_out [query][token][d_v]. */
struct column_block {
    real *update, *grad_retrieved, *grad_out;
};

static struct column_block column_block(const struct cattn_state_gradient *g) {
    const int64_t rows = CATTN_STATE_TOKENS * g->d_v;
    real *const numbers = g->columns;
    return (struct column_block){numbers, numbers + rows, numbers + 2 * rows};
}

static void read_columns(const struct cattn_state_gradient *g, const struct column_block *c, int64_t token, int n) {
    const struct cattn_state_columns *s = &g->forward;
    for (int t = 0; t < n; t++) {
        const real beta = beta_of(s, token + t);
        const real *residual = real_row(&g->residual, 0, token + t);
        const real *grad_update = real_row(&g->grad_value, 0, token + t);
        for (int64_t j = 0; j < g->d_v; j++) {
            c->update[t * g->d_v + j] = beta * residual[j];
            c->grad_retrieved[t * g->d_v + j] = 0 - beta * grad_update[j];
        }
        for (int64_t h = 0; h < s->n_queries; h++)
            widen_row(s->storage, grad_out_of(g, h, token + t), g->grad_out.col, g->d_v,
                      c->grad_out + (h * CATTN_STATE_TOKENS + t) * g->d_v);
    }
}

/* Loads one vector of a row of length d_k, with zeros after its end; `n` rows are left. */
INLINE void load_lanes(const real *row, int64_t n, vf *v) {
    UNROLLED(j, ROW_STRIP) {
        const int64_t left = n - j * LANES;
        v[j] = left >= LANES ? vf_loadu(row + j * LANES)
               : left > 0    ? vf_loadu_n(row + j * LANES, (int)left)
                             : vf_set1(0);
    }
}

INLINE void store_lanes(const struct cattn_strided *to, int64_t head, int64_t token, int64_t row, int64_t n,
                        const vf *v) {
    real *const at = real_row(to, head, token) + row * to->col;
    UNROLLED(j, ROW_STRIP)
        if (n > j * LANES)
            store_stored(CATTN_STORED_PLAIN, at, j * LANES * to->col, to->col, v[j], (int)min64(LANES, n - j * LANES));
}

/* The factors of token t of a block for the lanes. */
INLINE void load_factors(const struct cattn_state_columns *s, const struct token_block *b, int t, int64_t row,
                         int64_t n, vf *v) {
    if (s->decay_by_row)
        load_lanes(b->factor + (1 + t) * s->d_k + row, n, v);
    else
        UNROLLED(j, ROW_STRIP)
            v[j] = vf_set1(b->number[1 + t]);
}

/* One token forward over the transposed state, with the sums over its columns. */
INLINE void run_step_rows(real *state, int64_t d_v, bool retrieves, const vf *key, const vf *factor, const real *update,
                          const real *grad_retrieved, const real *grad_out, vf *of_retrieved, vf *of_read) {
    UNROLLED(j, ROW_STRIP)
        of_retrieved[j] = of_read[j] = vf_set1(0);
    for (int64_t begin = 0; begin < d_v; begin += CATTN_CHAIN_TERMS) {
        const int64_t end = min64(begin + CATTN_CHAIN_TERMS, d_v);
        vf retrieved[ROW_STRIP], read[ROW_STRIP];
        UNROLLED(j, ROW_STRIP)
            retrieved[j] = read[j] = vf_set1(0);
        for (int64_t c = begin; c < end; c++) {
            const vf u = vf_set1(update[c]), r = vf_set1(retrieves ? grad_retrieved[c] : 0), g = vf_set1(grad_out[c]);
            UNROLLED(j, ROW_STRIP) {
                const int64_t at = (c * ROW_STRIP + j) * LANES;
                vf x = vf_loadu(state + at) * factor[j];
                if (retrieves)
                    retrieved[j] = vf_fma(x, r, retrieved[j]);
                x = vf_fma(key[j], u, x);
                vf_storeu(state + at, x);
                read[j] = vf_fma(x, g, read[j]);
            }
        }
        UNROLLED(j, ROW_STRIP) {
            of_retrieved[j] = of_retrieved[j] + retrieved[j];
            of_read[j] = of_read[j] + read[j];
        }
    }
}

NOINLINE void step_rows(real *state, int64_t d_v, bool retrieves, const vf *key, const vf *factor, const real *update,
                        const real *grad_retrieved, const real *grad_out, vf *of_retrieved, vf *of_read) {
    vf k[ROW_STRIP], f[ROW_STRIP];
    UNROLLED(j, ROW_STRIP) {
        k[j] = key[j];
        f[j] = factor[j];
    }
    if (retrieves)
        run_step_rows(state, d_v, true, k, f, update, grad_retrieved, grad_out, of_retrieved, of_read);
    else
        run_step_rows(state, d_v, false, k, f, update, grad_retrieved, grad_out, of_retrieved, of_read);
}

/* The sums over the columns of the state by another query's gradient. */
NOINLINE void read_rows_again(const real *state, int64_t d_v, const real *grad_out, vf *of_read) {
    UNROLLED(j, ROW_STRIP)
        of_read[j] = vf_set1(0);
    for (int64_t begin = 0; begin < d_v; begin += CATTN_CHAIN_TERMS) {
        vf read[ROW_STRIP];
        UNROLLED(j, ROW_STRIP)
            read[j] = vf_set1(0);
        for (int64_t c = begin; c < min64(begin + CATTN_CHAIN_TERMS, d_v); c++)
            UNROLLED(j, ROW_STRIP)
                read[j] = vf_fma(vf_loadu(state + (c * ROW_STRIP + j) * LANES), vf_set1(grad_out[c]), read[j]);
        UNROLLED(j, ROW_STRIP)
            of_read[j] = of_read[j] + read[j];
    }
}

/* One token of a block, as the steps back over the transposed matrices read it. */
struct row_step {
    vf query[ROW_STRIP], key[ROW_STRIP], factor[ROW_STRIP];
    const real *update, *grad_retrieved, *grad_out;
    vf of_update[ROW_STRIP], of_decay[ROW_STRIP]; /* the sums so far */
};

/* n columns forward from column `first` on; `decayed` receives the state after its decay. */
INLINE void keep_columns(real *state, real *decayed, const struct row_step *step, int64_t first, int n) {
    vf key[ROW_STRIP], factor[ROW_STRIP];
    UNROLLED(j, ROW_STRIP) {
        key[j] = step->key[j];
        factor[j] = step->factor[j];
    }
    for (int c = 0; c < n; c++)
        UNROLLED(j, ROW_STRIP) {
            const int at = (c * ROW_STRIP + j) * LANES;
            const vf x = vf_loadu(state + at) * factor[j];
            vf_storeu(decayed + at, x);
            vf_storeu(state + at, vf_fma(key[j], vf_set1(step->update[first + c]), x));
        }
}

/* Adds the gradient from a query. */
INLINE void add_query(real *gradient, const vf *query, const real *grad_out, int n) {
    for (int c = 0; c < n; c++)
        UNROLLED(j, ROW_STRIP) {
            real *at = gradient + (c * ROW_STRIP + j) * LANES;
            vf_storeu(at, vf_fma(query[j], vf_set1(grad_out[c]), vf_loadu(at)));
        }
}

/* n columns back from column `first` on, a chain: adds the gradient from the last query, and the chain's sums by the
 * update and, if there is `decayed`, of the gradient of the decayed state times that state. Leaves the gradient of the
 * state before the token. */
INLINE void back_columns(real *gradient, const real *decayed, struct row_step *step, int64_t first, int n,
                         bool retrieves, bool decays) {
    vf query[ROW_STRIP], key[ROW_STRIP], factor[ROW_STRIP], by_update[ROW_STRIP], by_state[ROW_STRIP];
    UNROLLED(j, ROW_STRIP) {
        query[j] = step->query[j];
        key[j] = step->key[j];
        factor[j] = step->factor[j];
        by_update[j] = by_state[j] = vf_set1(0);
    }
    for (int c = 0; c < n; c++) {
        const vf g = vf_set1(step->grad_out[first + c]), u = vf_set1(step->update[first + c]);
        const vf r = vf_set1(retrieves ? step->grad_retrieved[first + c] : 0);
        UNROLLED(j, ROW_STRIP) {
            const int at = (c * ROW_STRIP + j) * LANES;
            vf x = vf_fma(query[j], g, vf_loadu(gradient + at));
            by_update[j] = vf_fma(x, u, by_update[j]);
            if (retrieves)
                x = vf_fma(key[j], r, x);
            if (decays) {
                by_state[j] = vf_fma(x, vf_loadu(decayed + at), by_state[j]);
                x = x * factor[j];
            }
            vf_storeu(gradient + at, x);
        }
    }
    UNROLLED(j, ROW_STRIP) {
        step->of_update[j] = step->of_update[j] + by_update[j];
        step->of_decay[j] = step->of_decay[j] + by_state[j];
    }
}

/* A chain of columns over all tokens of a block, whose states stay in the nearest cache. */
INLINE void back_chain(const struct cattn_state_gradient *g, const struct token_block *b, const struct column_block *c,
                       struct row_step *steps, int n, int64_t row, int64_t n_rows, int64_t first, bool retrieves,
                       bool decays) {
    const struct cattn_state_columns *s = &g->forward;
    const int n_columns = (int)min64(CATTN_CHAIN_TERMS, g->d_v - first);
    const int64_t at = first * ROW_STRIP * LANES, size = (int64_t)CATTN_CHAIN_TERMS * ROW_STRIP * LANES;
    real *const gradient = (real *)g->grad_strip + at, *const history = g->history;
    for (int t = 0; t < n && decays; t++)
        keep_columns((real *)s->strip + at, history + t * size, &steps[t], first, n_columns);
    for (int t = n - 1; t >= 0; t--) {
        for (int64_t h = 0; h < s->n_queries - 1; h++) {
            const int64_t token = h * CATTN_STATE_TOKENS + t;
            vf query[ROW_STRIP];
            load_lanes(b->query + token * s->d_k + row, n_rows, query);
            add_query(gradient, query, c->grad_out + token * g->d_v + first, n_columns);
        }
        back_columns(gradient, decays ? history + t * size : NULL, &steps[t], first, n_columns, retrieves, decays);
    }
}

#define BACK_CHAIN(name, retrieves, decays)                                                                            \
    NOINLINE void name(const struct cattn_state_gradient *g, const struct token_block *b,                              \
                       const struct column_block *c, struct row_step *steps, int n, int64_t row, int64_t n_rows,       \
                       int64_t first) {                                                                                \
        back_chain(g, b, c, steps, n, row, n_rows, first, retrieves, decays);                                          \
    }
BACK_CHAIN(chain_linear, false, false)
BACK_CHAIN(chain_delta, true, false)
BACK_CHAIN(chain_gated, false, true)
BACK_CHAIN(chain_gated_delta, true, true)

/* The transposed strip of a state, rows row .. row + n - 1. */
static void transpose_strip(const struct cattn_strided *from, int64_t row, int64_t n, int64_t d_v, real *strip) {
    for (int64_t c = 0; c < d_v; c++)
        UNROLLED(j, ROW_STRIP) {
            const int64_t left = n - j * LANES;
            vf v = vf_set1(0);
            if (from->data && left > 0)
                v = load_strided((const real *)from->data + (row + j * LANES) * from->row + c * from->col, from->row,
                                 (int)min64(LANES, left));
            vf_storeu(strip + (c * ROW_STRIP + j) * LANES, v);
        }
}

/* The tokens of a block forward: the gradients of queries and, as far as they come from retrieving, of keys. */
static void rows_forward(const struct cattn_state_gradient *g, const struct token_block *b,
                         const struct column_block *c, int64_t token, int n, int64_t row, int64_t n_rows) {
    const struct cattn_state_columns *s = &g->forward;
    const int64_t d_v = g->d_v;
    const vf scale = vf_set1((real)s->scale);
    for (int t = 0; t < n && !(d_v > LONG_STATE && stops(&s->stop)); t++) {
        vf key[ROW_STRIP], factor[ROW_STRIP], retrieved[ROW_STRIP], read[ROW_STRIP];
        load_lanes(b->key + (1 + t) * s->d_k + row, n_rows, key);
        load_factors(s, b, t, row, n_rows, factor);
        step_rows(s->strip, d_v, s->beta.data != NULL, key, factor, c->update + t * d_v, c->grad_retrieved + t * d_v,
                  c->grad_out + t * d_v, retrieved, read);
        store_lanes(&g->grad_key, 0, token + t, row, n_rows, retrieved);
        for (int64_t h = 0; h < s->n_queries; h++) {
            if (h > 0)
                read_rows_again(s->strip, d_v, c->grad_out + (h * CATTN_STATE_TOKENS + t) * d_v, read);
            UNROLLED(j, ROW_STRIP)
                read[j] = read[j] * scale;
            store_lanes(&g->grad_query, h, token + t, row, n_rows, read);
        }
    }
}

/* The same back: the rest of the gradients of keys, and the gradients of the decay of each row. */
static void rows_back(const struct cattn_state_gradient *g, const struct token_block *b, const struct column_block *c,
                      int64_t token, int n, int64_t row, int64_t n_rows) {
    static void (*const chains[2][2])(const struct cattn_state_gradient *, const struct token_block *,
                                      const struct column_block *, struct row_step *, int, int64_t, int64_t,
                                      int64_t) = {{chain_linear, chain_gated}, {chain_delta, chain_gated_delta}};
    const struct cattn_state_columns *s = &g->forward;
    const bool retrieves = s->beta.data != NULL, decays = g->decay_rows.data != NULL;
    struct row_step steps[CATTN_STATE_TOKENS];
    for (int t = 0; t < n; t++) {
        const int64_t last = (s->n_queries - 1) * CATTN_STATE_TOKENS + t;
        load_lanes(b->query + last * s->d_k + row, n_rows, steps[t].query);
        load_lanes(b->key + (1 + t) * s->d_k + row, n_rows, steps[t].key);
        load_factors(s, b, t, row, n_rows, steps[t].factor);
        steps[t].update = c->update + t * g->d_v;
        steps[t].grad_retrieved = c->grad_retrieved + t * g->d_v;
        steps[t].grad_out = c->grad_out + last * g->d_v;
        UNROLLED(j, ROW_STRIP)
            steps[t].of_update[j] = steps[t].of_decay[j] = vf_set1(0);
    }
    for (int64_t first = 0; first < g->d_v && (first % LONG_STATE != 0 || !stops(&s->stop)); first += CATTN_CHAIN_TERMS)
        chains[retrieves][decays](g, b, c, steps, n, row, n_rows, first);
    for (int t = 0; t < n; t++) {
        vf retrieved[ROW_STRIP];
        load_lanes(real_row(&g->grad_key, 0, token + t) + row, n_rows, retrieved);
        UNROLLED(j, ROW_STRIP)
            retrieved[j] = steps[t].of_update[j] + retrieved[j];
        store_lanes(&g->grad_key, 0, token + t, row, n_rows, retrieved);
        if (decays)
            store_lanes(&g->decay_rows, 0, token + t, row, n_rows, steps[t].of_decay);
    }
}

static void gradient_rows(const struct cattn_state_gradient *g) {
    const struct cattn_state_columns *s = &g->forward;
    const int64_t size = g->d_v * ROW_STRIP * LANES;
    const size_t bytes = (size_t)size * sizeof(real);
    struct token_block b = token_block(s);
    const struct column_block c = column_block(g);
    for (int64_t row = g->begin; row < g->end && !stops(&s->stop); row += ROW_STRIP * LANES) {
        const int64_t n_rows = min64(ROW_STRIP * LANES, g->end - row);
        int64_t token = 0;
        transpose_strip(&s->state, row, n_rows, g->d_v, s->strip);
        transpose_strip(&g->grad_final, row, n_rows, g->d_v, g->grad_strip);
        for (; token < s->n_tokens && !stops(&s->stop); token += CATTN_STATE_TOKENS) {
            const int n = (int)min64(CATTN_STATE_TOKENS, s->n_tokens - token);
            if (g->decay_rows.data)
                memcpy((real *)g->checkpoints + token / CATTN_STATE_TOKENS * size, s->strip, bytes);
            read_rows(s, &b, token, n);
            read_columns(g, &c, token, n);
            rows_forward(g, &b, &c, token, n, row, n_rows);
        }
        while (token > 0 && !stops(&s->stop)) {
            token -= CATTN_STATE_TOKENS;
            const int n = (int)min64(CATTN_STATE_TOKENS, s->n_tokens - token);
            read_rows(s, &b, token, n);
            read_columns(g, &c, token, n);
            if (g->decay_rows.data)
                memcpy(s->strip, (const real *)g->checkpoints + token / CATTN_STATE_TOKENS * size, bytes);
            scale_queries(s, &b);
            rows_back(g, &b, &c, token, n, row, n_rows);
        }
    }
}

/* The gradients that are sums over a whole token; grad_value holds the gradient of u until then. */
static void gradient_tokens(const struct cattn_state_gradient *g) {
    const struct cattn_state_columns *s = &g->forward;
    for (int64_t t = 0; t < s->n_tokens && (t % CATTN_STATE_TOKENS != 0 || !stops(&s->stop)); t++) {
        real *grad_value = real_row(&g->grad_value, 0, t);
        const real beta = beta_of(s, t);
        if (g->grad_beta.data)
            *real_row(&g->grad_beta, 0, t) = one_nan(sum_of_products(grad_value, real_row(&g->residual, 0, t), g->d_v));
        for (int64_t j = 0; j < g->d_v; j++)
            grad_value[j] = one_nan(s->beta.data ? beta * grad_value[j] : grad_value[j]);
        if (g->grad_decay.data)
            *real_row(&g->grad_decay, 0, t) = one_nan(sum_of_numbers(real_row(&g->decay_rows, 0, t), s->d_k));
    }
}
