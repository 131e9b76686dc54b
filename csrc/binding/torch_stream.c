/* torch_stream.c -- the type TorchStream: a torch generator, from which one thread at a time fills arrays.
 *
 * cattn.TorchGenerator is its subclass in Python: it reads shapes and dtypes, makes C-contiguous arrays and passes them
 * to the methods. Every draw works on a copy of the generator and puts it back after it has succeeded: a call that
 * raises leaves the generator as it was.
 */
#include "args.h"
#include "fp_mode.h"

#include <math.h>

/* A waiting thread looks again after a pause, which doubles from the first to the longest. */
#define FIRST_PAUSE_NS 20000
#define LONGEST_PAUSE_NS 2000000

struct stream {
    PyObject_HEAD atomic_uint busy; /* 0, or 1 + the number of forks when the present draw began */
    atomic_ulong owner;             /* my_id() of the thread that draws, set after busy and reset before it; or 0 */
    struct cattn_torch_random random;
};

static struct stream *self_of(PyObject *object) { return (struct stream *)(void *)object; }

/* ---- one at a time ---- */

bool cattn_torch_check(const struct binding_state *state, PyObject *rng) {
    return PyObject_TypeCheck(rng, (PyTypeObject *)state->torch_stream);
}

/* Not the system's name of a thread, which a new thread may inherit. */
static unsigned long my_id(void) {
    static atomic_ulong n_threads;
    static _Thread_local unsigned long id;
    if (id == 0)
        id = atomic_fetch_add(&n_threads, 1) + 1;
    return id;
}

static void pause_for(int64_t nanoseconds) {
    PyThreadState *thread = PyEval_SaveThread();
    cattn_sleep_ns(nanoseconds);
    PyEval_RestoreThread(thread);
}

/* A child of a fork lacks the thread that was drawing, and cannot know how far it had come: such a draw never ends, and
 * only a new seed or state (`replaces`) takes its place. */
static bool begin(struct stream *self, struct cattn_torch_random *random, bool replaces) {
    for (int64_t pause = FIRST_PAUSE_NS;; pause = pause < LONGEST_PAUSE_NS ? 2 * pause : pause) {
        const unsigned now = cattn_fork_count() + 1; /* each time: a signal handler may have forked */
        unsigned busy = 0;
        if (atomic_compare_exchange_strong(&self->busy, &busy, now))
            break;
        if (atomic_load(&self->owner) == my_id())
            return cattn_raise(PyExc_RuntimeError,
                               "this TorchGenerator is drawing already; a signal handler must not use it");
        if (busy != now && replaces && atomic_compare_exchange_strong(&self->busy, &busy, now))
            break;
        if (busy != now && busy != 0 && !replaces)
            return cattn_raise(PyExc_RuntimeError, "this process was forked while another thread was drawing from this "
                                                   "TorchGenerator: seed it, or set its state");
        pause_for(pause);
        if (!cattn_check_signals())
            return false;
    }
    atomic_store(&self->owner, my_id());
    *random = self->random;
    return true;
}

/* Where another thread has replaced this draw, it leaves the generator to it. */
static void end(struct stream *self, const struct cattn_torch_random *random) {
    if (atomic_load(&self->owner) != my_id())
        return;
    if (random != NULL)
        self->random = *random;
    atomic_store(&self->owner, 0);
    atomic_store(&self->busy, 0);
}

bool cattn_torch_begin(PyObject *stream, struct cattn_torch_random *random) {
    return begin(self_of(stream), random, false);
}

void cattn_torch_abort(PyObject *stream) { end(self_of(stream), NULL); }

bool cattn_torch_commit(PyObject *stream, const struct cattn_torch_random *random) {
    const bool passed = cattn_check_signals(); /* the last moment: after this the call returns */
    end(self_of(stream), passed ? random : NULL);
    return passed;
}

/* ---- drawing ---- */

/* The array to fill, as cattn.random makes it; sets out, n and, where the type says it, dtype. */
static bool target(PyObject *object, int type, struct cattn_torch_fill *fill) {
    PyArrayObject *array = (PyArrayObject *)object;
    const int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE;
    if (!PyArray_CheckExact(object) || !PyArray_CHKFLAGS(array, flags) || !PyArray_ISNOTSWAPPED(array) ||
        (type != NPY_NOTYPE ? PyArray_TYPE(array) != type
                            : PyArray_TYPE(array) != NPY_FLOAT && PyArray_TYPE(array) != NPY_DOUBLE))
        return cattn_raise(PyExc_TypeError, "out is not an array that can be filled");
    fill->out = PyArray_DATA(array);
    fill->n = PyArray_SIZE(array);
    fill->dtype = PyArray_TYPE(array) == NPY_FLOAT ? CATTN_F32 : CATTN_F64;
    return true;
}

/* Fills one array after the other, all or none. Returns a new reference to `out`, the result of the method. */
static PyObject *draw(PyObject *object, struct cattn_torch_fill *fills, int n_fills, PyObject *out) {
    struct cattn_torch_random random;
    enum cattn_status status = CATTN_OK;
    if (!cattn_torch_begin(object, &random))
        return NULL;
    for (int i = 0; i < n_fills && status == CATTN_OK; i++) {
        if (fills[i].n <= CATTN_GIL_ELEMENTS) {
            status = cattn_torch_fill(&random, &fills[i]);
        } else {
            PyThreadState *thread;
            cattn_gil_release(&fills[i].poll, &thread);
            status = cattn_torch_fill(&random, &fills[i]);
            PyEval_RestoreThread(thread);
        }
    }
    if (!cattn_error_status(status)) {
        cattn_torch_abort(object);
        return NULL;
    }
    return cattn_torch_commit(object, &random) ? Py_NewRef(out) : NULL;
}

/* ValueError: `text` has a %U for each bound. */
static void error_bounds(const char *text, PyObject *low, PyObject *high) {
    PyObject *shown_low = cattn_shown(low), *shown_high = shown_low != NULL ? cattn_shown(high) : NULL;
    if (shown_high != NULL)
        PyErr_Format(PyExc_ValueError, text, shown_low, shown_high);
    Py_XDECREF(shown_low);
    Py_XDECREF(shown_high);
}

/* The range must be representable: its width as well, in the type that is drawn. */
static bool bounds(PyObject *low, PyObject *high, struct cattn_torch_fill *fill) {
    if (!cattn_arg_real(low, "low", &fill->low) || !cattn_arg_real(high, "high", &fill->high))
        return false;
    if (fill->low > fill->high) {
        error_bounds("low must not be above high, got low=%U and high=%U", low, high);
        return false;
    }
    const unsigned mode = cattn_fp_enter(); /* as it will be drawn */
    const bool fits = fill->dtype == CATTN_F32 ? isfinite((float)fill->low) && isfinite((float)fill->high) &&
                                                     isfinite((float)fill->high - (float)fill->low)
                                               : isfinite(fill->high - fill->low);
    cattn_fp_leave(mode);
    if (!fits)
        error_bounds(fill->dtype == CATTN_F32 ? "low=%U to high=%U is too wide for float32"
                                              : "low=%U to high=%U is too wide for float64",
                     low, high);
    return fits;
}

/* _uniform(out, low, high) */
static PyObject *uniform(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_fill fill = {.distribution = CATTN_TORCH_UNIFORM};
    if (!cattn_error_count("_uniform", n_args, 3) || !target(args[0], NPY_NOTYPE, &fill) ||
        !bounds(args[1], args[2], &fill))
        return NULL;
    return draw(self, &fill, 1, args[0]);
}

/* _normal(out) */
static PyObject *normal(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_fill fill = {.distribution = CATTN_TORCH_NORMAL};
    if (!cattn_error_count("_normal", n_args, 1) || !target(args[0], NPY_NOTYPE, &fill))
        return NULL;
    return draw(self, &fill, 1, args[0]);
}

/* _integers(out, low, high): both have 64 bits, low < high */
static PyObject *integers(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_fill fill = {.distribution = CATTN_TORCH_INTEGER};
    if (!cattn_error_count("_integers", n_args, 3) || !target(args[0], NPY_INT64, &fill))
        return NULL;
    fill.base = PyLong_AsLongLong(args[1]);
    const int64_t high = PyErr_Occurred() ? 0 : PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    fill.range = (uint64_t)high - (uint64_t)fill.base;
    if (high <= fill.base) {
        PyErr_Format(PyExc_ValueError, "low must be below high, got low=%S and high=%S", args[1], args[2]);
        return NULL;
    }
    return draw(self, &fill, 1, args[0]);
}

/* _bernoulli(out, p): a number, or an array of out's dtype and size that holds numbers in [0, 1] */
static PyObject *bernoulli(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_fill fill = {.distribution = CATTN_TORCH_BERNOULLI}, p = fill;
    if (!cattn_error_count("_bernoulli", n_args, 2) || !target(args[0], NPY_NOTYPE, &fill))
        return NULL;
    if (!PyArray_Check(args[1])) {
        if (!cattn_arg_probability(args[1], "p", &fill.probability))
            return NULL;
    } else {
        if (!target(args[1], NPY_NOTYPE, &p))
            return NULL;
        if (p.n != fill.n || p.dtype != fill.dtype) {
            PyErr_SetString(PyExc_TypeError, "p and out differ in size or dtype");
            return NULL;
        }
        fill.probabilities = p.out;
    }
    return draw(self, &fill, 1, args[0]);
}

/* _dropout_mask(out, p, skip): a part of the mask, `skip` elements into it; no draw where PyTorch makes none */
static PyObject *dropout_mask(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_fill fill = {.distribution = CATTN_TORCH_DROPOUT_MASK};
    double p;
    if (!cattn_error_count("_dropout_mask", n_args, 3) || !target(args[0], NPY_BOOL, &fill) ||
        !cattn_arg_probability(args[1], "p", &p))
        return NULL;
    fill.skip = PyLong_AsLongLong(args[2]);
    if (PyErr_Occurred())
        return NULL;
    const unsigned mode = cattn_fp_enter();
    fill.probability = 1.0 - p;
    cattn_fp_leave(mode);
    if (p > 0.0 && p < 1.0 && fill.n > 0)
        return draw(self, &fill, 1, args[0]);
    memset(fill.out, p == 0.0, (size_t)fill.n);
    Py_INCREF(args[0]);
    return args[0];
}

/* PyTorch computes the weight's bound as sqrt(3) * (gain / sqrt(fan_in)), gain = sqrt(2 / (1 + sqrt(5)^2)). */
#define SQRT_3 0x1.bb67ae8584caap+0
#define GAIN 0x1.279a74590331cp-1

/* _linear(weight, bias or None): uniform in -bound .. bound, one after the other */
static PyObject *linear(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_fill fills[2] = {{.distribution = CATTN_TORCH_UNIFORM}, {.distribution = CATTN_TORCH_UNIFORM}};
    if (!cattn_error_count("_linear", n_args, 2) || !target(args[0], NPY_NOTYPE, &fills[0]))
        return NULL;
    const int n_fills = args[1] == Py_None ? 1 : 2;
    if (n_fills == 2 && !target(args[1], NPY_NOTYPE, &fills[1]))
        return NULL;
    PyArrayObject *weight = (PyArrayObject *)args[0];
    if (PyArray_NDIM(weight) != 2) {
        PyErr_SetString(PyExc_TypeError, "weight must have 2 dimensions");
        return NULL;
    }
    const unsigned mode = cattn_fp_enter(); /* the caller's rounding must not show */
    const int64_t fan_in = PyArray_DIM(weight, 1);
    if (fan_in > 0) {
        fills[0].high = SQRT_3 * (GAIN / sqrt((double)fan_in));
        fills[1].high = 1.0 / sqrt((double)fan_in);
    }
    for (int i = 0; i < 2; i++)
        fills[i].low = 0.0 - fills[i].high; /* +0 without inputs */
    cattn_fp_leave(mode);
    PyObject *both = PyTuple_Pack(2, args[0], args[1]);
    PyObject *result = both != NULL ? draw(self, fills, n_fills, both) : NULL;
    Py_XDECREF(both);
    return result;
}

/* ---- seed and state ---- */

/* -2**63 .. 2**64 - 1; negative numbers in two's complement */
static bool parse_seed(PyObject *object, uint64_t *seed) {
    PyObject *number = cattn_arg_index(object, "seed");
    if (number == NULL)
        return false;
    *seed = PyLong_AsUnsignedLongLong(number);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        *seed = (uint64_t)PyLong_AsLongLong(number);
    }
    if (PyErr_Occurred()) {
        PyErr_Clear();
        cattn_error_value(number, "seed must be in -2**63 <= seed < 2**64");
    }
    Py_DECREF(number);
    return !PyErr_Occurred();
}

static bool parse_stream(PyObject *object, enum cattn_torch_stream *stream) {
    if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, "aten") == 0)
        *stream = CATTN_TORCH_ATEN;
    else if (PyUnicode_Check(object) && PyUnicode_CompareWithASCIIString(object, "mkl") == 0)
        *stream = CATTN_TORCH_MKL;
    else
        cattn_error_value(object, "dropout must be 'aten' or 'mkl'");
    return !PyErr_Occurred();
}

/* _seed(seed, dropout or None): None leaves the stream as it is */
static PyObject *reseed(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_random random;
    enum cattn_torch_stream stream = CATTN_TORCH_ATEN;
    uint64_t seed = 0;
    if (!cattn_error_count("_seed", n_args, 2) || !parse_seed(args[0], &seed) ||
        (args[1] != Py_None && !parse_stream(args[1], &stream)) || !begin(self_of(self), &random, true))
        return NULL;
    cattn_torch_seed(&random, seed);
    if (args[1] != Py_None)
        random.stream = stream;
    end(self_of(self), &random);
    Py_RETURN_NONE;
}

/* _set_state(uint8 array) */
static PyObject *set_state(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_fill bytes;
    struct cattn_torch_random random;
    if (!cattn_error_count("_set_state", n_args, 1) || !target(args[0], NPY_UINT8, &bytes))
        return NULL;
    if (bytes.n != CATTN_TORCH_STATE_BYTES) {
        PyErr_Format(PyExc_ValueError, "state must have %d bytes, got %lld", CATTN_TORCH_STATE_BYTES,
                     (long long)bytes.n);
        return NULL;
    }
    if (!cattn_torch_import(&random, bytes.out)) { /* before it can replace the draw of a lost thread */
        PyErr_SetString(PyExc_ValueError, "state is not the state of a torch CPU generator");
        return NULL;
    }
    if (!begin(self_of(self), &random, true))
        return NULL;
    (void)cattn_torch_import(&random, bytes.out);
    end(self_of(self), &random);
    Py_RETURN_NONE;
}

static PyObject *get_state(PyObject *self, PyObject *Py_UNUSED(unused)) {
    struct cattn_torch_random random;
    const npy_intp size = CATTN_TORCH_STATE_BYTES;
    PyObject *state = PyArray_SimpleNew(1, &size, NPY_UINT8);
    if (state != NULL && !cattn_torch_begin(self, &random))
        Py_CLEAR(state);
    if (state != NULL) {
        cattn_torch_abort(self);
        cattn_torch_export(&random, PyArray_DATA((PyArrayObject *)state));
    }
    return state;
}

/* (seed, "aten" or "mkl") */
static PyObject *settings(PyObject *self, PyObject *Py_UNUSED(unused)) {
    struct cattn_torch_random random;
    if (!cattn_torch_begin(self, &random))
        return NULL;
    cattn_torch_abort(self);
    return Py_BuildValue("Ks", (unsigned long long)random.seed, random.stream == CATTN_TORCH_MKL ? "mkl" : "aten");
}

/* ---- the type ---- */

static PyObject *new_stream(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    const allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = allocate(type, 0);
    if (object == NULL)
        return NULL;
    struct stream *self = self_of(object);
    atomic_init(&self->busy, 0);
    atomic_init(&self->owner, 0);
    self->random.stream = CATTN_TORCH_ATEN;
    cattn_torch_seed(&self->random, 0);
    return object;
}

static void free_stream(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF((PyObject *)type);
}

static PyMethodDef methods[] = {
    CATTN_FASTCALL("_uniform", uniform),
    CATTN_FASTCALL("_normal", normal),
    CATTN_FASTCALL("_integers", integers),
    CATTN_FASTCALL("_bernoulli", bernoulli),
    CATTN_FASTCALL("_dropout_mask", dropout_mask),
    CATTN_FASTCALL("_linear", linear),
    CATTN_FASTCALL("_seed", reseed),
    CATTN_FASTCALL("_set_state", set_state),
    {"_get_state", get_state, METH_NOARGS, NULL},
    {"_settings", settings, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, (void *)new_stream},
    {Py_tp_dealloc, (void *)free_stream},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "cattn._cattn.TorchStream",
    .basicsize = sizeof(struct stream),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};

PyObject *cattn_torch_type(PyObject *module) {
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return type;
}
