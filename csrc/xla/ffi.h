/* ffi.h -- XLA's C API for foreign functions: the layout of the structs that a handler reads.
 *
 * XLA passes a call frame to a registered function and gets an error back, or NULL. These are the parts of versions 0.1
 * and later that cattn uses, with their offsets as static assertions; so a build needs no header of XLA. Every struct
 * begins with its size: a handler compares it before it reads anything else. Trailing members that cattn does not use
 * are left out.
 */
#ifndef CATTN_XLA_FFI_H
#define CATTN_XLA_FFI_H

#include <stddef.h>
#include <stdint.h>

/* C enums of the API are int here, which has their size on every platform of XLA. */
enum {
    XLA_PRED = 1,
    XLA_S8 = 2,
    XLA_S32 = 4,
    XLA_S64 = 5,
    XLA_U32 = 8,
    XLA_F16 = 10,
    XLA_F32 = 11,
    XLA_F64 = 12,
    XLA_BF16 = 16,
    XLA_F8E4M3FN = 20
};
enum { XLA_BUFFER = 1 };   /* the only type of arguments and results */
enum { XLA_SCALAR = 3 };   /* the type of cattn's attributes */
enum { XLA_METADATA = 1 }; /* the only type of extensions */
enum { XLA_EXECUTE = 3 };  /* the stage of a call */
enum { XLA_MAJOR = 0 };    /* of the API's version */
enum { XLA_INVALID_ARGUMENT = 3, XLA_RESOURCE_EXHAUSTED = 8, XLA_UNIMPLEMENTED = 12, XLA_INTERNAL = 13 };

/* The first members of most structs. */
struct xla_head {
    size_t size; /* of the struct */
    struct xla_extension *extensions;
};

struct xla_extension {
    size_t size;
    int type;
    struct xla_extension *next;
};

struct xla_version {
    struct xla_head head;
    int major, minor;
};

/* XLA asks every handler for these at registration, by an extension of an otherwise empty call frame. */
struct xla_metadata {
    size_t size;
    struct xla_version version;
    uint32_t traits;
};
struct xla_metadata_extension {
    struct xla_extension extension;
    struct xla_metadata *metadata;
};

struct xla_error; /* XLA's own */
struct xla_new_error {
    struct xla_head head;
    const char *message; /* copied */
    int code;
};

struct xla_api {
    struct xla_head head;
    struct xla_version version;
    const void *internal;
    struct xla_error *(*create_error)(struct xla_new_error *);
};

/* A dense array in C order. */
struct xla_buffer {
    struct xla_head head;
    int type;
    void *data; /* may be NULL if the array is empty */
    int64_t rank;
    const int64_t *dims;
};

/* Arguments or results. */
struct xla_items {
    struct xla_head head;
    int64_t count;
    const int *types;
    void *const *items;
};

struct xla_scalar {
    int type;
    const void *value;
};
struct xla_name {
    const char *text; /* not terminated */
    size_t length;
};
struct xla_attributes {
    struct xla_head head;
    int64_t count;
    const int *types;
    const struct xla_name *const *names;
    void *const *items;
};

struct xla_frame {
    struct xla_head head;
    const struct xla_api *api;
    void *context;
    int stage;
    struct xla_items arguments, results;
    struct xla_attributes attributes;
};

#define XLA_AT(type, member, offset)                                                                                   \
    _Static_assert(offsetof(struct type, member) == (offset), #type "." #member " stands where XLA has it")
/* Sizes as XLA counts them: without padding at the end. */
#define XLA_SIZE(type, last) (offsetof(struct type, last) + sizeof(((struct type *)NULL)->last))

XLA_AT(xla_head, extensions, 8);
XLA_AT(xla_extension, type, 8);
XLA_AT(xla_extension, next, 16);
XLA_AT(xla_version, major, 16);
XLA_AT(xla_version, minor, 20);
XLA_AT(xla_metadata, version, 8);
XLA_AT(xla_metadata, traits, 32);
_Static_assert(XLA_SIZE(xla_metadata, traits) == 36, "the metadata is as long as XLA's");
XLA_AT(xla_metadata_extension, metadata, 24);
XLA_AT(xla_new_error, message, 16);
XLA_AT(xla_new_error, code, 24);
_Static_assert(XLA_SIZE(xla_new_error, code) == 28, "an error is as long as XLA's");
XLA_AT(xla_api, version, 16);
XLA_AT(xla_api, create_error, 48);
XLA_AT(xla_buffer, type, 16);
XLA_AT(xla_buffer, data, 24);
XLA_AT(xla_buffer, rank, 32);
XLA_AT(xla_buffer, dims, 40);
_Static_assert(XLA_SIZE(xla_buffer, dims) == 48, "a buffer is as long as XLA's");
XLA_AT(xla_items, count, 16);
XLA_AT(xla_items, types, 24);
XLA_AT(xla_items, items, 32);
_Static_assert(XLA_SIZE(xla_items, items) == 40, "lists are as long as XLA's");
XLA_AT(xla_scalar, value, 8);
XLA_AT(xla_name, length, 8);
XLA_AT(xla_attributes, names, 32);
XLA_AT(xla_attributes, items, 40);
_Static_assert(XLA_SIZE(xla_attributes, items) == 48, "attributes are as long as XLA's");
XLA_AT(xla_frame, api, 16);
XLA_AT(xla_frame, context, 24);
XLA_AT(xla_frame, stage, 32);
XLA_AT(xla_frame, arguments, 40);
XLA_AT(xla_frame, results, 80);
XLA_AT(xla_frame, attributes, 120);
_Static_assert(XLA_SIZE(xla_frame, attributes) == 168, "the frame is as long as XLA's");

#endif
