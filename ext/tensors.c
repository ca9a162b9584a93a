/* SPDX-License-Identifier: Apache-2.0 */
/* All that the layout of tensors depends on, in one pass: see look() in the stub. */
#include "binding.h"

#include <errno.h>
#include <string.h>

#include "dlpack_forms.h"

#define COMPLEX 5 /* the code of complex dtypes in DLPack */
#define BLOCK 256 /* tensors; what torch touches of so many stays in a core's cache */

/* What of a tensor is neither in its form nor in its storage. */
struct trait {
    int64_t offset; /* bytes from the beginning of its storage */
    uint64_t dtype; /* identity of the dtype, if DLPack has one word for several */
    uint8_t requires_grad, negative, conjugate;
};

struct memory {
    uint64_t address, size;
};

/* Some successive tensors. */
struct block {
    Py_ssize_t first, count;
    struct dlpack_tensor described[BLOCK];
    struct trait *traits;
    struct memory *memory;
};

/* The functions of torch, in the order of the tuple in layout_cache.py. */
struct calls {
    PyObject *storage, *address, *size, *is_neg, *is_conj, *dtype, *requires_grad;
};

static PyObject *call(PyObject *function, PyObject *argument)
{
    return PyObject_CallFunctionObjArgs(function, argument, NULL);
}

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

static void set_dlpack_error(int error)
{
    if (error == -ENOMEM)
        PyErr_NoMemory();
    else if (error == -ENODATA)
        PyErr_SetString(PyExc_NotImplementedError, "DLPack gives no shape or no strides of a tensor");
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "DLPack failed on a tensor without saying why");
}

/* Read the remaining traits of one tensor, which few tensors have: 0, or -1 and a Python error. */
static int look_closer(PyObject *tensor, const struct calls *calls, const struct dlpack_tensor *described,
                       const struct memory *memory, struct trait *trait)
{
    const uint64_t first = described->data ? (uint64_t)(uintptr_t)described->data + described->offset : 0;
    if (first) /* there are elements */
        trait->offset = (int64_t)(first - memory->address);
    if (described->dtype.code == COMPLEX && is_true(call(calls->is_conj, tensor), &trait->conjugate) < 0)
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

/* Read all but the forms; set the items of `storages`: 0, or -1 and a Python error. A loop for each function: its calls
 * in a row take a tenth less time than the calls of all functions in turn, as the processor predicts these better. */
static int look_at(struct block *block, const struct calls *calls, PyObject *tensors, PyObject *storages)
{
    const Py_ssize_t first = block->first, count = block->count;
    struct trait *traits = block->traits;
    struct memory *memory = block->memory;

    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *storage = call(calls->storage, PyList_GetItem(tensors, first + i));
        if (!storage || PyList_SetItem(storages, first + i, storage) < 0)
            return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (number(call(calls->address, PyList_GetItem(storages, first + i)), &memory[i].address) < 0)
            return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (number(call(calls->size, PyList_GetItem(storages, first + i)), &memory[i].size) < 0)
            return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (is_true(PyObject_GetAttr(PyList_GetItem(tensors, first + i), calls->requires_grad),
                    &traits[i].requires_grad) < 0)
            return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (is_true(call(calls->is_neg, PyList_GetItem(tensors, first + i)), &traits[i].negative) < 0)
            return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (look_closer(PyList_GetItem(tensors, first + i), calls, &block->described[i], &memory[i], &traits[i]) < 0)
            return -1;
    return 0;
}

PyObject *tensors_look(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *given, *result = NULL;
    struct calls calls;
    struct dlpack_forms forms = {0};
    struct block block;

    if (!PyArg_ParseTuple(args, "OO!(OOOOOOO):look", &capsule, &PyList_Type, &given, &calls.storage, &calls.address,
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
    const Py_ssize_t count = PyList_Size(given);
    PyObject *tensors = PyList_GetSlice(given, 0, count); /* the calls may run code that empties the list */
    PyObject *traits = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(struct trait));
    PyObject *memory = PyBytes_FromStringAndSize(NULL, count * (Py_ssize_t)sizeof(struct memory));
    PyObject *storages = PyList_New(count);
    if (!tensors || !traits || !memory || !storages)
        goto end;
    memset(PyBytes_AsString(traits), 0, (size_t)count * sizeof(struct trait));
    for (block.first = 0; block.first < count; block.first += block.count) {
        block.count = count - block.first < BLOCK ? count - block.first : BLOCK;
        block.traits = (struct trait *)PyBytes_AsString(traits) + block.first;
        block.memory = (struct memory *)PyBytes_AsString(memory) + block.first;
        for (Py_ssize_t i = 0; i < block.count; i++) {
            PyObject *tensor = PyList_GetItem(tensors, block.first + i);
            const int error = dlpack_forms_add(&forms, exchange, tensor, &block.described[i]);
            if (error) {
                set_dlpack_error(error);
                goto end;
            }
        }
        if (look_at(&block, &calls, tensors, storages) < 0)
            goto end;
    }
    result = Py_BuildValue("NOOO", PyBytes_FromStringAndSize(forms.table, (Py_ssize_t)forms.used), traits, memory,
                           storages);
end:
    dlpack_forms_free(&forms);
    Py_XDECREF(tensors);
    Py_XDECREF(traits);
    Py_XDECREF(memory);
    Py_XDECREF(storages);
    return result;
}
