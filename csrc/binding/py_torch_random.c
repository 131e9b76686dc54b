/* py_torch_random.c -- the type TorchStream: a torch generator, a lock, and methods that fill fresh arrays from it.
 *
 * cattn.TorchGenerator is its subclass in Python: it reads shapes and dtypes, makes C-contiguous arrays and hands them
 * over. Every draw works on a copy of the generator, under the lock, and puts it back when it has succeeded: a call
 * that raises leaves the generator as it was, and threads take turns. Other calls reach the generator by
 * cattn_torch_begin and cattn_torch_end.
 */
#include "args.h"
#include "error.h"

#include <math.h>
#include <sched.h>
#include <stdatomic.h>

#include "../fp_mode.h"
#include "../torch_random.h"

/* A waiting thread looks for signals this often. */
#define WAIT_MICROSECONDS 50000

struct stream {
    PyObject_HEAD PyThread_type_lock lock;
    atomic_ulong owner;     /* the thread that draws, or 0 */
    atomic_uint fork_count; /* when it began, or the last one ended */
    struct cattn_torch_random random;
};

static struct stream *self_of(PyObject *object) { return (struct stream *)(void *)object; }

/* ---- one at a time ---- */

bool cattn_torch_check(const struct binding_state *state, PyObject *rng) {
    return PyObject_TypeCheck(rng, (PyTypeObject *)state->torch_stream);
}

/* The child of a fork has the lock of a draw in another thread, but not that thread: the first to come takes its place.
 * The numbers are those from before that draw. The lost thread may have had the lock, but not yet put its name there.
 */
static void free_from_lost_owner(struct stream *self) {
    const unsigned now = cattn_fork_count(), freeing = ~now;
    unsigned began = atomic_load(&self->fork_count);
    if (began != freeing && cattn_left_behind(atomic_load(&self->owner), began) &&
        atomic_compare_exchange_strong(&self->fork_count, &began, freeing)) {
        atomic_store(&self->owner, 0);
        (void)PyThread_acquire_lock(self->lock, NOWAIT_LOCK); /* now it is locked in any case */
        PyThread_release_lock(self->lock);
        atomic_store(&self->fork_count, now);
    }
    while (atomic_load(&self->fork_count) == freeing) /* another thread: it must not release a lock that we took */
        sched_yield();
}

static bool try_lock(struct stream *self, unsigned long me, PY_TIMEOUT_T microseconds) {
    if (PyThread_acquire_lock_timed(self->lock, microseconds, microseconds > 0) != PY_LOCK_ACQUIRED)
        return false;
    atomic_store(&self->fork_count, cattn_fork_count());
    atomic_store(&self->owner, me);
    return true;
}

bool cattn_torch_begin(PyObject *object, struct cattn_torch_random *random) {
    struct stream *self = self_of(object);
    const unsigned long me = PyThread_get_thread_ident();
    for (bool locked = false, first = true; !locked; first = false) {
        if (!first && PyErr_CheckSignals() < 0)
            return false;
        free_from_lost_owner(self); /* each time: a signal handler may have forked */
        if (atomic_load(&self->owner) == me) {
            PyErr_SetString(PyExc_RuntimeError,
                            "this TorchGenerator is drawing already; a signal handler must not use it");
            return false;
        }
        if (first) {
            locked = try_lock(self, me, 0);
        } else {
            PyThreadState *thread = PyEval_SaveThread();
            locked = try_lock(self, me, WAIT_MICROSECONDS);
            PyEval_RestoreThread(thread);
        }
    }
    *random = self->random;
    return true;
}

void cattn_torch_end(PyObject *stream, const struct cattn_torch_random *random) {
    struct stream *self = self_of(stream);
    if (random != NULL)
        self->random = *random;
    atomic_store(&self->fork_count, cattn_fork_count()); /* a fork during the draw: who waits has nothing to free */
    atomic_store(&self->owner, 0);
    PyThread_release_lock(self->lock);
}

/* ---- drawing ---- */

/* The array to fill, as cattn.random makes it; sets out, n and, where the type says it, dtype. */
static bool target(PyObject *object, int type, struct cattn_torch_fill *fill) {
    PyArrayObject *array = (PyArrayObject *)object;
    const int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | NPY_ARRAY_WRITEABLE;
    if (!PyArray_CheckExact(object) || !PyArray_CHKFLAGS(array, flags) || !PyArray_ISNOTSWAPPED(array) ||
        (type != NPY_NOTYPE ? PyArray_TYPE(array) != type
                            : PyArray_TYPE(array) != NPY_FLOAT && PyArray_TYPE(array) != NPY_DOUBLE)) {
        PyErr_SetString(PyExc_TypeError, "out is not an array that can be filled");
        return false;
    }
    fill->out = PyArray_DATA(array);
    fill->n = PyArray_SIZE(array);
    fill->dtype = PyArray_TYPE(array) == NPY_FLOAT ? CATTN_F32 : CATTN_F64;
    return true;
}

/* Fills in turn, all or none. Returns what the method gives back, `out`, as a new reference. */
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
    cattn_torch_end(object, status == CATTN_OK ? &random : NULL);
    if (!cattn_error_status(status))
        return NULL;
    Py_INCREF(out);
    return out;
}

/* The range must be representable: its width as well, in the type that is drawn. */
static bool bounds(PyObject *low, PyObject *high, struct cattn_torch_fill *fill) {
    if (!cattn_arg_real(low, "low", &fill->low) || !cattn_arg_real(high, "high", &fill->high))
        return false;
    if (fill->low > fill->high) {
        PyErr_Format(PyExc_ValueError, "low must not be above high, got low=%S and high=%S", low, high);
        return false;
    }
    const unsigned mode = cattn_fp_enter(); /* as it will be drawn */
    const bool fits = fill->dtype == CATTN_F32 ? isfinite((float)fill->low) && isfinite((float)fill->high) &&
                                                     isfinite((float)fill->high - (float)fill->low)
                                               : isfinite(fill->high - fill->low);
    cattn_fp_leave(mode);
    if (!fits)
        PyErr_Format(PyExc_ValueError, "low=%S to high=%S is too wide for %s", low, high,
                     fill->dtype == CATTN_F32 ? "float32" : "float64");
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
    const npy_intp fan_in = PyArray_DIM(weight, 1);
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
        PyErr_Format(PyExc_ValueError, "seed must be in -2**63 <= seed < 2**64, got %S", number);
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
        PyErr_Format(PyExc_ValueError, "dropout must be 'aten' or 'mkl', got %R", object);
    return !PyErr_Occurred();
}

/* _seed(seed, dropout or None): None leaves the stream as it is */
static PyObject *reseed(PyObject *self, PyObject *const *args, Py_ssize_t n_args) {
    struct cattn_torch_random random;
    enum cattn_torch_stream stream = CATTN_TORCH_ATEN;
    uint64_t seed = 0;
    if (!cattn_error_count("_seed", n_args, 2) || !parse_seed(args[0], &seed) ||
        (args[1] != Py_None && !parse_stream(args[1], &stream)) || !cattn_torch_begin(self, &random))
        return NULL;
    cattn_torch_seed(&random, seed);
    if (args[1] != Py_None)
        random.stream = stream;
    cattn_torch_end(self, &random);
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
    if (!cattn_torch_begin(self, &random))
        return NULL;
    const bool valid = cattn_torch_import(&random, bytes.out);
    cattn_torch_end(self, valid ? &random : NULL);
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "state is not the state of a torch CPU generator");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *get_state(PyObject *self, PyObject *Py_UNUSED(unused)) {
    struct cattn_torch_random random;
    const npy_intp size = CATTN_TORCH_STATE_BYTES;
    PyObject *state = PyArray_SimpleNew(1, &size, NPY_UINT8);
    if (state != NULL && !cattn_torch_begin(self, &random))
        Py_CLEAR(state);
    if (state != NULL) {
        cattn_torch_end(self, NULL);
        cattn_torch_export(&random, PyArray_DATA((PyArrayObject *)state));
    }
    return state;
}

/* (seed, "aten" or "mkl") */
static PyObject *settings(PyObject *self, PyObject *Py_UNUSED(unused)) {
    struct cattn_torch_random random;
    if (!cattn_torch_begin(self, &random))
        return NULL;
    cattn_torch_end(self, NULL);
    return Py_BuildValue("Ks", (unsigned long long)random.seed, random.stream == CATTN_TORCH_MKL ? "mkl" : "aten");
}

/* ---- the type ---- */

static PyObject *new_stream(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    const allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    PyObject *object = allocate(type, 0);
    if (object == NULL)
        return NULL;
    struct stream *self = self_of(object);
    atomic_init(&self->owner, 0);
    atomic_init(&self->fork_count, 0);
    self->random.stream = CATTN_TORCH_ATEN;
    cattn_torch_seed(&self->random, 0);
    self->lock = PyThread_allocate_lock();
    if (self->lock == NULL) {
        Py_DECREF(object);
        return PyErr_NoMemory();
    }
    return object;
}

static void free_stream(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    if (self_of(object)->lock != NULL)
        PyThread_free_lock(self_of(object)->lock);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF((PyObject *)type);
}

#define FASTCALL(name, function) {name, (PyCFunction)(void (*)(void))(function), METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FASTCALL("_uniform", uniform),
    FASTCALL("_normal", normal),
    FASTCALL("_integers", integers),
    FASTCALL("_bernoulli", bernoulli),
    FASTCALL("_dropout_mask", dropout_mask),
    FASTCALL("_linear", linear),
    FASTCALL("_seed", reseed),
    FASTCALL("_set_state", set_state),
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
