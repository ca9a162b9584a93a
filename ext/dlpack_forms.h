/* The forms of tensors (device, dtype, shape, strides) as one table of bytes, asked through DLPack. */
#ifndef PCCHECK_DLPACK_FORMS_H
#define PCCHECK_DLPACK_FORMS_H

#include <stddef.h>

#include "dlpack.h"

struct dlpack_forms {
    /* Back to back: three int32 (device's type and number, dimensions), dtype, int64 shape, int64 strides, and, where
     * asked for, the address of the first element. */
    char *table;
    size_t used;
    size_t room;
};

/* The API of the major version known here among those that begin at `exchange`, NULL where there is none. */
const struct dlpack_exchange *dlpack_known(const struct dlpack_exchange *exchange);

/* Append the form of `tensor`, with its `address` or without: 0, -ENOMEM, -ENODATA where it has no shape or strides, or
 * -EINVAL where DLPack failed. */
int dlpack_forms_add(struct dlpack_forms *forms, const struct dlpack_exchange *exchange, void *tensor, int address);

void dlpack_forms_free(struct dlpack_forms *forms);

#endif
