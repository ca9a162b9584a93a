/* What DLPack's C exchange API (major version 1) tells of a tensor. All layouts are fixed by its specification. */
#ifndef PCCHECK_DLPACK_H
#define PCCHECK_DLPACK_H

#include <stdint.h>

#define DLPACK_CAPSULE "dlpack_exchange_api"
#define DLPACK_MAJOR 1

struct dlpack_device {
    int32_t type;
    int32_t number;
};

struct dlpack_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

/* Borrowed: valid for as long as nobody changes the tensor. */
struct dlpack_tensor {
    void *data;
    struct dlpack_device device;
    int32_t dimensions;
    struct dlpack_dtype dtype;
    const int64_t *shape;
    const int64_t *strides; /* in elements; before version 1.2 NULL where the tensor is contiguous */
    uint64_t offset;
};

struct dlpack_exchange {
    uint32_t major, minor;
    const struct dlpack_exchange *older; /* the same API in an older version, or NULL */
    void (*others[3])(void);
    int (*tensor_of)(void *object, struct dlpack_tensor *into); /* NULL where it cannot; on failure a Python error */
    void (*stream)(void);
};

#endif
