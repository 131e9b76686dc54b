/* arrays.c -- arguments that are arrays: types, layouts, masks, strides. */
#include "args.h"
#include "fp_mode.h"

/* ---- types ---- */

/* A type number beyond NumPy's own belongs to bfloat16: no other gets here. */
enum cattn_storage cattn_arg_storage(int type) {
    return type == NPY_HALF ? CATTN_STORED_F16 : PyTypeNum_ISUSERDEF(type) ? CATTN_STORED_BF16 : CATTN_STORED_PLAIN;
}

enum cattn_dtype cattn_arg_dtype(int type) { return type == NPY_DOUBLE ? CATTN_F64 : CATTN_F32; }

int cattn_arg_compute_type(int type) { return type == NPY_DOUBLE ? NPY_DOUBLE : NPY_FLOAT; }

/* ---- arrays ---- */

/* To the core NULL means that the tensor is absent, but an empty array may have no memory. */
static void *data_of(PyArrayObject *array) {
    static double nothing;
    void *data = PyArray_DATA(array);
    return data != NULL ? data : &nothing;
}

void cattn_freeze(PyArrayObject *array, const char *name, struct cattn_array *frozen) {
    const PyArray_Descr *descr = PyArray_DESCR(array);
    const npy_intp *dims = PyArray_DIMS(array), *strides = PyArray_STRIDES(array);
    frozen->name = name;
    frozen->data = data_of(array);
    frozen->kind = descr->kind;
    frozen->is_swapped = descr->byteorder == NPY_OPPBYTE;
    frozen->size = (int)PyDataType_ELSIZE(descr);
    frozen->nd = PyArray_NDIM(array);
    for (int axis = 0; axis < frozen->nd; axis++) {
        frozen->dims[axis] = dims[axis];
        frozen->strides[axis] = strides[axis];
    }
}

PyArrayObject *cattn_new_array(int nd, const int64_t *dims, int type) {
    npy_intp sizes[NPY_MAXDIMS];
    for (int axis = 0; axis < nd; axis++)
        sizes[axis] = (npy_intp)dims[axis];
    return (PyArrayObject *)PyArray_SimpleNew(nd, sizes, type);
}

PyArrayObject *cattn_new_at_line(int nd, const int64_t *dims, int type) {
    PyArray_Descr *descr = PyArray_DescrFromType(type);
    if (descr == NULL)
        return NULL;
    npy_intp sizes[NPY_MAXDIMS], bytes = (npy_intp)cattn_count(nd, dims) * PyDataType_ELSIZE(descr) + CATTN_LINE;
    for (int axis = 0; axis < nd; axis++)
        sizes[axis] = (npy_intp)dims[axis];
    PyObject *memory = PyArray_SimpleNew(1, &bytes, NPY_UBYTE), *array = NULL;
    if (memory == NULL) {
        PyErr_Clear();
        PyErr_Format(PyExc_MemoryError, "Unable to allocate an array with shape %s and data type %S",
                     cattn_show_shape(nd, dims).text, (PyObject *)descr);
        Py_DECREF((PyObject *)descr);
        return NULL;
    }
    char *data = PyArray_DATA((PyArrayObject *)memory);
    data += (0 - (uintptr_t)data) % CATTN_LINE;
    array = PyArray_NewFromDescr(&PyArray_Type, descr, nd, sizes, NULL, data, NPY_ARRAY_CARRAY, NULL);
    if (array == NULL)
        Py_DECREF(memory);
    else if (PyArray_SetBaseObject((PyArrayObject *)array, memory) < 0)
        Py_CLEAR(array);
    return (PyArrayObject *)array;
}

PyArrayObject *cattn_new_zeros(int nd, const int64_t *dims, int type) {
    npy_intp sizes[NPY_MAXDIMS];
    for (int axis = 0; axis < nd; axis++)
        sizes[axis] = (npy_intp)dims[axis];
    return (PyArrayObject *)PyArray_ZEROS(nd, sizes, type, 0);
}

PyArrayObject *cattn_new_integers(const struct cattn_array *array) {
    int64_t dims[NPY_MAXDIMS];
    for (int axis = 0; axis < array->nd; axis++)
        dims[axis] = array->strides[axis] == 0 && array->dims[axis] > 1 ? 1 : array->dims[axis];
    return cattn_new_array(array->nd, dims, NPY_INT64);
}

static int log2_itemsize(PyArrayObject *array) {
    switch (PyArray_TYPE(array)) {
    case NPY_BOOL:
    case NPY_BYTE:
    case NPY_UBYTE:
        return 0;
    case NPY_FLOAT:
        return 2;
    case NPY_DOUBLE:
    case NPY_LONG:
    case NPY_LONGLONG: /* int64 is one of the two */
        return 3;
    default:
        return 1;
    }
}

/* Native, aligned, and every stride that matters a whole number of elements. */
static bool layout_fits(PyArrayObject *array, int log2_size) {
    const int flags = PyArray_FLAGS(array);
    if (!(flags & NPY_ARRAY_ALIGNED) || !PyArray_ISNOTSWAPPED(array))
        return false;
    if (flags & NPY_ARRAY_C_CONTIGUOUS)
        return true;
    const int64_t rest = (1 << log2_size) - 1;
    for (int axis = 0; axis < PyArray_NDIM(array); axis++) {
        if (PyArray_DIM(array, axis) > 1 && (PyArray_STRIDE(array, axis) & rest) != 0)
            return false;
    }
    return true;
}

/* Calls helper(object, name, "f" or "d") of cattn._input.arrays. Its result must be an exact ndarray that kernels can
 * read. */
static PyArrayObject *helped(PyObject *helper, PyObject *object, const char *name, int type) {
    const unsigned mode = cattn_fp_enter(); /* conversions round as the kernels do, whatever the caller has set */
    PyObject *result = PyObject_CallFunction(helper, "Oss", object, name, type == NPY_FLOAT ? "f" : "d");
    cattn_fp_leave(mode);
    if (result != NULL && (!PyArray_CheckExact(result) ||
                           !layout_fits((PyArrayObject *)result, log2_itemsize((PyArrayObject *)result)))) {
        PyErr_Format(PyExc_SystemError, "%s was converted to something unexpected", name);
        Py_CLEAR(result);
    }
    return (PyArrayObject *)result;
}

/* As helped, and checks that the result has one of two types. */
static PyArrayObject *converted(PyObject *helper, PyObject *object, const char *name, int type, int other_type) {
    PyArrayObject *array = helped(helper, object, name, type);
    if (array != NULL && PyArray_TYPE(array) != type && PyArray_TYPE(array) != other_type) {
        PyErr_Format(PyExc_SystemError, "%s was converted to an unexpected type", name);
        Py_CLEAR(array);
    }
    return array;
}

/* Unregistered dtypes have type number -1, and so has state->bfloat16 before the first such array: never compare those.
 */
static bool is_half(const struct binding_state *state, int type) {
    return type == NPY_HALF || (type >= 0 && type == state->bfloat16);
}

PyArrayObject *cattn_arg_floats(struct binding_state *state, PyObject *object, const char *name) {
    if (PyArray_CheckExact(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        const int type = PyArray_TYPE(array);
        if ((type == NPY_FLOAT && layout_fits(array, 2)) || (type == NPY_DOUBLE && layout_fits(array, 3)) ||
            (is_half(state, type) && layout_fits(array, 1))) {
            Py_INCREF(object);
            return array;
        }
    }
    PyArrayObject *array = helped(state->as_array, object, name, NPY_DOUBLE);
    if (array == NULL)
        return NULL;
    const int type = PyArray_TYPE(array);
    if (PyTypeNum_ISUSERDEF(type))
        state->bfloat16 = type; /* as_array lets no other such type through */
    if (type == NPY_FLOAT || type == NPY_DOUBLE || is_half(state, type))
        return array;
    PyErr_Format(PyExc_SystemError, "%s was converted to an unexpected type", name);
    Py_DECREF((PyObject *)array);
    return NULL;
}

bool cattn_arg_widen(struct binding_state *state, PyArrayObject **array, int type) {
    if (PyArray_TYPE(*array) == type)
        return true;
    PyArrayObject *wide = converted(state->cast, (PyObject *)*array, "array", type, type);
    if (wide == NULL)
        return false;
    Py_DECREF((PyObject *)*array);
    *array = wide;
    return true;
}

PyArrayObject *cattn_arg_cast(struct binding_state *state, PyArrayObject *array, const char *name, int type) {
    if (PyArray_TYPE(array) == type)
        return (PyArrayObject *)Py_NewRef((PyObject *)array);
    PyObject *descr = (PyObject *)PyArray_DescrFromType(type), *cast = NULL;
    if (descr != NULL)
        cast = PyObject_CallFunction(state->cast, "OsO", (PyObject *)array, name, descr);
    Py_XDECREF(descr);
    return (PyArrayObject *)cast;
}

void cattn_arg_wrong_type(PyArrayObject *array, PyObject *given, const char *name, const char *wanted_by, int wanted) {
    PyArray_Descr *descr = PyArray_DescrFromType(wanted);
    const bool is_array = PyArray_Check(given);
    const bool was_read = is_array && PyTypeNum_ISINTEGER(PyArray_TYPE((PyArrayObject *)given));
    if (descr != NULL)
        PyErr_Format(PyExc_TypeError, "%s has dtype %S%s, %s %S: pass %s%s%s'%S')", name,
                     PyArray_DESCR(was_read ? (PyArrayObject *)given : array),
                     was_read ? ", read as float64" : (is_array ? "" : " as a list of numbers"), wanted_by, descr,
                     is_array ? "" : "np.asarray(", name, is_array ? ".astype(" : ", ", descr);
    Py_XDECREF((PyObject *)descr);
}

/* Always false. */
static bool error_changed(const char *names) {
    return cattn_raise(PyExc_ValueError,
                       "%s: an array got another dtype or other strides while the call read the others", names);
}

bool cattn_arg_unchanged(PyArrayObject *array, int type, const char *names) {
    return array == NULL || (PyArray_TYPE(array) == type && layout_fits(array, log2_itemsize(array))) ||
           error_changed(names);
}

bool cattn_freeze_unchanged(PyArrayObject *array, int type, const char *names, const char *name,
                            struct cattn_array *frozen) {
    frozen->data = NULL;
    if (!cattn_arg_unchanged(array, type, names))
        return false;
    if (array != NULL)
        cattn_freeze(array, name, frozen);
    return true;
}

int cattn_arg_common_type(const struct binding_state *state, PyArrayObject *const *arrays, int n, const char *names) {
    int type = -1;
    bool unlike = false; /* both float16 and bfloat16 */
    for (int i = 0; i < n; i++) {
        const int own = arrays[i] != NULL ? PyArray_TYPE(arrays[i]) : type;
        /* taking the arrays after it may have run Python code */
        if (arrays[i] != NULL && own != NPY_FLOAT && own != NPY_DOUBLE && !is_half(state, own)) {
            error_changed(names);
            return -1;
        }
        if (type < 0 || own == NPY_DOUBLE || (own == NPY_FLOAT && type != NPY_DOUBLE))
            type = own;
        else
            unlike |= own != type && is_half(state, own) && is_half(state, type);
    }
    if (unlike && is_half(state, type)) {
        PyErr_Format(PyExc_TypeError,
                     "%s mix float16 and bfloat16, which have no common dtype in NumPy: convert them to one, or to "
                     "float32",
                     names);
        return -1;
    }
    return type;
}

int cattn_arg_promote(struct binding_state *state, PyArrayObject **arrays, int n, const char *names) {
    const int type = cattn_arg_common_type(state, arrays, n, names);
    if (type < 0)
        return -1;
    for (int i = 0; i < n; i++) {
        if (arrays[i] != NULL && !cattn_arg_widen(state, &arrays[i], type))
            return -1;
    }
    for (int i = 0; i < n; i++) { /* so may the conversions */
        if (!cattn_arg_unchanged(arrays[i], type, names))
            return -1;
    }
    return type;
}

/* The shapes of a mask that people pass in the wrong layout: (batch, keys), (batch, queries, keys), and one whose last
 * axis has the size of axis -3, since query and key are (..., tokens, heads, head_dim). */
static void find_mask_hint(char *hint, size_t size, const struct cattn_array *mask, enum cattn_mask_kind kind, int nd,
                           const int64_t *dims) {
    enum { MOST_AXES = 5 };
    const int own = mask->nd;
    const int64_t last = own > 0 ? mask->dims[own - 1] : 1;
    if (own == 2 && nd > 2 && nd <= MOST_AXES && mask->dims[0] == dims[0] && last == dims[nd - 1]) {
        const char *between = &"None, None, None, "[(size_t)(MOST_AXES - nd) * strlen("None, ")];
        PyOS_snprintf(hint, size, ": to hide keys of whole batch entries pass %s[:, %s:]%s", mask->name, between,
                      kind == CATTN_MASK_ANY ? ", or key_value_seq_lengths" : "");
    } else if (own == 3 && nd == 4 && mask->dims[0] == dims[0] && last == dims[3] &&
               (mask->dims[1] == dims[2] || mask->dims[1] == 1)) {
        PyOS_snprintf(hint, size, ": for all heads of a batch entry pass %s[:, None]", mask->name);
    } else if (kind != CATTN_MASK_BOOL && nd > 3 && last != dims[nd - 1] && last != 1 && last == dims[nd - 3]) {
        PyOS_snprintf(hint, size, ": " CATTN_LAYOUT_HINT);
    }
}

/* A mask of any shape. */
static PyArrayObject *find_mask(struct binding_state *state, PyObject *object, const char *name,
                                enum cattn_mask_kind kind, int type) {
    const bool boolean = kind != CATTN_MASK_BIAS, floating = kind != CATTN_MASK_BOOL;
    if (PyArray_CheckExact(object)) {
        PyArrayObject *array = (PyArrayObject *)object;
        const int own = PyArray_TYPE(array);
        if (((boolean && own == NPY_BOOL) || (floating && own == type)) && layout_fits(array, log2_itemsize(array))) {
            Py_INCREF(object);
            return array;
        }
    }
    PyObject *helpers[] = {state->as_mask, state->as_bias, state->as_bool};
    return converted(helpers[kind], object, name, floating ? type : NPY_BOOL, boolean ? NPY_BOOL : type);
}

PyArrayObject *cattn_arg_bools(struct binding_state *state, PyObject *object, const char *name) {
    return find_mask(state, object, name, CATTN_MASK_BOOL, NPY_BOOL);
}

PyArrayObject *cattn_arg_bool_mask(struct binding_state *state, PyObject *object, const char *name, int nd,
                                   const int64_t *dims, const char *meaning) {
    PyArrayObject *mask = cattn_arg_bools(state, object, name);
    if (mask == NULL)
        return NULL;
    struct cattn_array frozen;
    cattn_freeze(mask, name, &frozen);
    if (!cattn_check_broadcast(cattn_python, &frozen, nd, dims, meaning, ""))
        Py_CLEAR(mask);
    return mask;
}

bool cattn_arg_mask_fits(const struct cattn_array *mask, enum cattn_mask_kind kind, int nd, const int64_t *dims) {
    char hint[256] = "";
    if (cattn_broadcasts(mask, nd, dims))
        return true;
    find_mask_hint(hint, sizeof hint, mask, kind, nd, dims);
    return cattn_check_broadcast(cattn_python, mask, nd, dims, "the scores' shape", hint);
}

PyArrayObject *cattn_arg_mask(struct binding_state *state, PyObject *object, const char *name,
                              enum cattn_mask_kind kind, int type, int nd, const int64_t *dims) {
    PyArrayObject *mask = find_mask(state, object, name, kind, type);
    if (mask == NULL)
        return NULL;
    struct cattn_array frozen;
    cattn_freeze(mask, name, &frozen);
    if (!cattn_arg_mask_fits(&frozen, kind, nd, dims))
        Py_CLEAR(mask);
    return mask;
}

/* ---- elements ---- */

/* Elements that are copied at a time: some milliseconds. */
#define COPIED_PIECE (1 << 20)

/* The elements of an array from index `first` of an axis on, n of them, in the array's memory. */
static PyArrayObject *view_of(PyArrayObject *array, int axis, npy_intp first, npy_intp n) {
    npy_intp dims[NPY_MAXDIMS];
    for (int i = 0; i < PyArray_NDIM(array); i++)
        dims[i] = i == axis ? n : PyArray_DIM(array, i);
    Py_INCREF((PyObject *)PyArray_DESCR(array));
    return (PyArrayObject *)PyArray_NewFromDescr(
        &PyArray_Type, PyArray_DESCR(array), PyArray_NDIM(array), dims, PyArray_STRIDES(array),
        PyArray_BYTES(array) + first * PyArray_STRIDE(array, axis), PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE, NULL);
}

/* Both halves of the longest axis. */
static bool copy_halves(PyArrayObject *to, PyArrayObject *from) {
    int longest = 0;
    for (int axis = 1; axis < PyArray_NDIM(to); axis++)
        longest = PyArray_DIM(to, axis) > PyArray_DIM(to, longest) ? axis : longest;
    const int64_t whole = PyArray_DIM(to, longest), half = whole / 2;
    bool copied = true;
    for (int i = 0; i < 2 && copied; i++) {
        PyArrayObject *part = view_of(to, longest, i * half, i ? whole - half : half);
        PyArrayObject *source = part ? view_of(from, longest, i * half, i ? whole - half : half) : NULL;
        copied = source != NULL && cattn_copy_into(part, source);
        Py_XDECREF((PyObject *)part);
        Py_XDECREF((PyObject *)source);
    }
    return copied;
}

bool cattn_copy_into(PyArrayObject *to, PyArrayObject *from) {
    if (PyArray_SIZE(to) > COPIED_PIECE)
        return copy_halves(to, from);
    return PyArray_CopyInto(to, from) == 0 && cattn_check_signals();
}

/* Numbers that are rounded between two looks at signals. */
#define ROUNDED_PIECE (1 << 20)

bool cattn_arg_round_to_bfloat16(PyArrayObject **array) {
    PyArrayObject *copy = (PyArrayObject *)PyArray_NewLikeArray(*array, NPY_KEEPORDER, NULL, 0); /* without gaps */
    if (copy == NULL || !cattn_copy_into(copy, *array)) {
        Py_XDECREF((PyObject *)copy);
        return false;
    }
    uint32_t *bits = PyArray_DATA(copy);
    for (int64_t i = 0; i < PyArray_SIZE(copy); i++) {
        if (i % ROUNDED_PIECE == ROUNDED_PIECE - 1 && !cattn_check_signals()) {
            Py_DECREF((PyObject *)copy);
            return false;
        }
        const uint32_t size = bits[i] & 0x7fffffffu;
        if (size < 0x00800000u) /* subnormal */
            bits[i] &= 0x80000000u;
        else if (size <= 0x7f800000u) /* not NaN */
            bits[i] = (bits[i] + 0x7fffu + (bits[i] >> 16 & 1u)) & 0xffff0000u;
    }
    Py_DECREF((PyObject *)*array);
    *array = copy;
    return true;
}

/* One row of a float mask: false at the first value that is neither 0 nor 1; *ones says whether a 1 was seen. */
static bool row_is_binary(const char *data, int64_t n, int64_t stride, int size, bool *ones) {
    for (int64_t i = 0; i < n; i++, data += stride) {
        const double x = size == sizeof(float) ? (double)*(const float *)data : *(const double *)data;
        if (x == 1.0)
            *ones = true;
        else if (x != 0.0)
            return false;
    }
    return true;
}

/* The warning is a hint: a mask that begins with more zeros than this is not read to its end. */
#define MOST_ZEROS (1 << 20)

bool cattn_arg_warn_binary(PyArrayObject *mask, const char *name) {
    struct cattn_array frozen;
    struct cattn_walk walk;
    int64_t looked = 0;
    bool ones = false;
    cattn_freeze(mask, name, &frozen);
    cattn_walk_begin(&walk, &frozen, false);
    do {
        if (!row_is_binary(walk.run, walk.n, walk.stride, frozen.size, &ones))
            return true;
        looked += walk.n;
    } while ((ones || looked < MOST_ZEROS) && cattn_walk_next(&walk));
    return !ones || PyErr_WarnFormat(PyExc_UserWarning, 1,
                                     "%s holds only 0 and 1, but float masks are additive (0 keeps, -inf hides); "
                                     "for True = keep pass %s.astype(bool)",
                                     name, name) == 0;
}

/* ---- strides in elements ---- */

void cattn_tensor_from(struct cattn_tensor *tensor, PyArrayObject *array, int n_batch_dims, int axes) {
    struct cattn_array frozen;
    cattn_freeze(array, "", &frozen);
    cattn_view(tensor, &frozen, n_batch_dims, axes);
}
