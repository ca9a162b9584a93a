/* SPDX-License-Identifier: Apache-2.0 */
#include "dlpack_forms.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

const struct dlpack_exchange *dlpack_known(const struct dlpack_exchange *exchange)
{
    while (exchange && exchange->major > DLPACK_MAJOR)
        exchange = exchange->older;
    return exchange && exchange->major == DLPACK_MAJOR && exchange->tensor_of ? exchange : NULL;
}

static int reserve(struct dlpack_forms *forms, size_t size)
{
    if (size <= forms->room - forms->used)
        return 0;
    const size_t larger = 2 * forms->room + size;
    char *grown = realloc(forms->table, larger);
    if (!grown)
        return -ENOMEM;
    forms->table = grown;
    forms->room = larger;
    return 0;
}

static void put(struct dlpack_forms *forms, const void *data, size_t size)
{
    if (size)
        memcpy(forms->table + forms->used, data, size);
    forms->used += size;
}

int dlpack_forms_add(struct dlpack_forms *forms, const struct dlpack_exchange *exchange, void *object,
                     struct dlpack_tensor *tensor)
{
    *tensor = (struct dlpack_tensor){0};
    if (exchange->tensor_of(object, tensor) != 0)
        return -EINVAL;
    if (tensor->dimensions < 0 || (tensor->dimensions && (!tensor->shape || !tensor->strides)))
        return -ENODATA;
    const int32_t head[] = {tensor->device.type, tensor->device.number, tensor->dimensions};
    const size_t size = (size_t)tensor->dimensions * sizeof(int64_t);
    if (reserve(forms, sizeof head + sizeof tensor->dtype + 2 * size) < 0)
        return -ENOMEM;
    put(forms, head, sizeof head);
    put(forms, &tensor->dtype, sizeof tensor->dtype);
    put(forms, tensor->shape, size);
    put(forms, tensor->strides, size);
    return 0;
}

void dlpack_forms_free(struct dlpack_forms *forms)
{
    free(forms->table);
    *forms = (struct dlpack_forms){0};
}
