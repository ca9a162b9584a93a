/* SPDX-License-Identifier: Apache-2.0 */
/* The forms of tensors (device, dtype, shape, strides) as one table of bytes, obtained through DLPack. */
#ifndef PCCHECK_DLPACK_FORMS_H
#define PCCHECK_DLPACK_FORMS_H

#include <stddef.h>
#include <stdint.h>

/* ---- DLPack's C exchange API (major version 1): its specification fixes all layouts. */

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

/* ---- The table */

struct dlpack_forms {
    /* Back to back: three int32 (device's type and number, dimensions), dtype, int64 shape, int64 strides. */
    char *table;
    size_t used;
    size_t room;
};

/* Return the API of the major version known here from the list that begins at `exchange`; NULL if there is none. */
const struct dlpack_exchange *dlpack_known(const struct dlpack_exchange *exchange);

/* Fill `tensor` with the description of `object`, and append its form: 0, -ENOMEM, -ENODATA if it has no shape or
 * strides, or -EINVAL if DLPack failed. */
int dlpack_forms_add(struct dlpack_forms *forms, const struct dlpack_exchange *exchange, void *object,
                     struct dlpack_tensor *tensor);

void dlpack_forms_free(struct dlpack_forms *forms);

#endif
