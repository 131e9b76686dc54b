/* tensors.c -- the memory of tensors as arrays, and of arrays as tensors, by DLPack's functions for C.
 *
 * A class of tensors may have an attribute __dlpack_c_exchange_api__, a capsule with functions (PyTorch from 2.10 on).
 * They take a tenth of the time of PyTorch's own way to NumPy, which a call with few rows would notice, and they know
 * bfloat16. What they cannot do is None here; cattn.integrations.torch takes the long way then, which says why.
 */
#include "args.h"

/* ---- the binary interface of DLPack 1 ---- */

enum { DL_MAJOR = 1, DL_CPU = 1 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };

struct dl_type {
    uint8_t kind, bits;
    uint16_t lanes;
};

struct dl_tensor {
    void *data;
    int32_t device, device_index;
    int32_t nd;
    struct dl_type type;
    int64_t *dims, *strides; /* in elements; strides may be NULL, but not PyTorch's */
    uint64_t offset;         /* of the first element, in bytes */
};

struct dl_version {
    uint32_t major, minor;
};

/* A tensor that keeps its memory. */
struct dl_managed {
    struct dl_version version;
    void *owner;
    void (*release)(struct dl_managed *);
    uint64_t flags;
    struct dl_tensor tensor;
};

struct dl_api {
    struct dl_version version;
    struct dl_api *older;
    int (*allocate)(struct dl_tensor *, struct dl_managed **, void *, void (*)(void *, const char *, const char *));
    int (*take)(void *object, struct dl_managed **tensor);
    int (*give)(struct dl_managed *tensor, void **object); /* the new object has the tensor, also after an error */
    int (*look)(void *object, struct dl_tensor *tensor);   /* lasts while nobody changes the object; may be NULL */
    int (*stream)(int32_t device, int32_t index, void **stream);
};

/* The functions of a class of tensors, or NULL without an exception. */
static const struct dl_api *api_of(const struct binding_state *state, PyObject *type) {
    PyObject *capsule = PyObject_GetAttr(type, state->exchange_api);
    const struct dl_api *api = capsule != NULL ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    Py_XDECREF(capsule); /* the functions last as long as the process */
    PyErr_Clear();
    return api != NULL && api->version.major == DL_MAJOR ? api : NULL;
}

/* ---- types ---- */

static const struct {
    int type;
    uint8_t kind, bits;
} known_types[] = {
    {NPY_FLOAT, DL_FLOAT, 32}, {NPY_DOUBLE, DL_FLOAT, 64}, {NPY_HALF, DL_FLOAT, 16}, {NPY_BOOL, DL_BOOL, 8},
    {NPY_INT64, DL_INT, 64},   {NPY_INT32, DL_INT, 32},    {NPY_INT8, DL_INT, 8},    {NPY_UINT8, DL_UINT, 8},
};
enum { N_KNOWN = sizeof known_types / sizeof *known_types };

/* NumPy's number of a type, or -1. */
static int type_of(const struct binding_state *state, struct dl_type type) {
    if (type.lanes == 1 && type.kind == DL_BFLOAT && type.bits == 16)
        return state->bfloat16;
    for (int i = 0; type.lanes == 1 && i < N_KNOWN; i++)
        if (known_types[i].kind == type.kind && known_types[i].bits == type.bits)
            return known_types[i].type;
    return -1;
}

static bool find_type(const struct binding_state *state, int number, struct dl_type *type) {
    type->lanes = 1;
    if (number >= 0 && number == state->bfloat16) {
        type->kind = DL_BFLOAT;
        type->bits = 16;
        return true;
    }
    for (int i = 0; i < N_KNOWN; i++)
        if (known_types[i].type == number) {
            type->kind = known_types[i].kind;
            type->bits = known_types[i].bits;
            return true;
        }
    return false;
}

/* ---- from tensors to arrays ---- */

/* Whether the storage of the object, a tensor of PyTorch, has all its elements. A program may free or shorten it, and
 * PyTorch's tensors of zeros have no memory; the description does not show either. False also after an exception. */
static bool has_memory(const struct binding_state *state, PyObject *object, const struct dl_tensor *tensor) {
    PyObject *storage = PyObject_CallMethodObjArgs(object, state->untyped_storage, NULL);
    const Py_ssize_t n_bytes = storage != NULL ? PyObject_Size(storage) : -1;
    PyObject *offset = n_bytes >= 0 ? PyObject_CallMethodObjArgs(object, state->storage_offset, NULL) : NULL;
    const int64_t first = offset != NULL ? PyLong_AsLongLong(offset) : -1, size = tensor->type.bits / 8;
    Py_XDECREF(storage);
    Py_XDECREF(offset);
    if (first < 0 || first > n_bytes / size || (uintptr_t)tensor->data == (uintptr_t)(first * size))
        return false;
    int64_t left = n_bytes / size - first - 1; /* elements after the first one */
    for (int axis = 0; axis < tensor->nd; axis++) {
        const int64_t steps = tensor->dims[axis] - 1, stride = tensor->strides[axis];
        if (steps < 0)
            return true;
        if (stride < 0 || (stride > 0 && steps > left / stride))
            return false;
        left -= steps * stride;
    }
    return left >= 0;
}

static PyObject *array_on(const struct binding_state *state, const struct dl_tensor *tensor, PyObject *owner) {
    npy_intp dims[NPY_MAXDIMS], strides[NPY_MAXDIMS];
    const int type = type_of(state, tensor->type);
    if (tensor->device != DL_CPU || tensor->data == NULL || tensor->nd > NPY_MAXDIMS || type < 0)
        return NULL;
    if ((tensor->strides == NULL && tensor->nd > 0) || !has_memory(state, owner, tensor))
        return NULL;
    for (int axis = 0; axis < tensor->nd; axis++) {
        dims[axis] = (npy_intp)tensor->dims[axis];
        strides[axis] = (npy_intp)tensor->strides[axis] * (tensor->type.bits / 8);
    }
    PyArray_Descr *descr = PyArray_DescrFromType(type);
    if (descr == NULL)
        return NULL;
    PyObject *array = PyArray_NewFromDescr(&PyArray_Type, descr, tensor->nd, dims, strides,
                                           (char *)tensor->data + tensor->offset, NPY_ARRAY_WRITEABLE, NULL);
    if (array != NULL && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)) < 0)
        Py_CLEAR(array);
    return array;
}

/* _array_of_tensor(tensor): an array on the memory of a tensor of PyTorch, or None. It keeps the tensor. */
PyObject *cattn_py_array_of_tensor(PyObject *module, PyObject *object) {
    const struct binding_state *state = cattn_state(module);
    const struct dl_api *api = api_of(state, (PyObject *)Py_TYPE(object));
    struct dl_tensor tensor;
    PyObject *array = NULL;
    if (api != NULL && api->look != NULL && api->look(object, &tensor) == 0)
        array = array_on(state, &tensor, object);
    PyErr_Clear();
    return array != NULL ? array : Py_NewRef(Py_None);
}

/* ---- from arrays to tensors ---- */

struct lent {
    struct dl_managed managed; /* first */
    int64_t sizes[];           /* dims and strides */
};

/* The end of a tensor, in any thread. After the end of Python nothing is released. */
static void release(struct dl_managed *managed) {
    if (!Py_IsInitialized())
        return;
    const PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)managed->owner);
    PyMem_Free(managed);
    PyGILState_Release(gil);
}

/* The array as DLPack describes it, with a reference to it; or NULL. */
static struct dl_managed *lend(const struct binding_state *state, PyArrayObject *array) {
    struct dl_type type;
    const int size = (int)PyDataType_ELSIZE(PyArray_DESCR(array)), nd = PyArray_NDIM(array);
    if (!PyArray_ISBEHAVED(array) || PyArray_SIZE(array) == 0 || !find_type(state, PyArray_TYPE(array), &type))
        return NULL;
    for (int axis = 0; axis < nd; axis++)
        if (PyArray_STRIDE(array, axis) < 0 || PyArray_STRIDE(array, axis) % size != 0)
            return NULL;
    struct lent *lent = PyMem_Malloc(sizeof *lent + 2 * (size_t)nd * sizeof *lent->sizes);
    if (lent == NULL)
        return NULL;
    for (int axis = 0; axis < nd; axis++) {
        lent->sizes[axis] = PyArray_DIM(array, axis);
        lent->sizes[nd + axis] = PyArray_STRIDE(array, axis) / size;
    }
    lent->managed = (struct dl_managed){
        .version = {DL_MAJOR, 0},
        .owner = Py_NewRef((PyObject *)array),
        .release = release,
        .tensor = {PyArray_DATA(array), DL_CPU, 0, nd, type, lent->sizes, lent->sizes + nd, 0},
    };
    return &lent->managed;
}

/* _tensor_of_array(array, type): a tensor of this class on the array's memory, or None. It keeps the array. */
PyObject *cattn_py_tensor_of_array(PyObject *module, PyObject *const *args, Py_ssize_t n_args) {
    if (!cattn_error_count("_tensor_of_array", n_args, 2))
        return NULL;
    const struct binding_state *state = cattn_state(module);
    const struct dl_api *api = PyArray_CheckExact(args[0]) ? api_of(state, args[1]) : NULL;
    struct dl_managed *managed = api != NULL ? lend(state, (PyArrayObject *)args[0]) : NULL;
    void *tensor = NULL;
    if (managed != NULL && api->give(managed, &tensor) != 0)
        tensor = NULL;
    PyErr_Clear();
    return tensor != NULL ? tensor : Py_NewRef(Py_None);
}
