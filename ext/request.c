/* SPDX-License-Identifier: Apache-2.0 */
#include "binding.h"

#include <stdbool.h>

#include "copy.h"
#include "crc32.h"

void request_free(struct request *request)
{
    for (struct op *step = request->op.steps, *next; step; step = next) {
        next = step->next;
        request_free((struct request *)step);
    }
    if (request->view.obj)
        PyBuffer_Release(&request->view);
    Py_XDECREF(request->segments);
    Py_XDECREF(request->keepalive);
    Py_XDECREF(request->sums);
    PyMem_Free(request);
}

void request_free_all(struct op_list *list)
{
    for (struct op *op; (op = op_list_pop(list)) != NULL;)
        request_free((struct request *)op);
}

int request_traverse(const struct request *request, visitproc visit, void *arg)
{
    Py_VISIT(request->view.obj);
    Py_VISIT(request->segments); /* a subclass of bytes may refer to anything */
    Py_VISIT(request->keepalive);
    for (const struct op *step = request->op.steps; step; step = step->next)
        Py_VISIT(((const struct request *)step)->view.obj);
    return 0;
}

int request_unsigned(PyObject *object, void *into)
{
    const unsigned long long value = PyLong_AsUnsignedLongLong(object);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError))
            PyErr_Format(PyExc_ValueError, "%R is negative or has more than 64 bits", object);
        return 0;
    }
    *(uint64_t *)into = value;
    return 1;
}

static int as_checksum(PyObject *object, void *into)
{
    uint64_t value;
    if (!request_unsigned(object, &value))
        return 0;
    if (value > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "checksum %R has more than 32 bits", object);
        return 0;
    }
    *(uint32_t *)into = (uint32_t)value;
    return 1;
}

int request_set_segments(struct request *request, PyObject *segments, PyObject *keepalive)
{
    struct op *op = &request->op;
    const size_t bytes = (size_t)PyBytes_Size(segments);
    size_t bad;

    request->segments = Py_NewRef(segments);
    request->keepalive = Py_NewRef(keepalive);
    op->segments = PyBytes_AsString(segments);
    op->segment_count = bytes / sizeof(struct copy_segment);
    if (bytes % sizeof(struct copy_segment) != 0) {
        PyErr_Format(PyExc_ValueError, "a table of segments has %zu bytes, no multiple of %zu", bytes,
                     sizeof(struct copy_segment));
        return -1;
    }
    if (copy_check(op->segments, op->segment_count, op->size, op->kind == OP_GATHER, &bad) < 0) {
        PyErr_Format(PyExc_ValueError, "segment %zu lies outside its buffer of %zd bytes%s", bad, request->view.len,
                     op->kind == OP_GATHER ? ", or not behind the one before it" : "");
        return -1;
    }
    return 0;
}

int request_set_sums(struct request *request)
{
    request->sums = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(4 * crc32_piece_count(request->op.size)));
    if (!request->sums)
        return -1;
    request->op.sums = (uint8_t *)PyBytes_AsString(request->sums);
    return 0;
}

static int parse_step(struct request *step, PyObject *item);

/* Let the request own the operations of a chain. */
static int request_set_steps(struct request *request, PyObject *items)
{
    struct op **last = &request->op.steps;
    for (Py_ssize_t i = 0; i < PyTuple_Size(items); i++) {
        struct request *step = PyMem_Calloc(1, sizeof *step);
        if (!step) {
            PyErr_NoMemory();
            return -1;
        }
        *last = &step->op;
        last = &step->op.next;
        if (parse_step(step, PyTuple_GetItem(items, i)) < 0)
            return -1;
    }
    if (!request->op.steps) {
        PyErr_SetString(PyExc_ValueError, "a chain has at least one step");
        return -1;
    }
    return 0;
}

/* Read the number of a kind at that place of a tuple: 0, or -1 and a Python error. */
static int kind_at(PyObject *item, Py_ssize_t place, long *number)
{
    if (!PyTuple_Check(item) || PyTuple_Size(item) <= place) {
        PyErr_SetString(PyExc_TypeError, place == 0 ? "a step of a chain is a tuple (kind, ...)"
                                                    : "an operation is a tuple (token, kind, ...)");
        return -1;
    }
    *number = PyLong_AsLong(PyTuple_GetItem(item, place));
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

/* Let the request, its kind and offset set, own the buffer, if there is one. */
static int set_data(struct request *request, PyObject *data)
{
    struct op *op = &request->op;
    if (data) {
        const bool fills = op->kind == OP_READ || op->kind == OP_GATHER;
        if (PyObject_GetBuffer(data, &request->view, fills ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
            return -1;
        op->data = request->view.buf;
        op->size = (uint64_t)request->view.len;
    }
    if (op->offset > (uint64_t)INT64_MAX - op->size) {
        PyErr_Format(PyExc_ValueError, "no file reaches to offset %llu", (unsigned long long)op->offset);
        return -1;
    }
    return 0;
}

/* A step has no token: it cannot be cancelled by itself. */
static int parse_step(struct request *step, PyObject *item)
{
    struct op *op = &step->op;
    PyObject *kind, *data = NULL; /* not converted twice: __index__ may return something else */
    long number;

    if (kind_at(item, 0, &number) < 0)
        return -1;
    switch (number) {
    case OP_WRITE:
        if (!PyArg_ParseTuple(item, "OiO&O:step", &kind, &op->fd, request_unsigned, &op->offset, &data))
            return -1;
        break;
    case OP_FLUSH:
    case OP_UNLOCK:
    case OP_LINKED:
        if (!PyArg_ParseTuple(item, "Oi:step", &kind, &op->fd))
            return -1;
        break;
    default: /* chains, too: nesting them could overflow the stack */
        PyErr_SetString(PyExc_ValueError, "a chain is made of WRITE, FLUSH, UNLOCK and LINKED steps");
        return -1;
    }
    op->kind = (enum op_kind)number;
    return set_data(step, data);
}

int request_parse(struct request *request, PyObject *item)
{
    struct op *op = &request->op;
    PyObject *kind, *data = NULL, *segments = NULL, *keepalive = NULL, *steps = NULL;
    long number;
    bool parsed = false;

    if (kind_at(item, 1, &number) < 0)
        return -1;
    switch (number) { /* not converted twice: __index__ may return something else */
    case OP_WRITE:
    case OP_READ:
        parsed = PyArg_ParseTuple(item, "O&OiO&O:transfer", request_unsigned, &op->token, &kind, &op->fd,
                                  request_unsigned, &op->offset, &data);
        break;
    case OP_FLUSH:
        parsed = PyArg_ParseTuple(item, "O&Oi:flush", request_unsigned, &op->token, &kind, &op->fd);
        break;
    case OP_GATHER:
        parsed = PyArg_ParseTuple(item, "O&OSOO:gather", request_unsigned, &op->token, &kind, &segments, &data,
                                  &keepalive);
        break;
    case OP_SCATTER:
        parsed = PyArg_ParseTuple(item, "O&OOO&SO:scatter", request_unsigned, &op->token, &kind, &data, as_checksum,
                                  &op->checksum, &segments, &keepalive);
        break;
    case OP_CHECKSUM:
        parsed = PyArg_ParseTuple(item, "O&OO:checksum", request_unsigned, &op->token, &kind, &data);
        break;
    case OP_CHAIN:
        parsed = PyArg_ParseTuple(item, "O&OO!:chain", request_unsigned, &op->token, &kind, &PyTuple_Type, &steps);
        break;
    case OP_UNLOCK:
    case OP_LINKED:
        PyErr_SetString(PyExc_ValueError, "UNLOCK and LINKED are steps of a chain, not operations");
        break;
    default:
        PyErr_Format(PyExc_ValueError, "no kind of operation has the number %ld", number);
    }
    if (!parsed)
        return -1;

    op->kind = (enum op_kind)number;
    if (set_data(request, data) < 0)
        return -1;
    if ((op->kind == OP_GATHER || op->kind == OP_CHECKSUM) && request_set_sums(request) < 0)
        return -1;
    if (steps)
        return request_set_steps(request, steps);
    return segments ? request_set_segments(request, segments, keepalive) : 0;
}

/* Return how each performed step ended: a list of (result, seconds of the monotonic clock). */
static PyObject *steps_of(const struct op *chain)
{
    PyObject *list = PyList_New((Py_ssize_t)chain->steps_ended);
    const struct op *step = chain->steps;
    for (Py_ssize_t i = 0; list && i < PyList_Size(list); i++, step = step->next) {
        PyObject *entry = Py_BuildValue("Ld", (long long)step->result, (double)step->ended_at * 1e-9);
        if (!entry)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, i, entry);
    }
    return list;
}

PyObject *request_completion(const struct op *op)
{
    const unsigned long long token = op->token;
    const long long result = op->result;
    PyObject *const sums = ((const struct request *)op)->sums;
    if (op->result >= 0 && sums)
        return Py_BuildValue("KLO", token, result, sums);
    if (op->steps_ended > 0) {
        PyObject *steps = steps_of(op);
        return steps ? Py_BuildValue("KLN", token, result, steps) : NULL;
    }
    return Py_BuildValue("KLO", token, result, Py_None);
}
