/* SPDX-License-Identifier: Apache-2.0 */
/* All that the layout of tensors depends on, in one pass: see look() in the stub. */
#include "binding.h"

#include <errno.h>
#include <string.h>

#include "dlpack_forms.h"

#define COMPLEX 5 /* the code of complex dtypes in DLPack */

/* What of a tensor is neither in its form nor in its storage. */
struct trait {
    int64_t offset; /* bytes from the beginning of its storage */
    uint64_t dtype; /* identity of the dtype, if DLPack has one word for several */
    uint8_t requires_grad, negative, conjugate;
};

struct memory {
    uint64_t address, size;
};

struct found {
    struct trait trait;
    struct memory memory;
};

/* The functions of torch, in the order of the tuple in layout_cache.py. */
struct calls {
    PyObject *storage, *address, *size, *is_neg, *is_conj, *dtype, *requires_grad;
};

static int is_true(PyObject *result, uint8_t *into)
{
    if (!result)
        return -1;
    *into = result == Py_True;
    Py_DECREF(result);
    return 0;
}

static int number(PyObject *result, uint64_t *into)
{
    if (!result)
        return -1;
    *into = PyLong_AsUnsignedLongLong(result);
    Py_DECREF(result);
    return PyErr_Occurred() ? -1 : 0;
}

static int look_at(PyObject *tensor, const struct calls *calls, const struct dlpack_tensor *described,
                   PyObject *storage, struct found *now)
{
    const uint64_t first = described->data ? (uint64_t)(uintptr_t)described->data + described->offset : 0;
    struct trait *trait = &now->trait;
    if (number(PyObject_CallFunctionObjArgs(calls->address, storage, NULL), &now->memory.address) < 0 ||
        number(PyObject_CallFunctionObjArgs(calls->size, storage, NULL), &now->memory.size) < 0 ||
        is_true(PyObject_GetAttr(tensor, calls->requires_grad), &trait->requires_grad) < 0)
        return -1;
    if (first) /* there are elements */
        trait->offset = (int64_t)(first - now->memory.address);
    if (is_true(PyObject_CallFunctionObjArgs(calls->is_neg, tensor, NULL), &trait->negative) < 0)
        return -1;
    if (described->dtype.code == COMPLEX && is_true(PyObject_CallFunctionObjArgs(calls->is_conj, tensor, NULL), &trait->conjugate) < 0)
        return -1;
    if (described->dtype.bits == 8) {
        PyObject *dtype = PyObject_GetAttr(tensor, calls->dtype);
        if (!dtype)
            return -1;
        trait->dtype = (uint64_t)(uintptr_t)dtype;
        Py_DECREF(dtype);
    }
    return 0;
}

static void set_dlpack_error(int error)
{
    if (error == -ENOMEM)
        PyErr_NoMemory();
    else if (error == -ENODATA)
        PyErr_SetString(PyExc_NotImplementedError, "DLPack gives no shape or no strides of a tensor");
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "DLPack failed on a tensor without saying why");
}

PyObject *tensors_look(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *tensors, *result = NULL;
    struct calls calls;
    struct dlpack_forms forms = {0};

    if (!PyArg_ParseTuple(args, "OO!(OOOOOOO):look", &capsule, &PyList_Type, &tensors, &calls.storage, &calls.address,
                          &calls.size, &calls.is_neg, &calls.is_conj, &calls.dtype, &calls.requires_grad))
        return NULL;
    const struct dlpack_exchange *exchange = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE);
    if (!exchange)
        return NULL;
    exchange = dlpack_known(exchange);
    if (!exchange) {
        PyErr_SetString(PyExc_NotImplementedError, "this DLPack API cannot describe a tensor");
        return NULL;
    }
    const Py_ssize_t count = PyList_Size(tensors);
    PyObject *traits = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(struct trait));
    PyObject *memory = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(struct memory));
    PyObject *storages = PyList_New(count);
    if (!traits || !memory || !storages)
        goto end;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i >= PyList_Size(tensors)) { /* the calls may run code that empties the list */
            PyErr_SetString(PyExc_RuntimeError, "the list of tensors changed meanwhile");
            goto end;
        }
        PyObject *tensor = Py_NewRef(PyList_GetItem(tensors, i));
        struct dlpack_tensor described;
        struct found now = {0};
        const int error = dlpack_forms_add(&forms, exchange, tensor, &described);
        PyObject *storage = error ? NULL : PyObject_CallFunctionObjArgs(calls.storage, tensor, NULL);
        int failed = !storage;
        if (storage) {
            PyList_SetItem(storages, i, storage);
            failed = look_at(tensor, &calls, &described, storage, &now) < 0;
        }
        Py_DECREF(tensor);
        if (error)
            set_dlpack_error(error);
        if (failed)
            goto end;
        memcpy(PyBytes_AsString(traits) + i * (Py_ssize_t)sizeof now.trait, &now.trait, sizeof now.trait);
        memcpy(PyBytes_AsString(memory) + i * (Py_ssize_t)sizeof now.memory, &now.memory, sizeof now.memory);
    }
    result = Py_BuildValue("NOOO", PyBytes_FromStringAndSize(forms.table, (Py_ssize_t)forms.used), traits, memory,
                           storages);
end:
    dlpack_forms_free(&forms);
    Py_XDECREF(traits);
    Py_XDECREF(memory);
    Py_XDECREF(storages);
    return result;
}
