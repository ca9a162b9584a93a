/* SPDX-License-Identifier: Apache-2.0 */
/* pccheck_async._ext: its functions and constants. Contracts for callers: pccheck_async/_ext.pyi. */
#include "binding.h"

#include <errno.h>

#include "crc32.h"
#include "guard.h"
#include "persist.h"
#include "transfer.h"

/* Below this, releasing the GIL costs more than it gives. */
#define GIL_WORTHY_BYTES ((Py_ssize_t)64 << 10)

static PyObject *ext_crc32(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer view;
    unsigned int start = 0;
    uint32_t value;

    if (!PyArg_ParseTuple(args, "y*|I:crc32", &view, &start)) /* "I" keeps 32 bits, as zlib does */
        return NULL;
    if (view.len < GIL_WORTHY_BYTES) {
        value = crc32_update(start, view.buf, (size_t)view.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        value = crc32_update(start, view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(value);
}

static PyObject *ext_crc32_pieces(PyObject *Py_UNUSED(module), PyObject *argument)
{
    struct request request = {.op.kind = OP_CHECKSUM};

    if (PyObject_GetBuffer(argument, &request.view, PyBUF_SIMPLE) < 0)
        return NULL;
    request.op.size = (uint64_t)request.view.len;
    if (request_set_sums(&request) == 0) {
        Py_BEGIN_ALLOW_THREADS
        crc32_pieces(request.view.buf, request.op.size, request.op.sums);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&request.view);
    return request.sums;
}

static PyObject *ext_crc32_combine(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer sums;
    uint64_t size;
    PyObject *value = NULL;

    if (!PyArg_ParseTuple(args, "y*O&:crc32_combine", &sums, request_unsigned, &size))
        return NULL;
    if (sums.len % 4 == 0 && (uint64_t)sums.len / 4 == crc32_piece_count(size))
        value = PyLong_FromUnsignedLong(crc32_combine(sums.buf, size));
    else
        PyErr_Format(PyExc_ValueError, "%zd bytes are no table of checksums for %llu", sums.len,
                     (unsigned long long)size);
    PyBuffer_Release(&sums);
    return value;
}

/* Work on memory that may be part of a mapped file: 0, or -1 and an OSError. */
static int run_guarded(void (*body)(void *), void *argument, Py_ssize_t size)
{
    int64_t error;
    if (size < GIL_WORTHY_BYTES) {
        error = guard_run(body, argument);
    } else {
        Py_BEGIN_ALLOW_THREADS
        error = guard_run(body, argument);
        Py_END_ALLOW_THREADS
    }
    if (error == 0)
        return 0;
    errno = (int)-error;
    PyErr_SetFromErrno(PyExc_OSError);
    return -1;
}

static PyObject *ext_gather(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct request request = {.op.kind = OP_GATHER};
    PyObject *segments;
    PyObject *sums = NULL;

    if (!PyArg_ParseTuple(args, "Sw*:gather", &segments, &request.view))
        return NULL;
    request.op.size = (uint64_t)request.view.len;
    if (request_set_segments(&request, segments, Py_None) == 0 && request_set_sums(&request) == 0) {
        request.op.data = request.view.buf;
        if (run_guarded(op_gather, &request.op, request.view.len) == 0)
            sums = Py_NewRef(request.sums);
    }
    PyBuffer_Release(&request.view);
    Py_DECREF(request.segments);
    Py_DECREF(request.keepalive);
    Py_XDECREF(request.sums);
    return sums;
}

static PyObject *ext_dio_alignment(PyObject *Py_UNUSED(module), PyObject *argument)
{
    uint32_t memory = 0, offset = 0;
    int error;
    const int fd = PyObject_AsFileDescriptor(argument);
    if (fd < 0)
        return NULL;
    Py_BEGIN_ALLOW_THREADS /* a network filesystem may have to ask */
    error = transfer_alignment(fd, &memory, &offset);
    Py_END_ALLOW_THREADS
    if (error == -ENODATA)
        Py_RETURN_NONE;
    if (error < 0) {
        errno = -error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    return Py_BuildValue("II", memory, offset);
}

struct store {
    Py_buffer into, data;
};

static void store(void *argument)
{
    const struct store *store = argument;
    persist_copy(store->into.buf, store->data.buf, (size_t)store->data.len);
}

static void write_back(void *argument)
{
    const Py_buffer *view = argument;
    persist_select()->write_back((uintptr_t)view->buf, (uintptr_t)view->buf + (uintptr_t)view->len);
}

static PyObject *ext_store(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct store views;
    int failed = -1;

    if (!PyArg_ParseTuple(args, "w*y*:store", &views.into, &views.data))
        return NULL;
    if (views.into.len == views.data.len)
        failed = run_guarded(store, &views, views.data.len);
    else
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fill %zd", views.data.len, views.into.len);
    PyBuffer_Release(&views.into);
    PyBuffer_Release(&views.data);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *ext_write_back(PyObject *Py_UNUSED(module), PyObject *argument)
{
    Py_buffer view;
    int failed = -1;

    if (PyObject_GetBuffer(argument, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (persist_select())
        failed = run_guarded(write_back, &view, view.len);
    else
        PyErr_SetString(PyExc_NotImplementedError, "no instruction is known that writes lines back here");
    PyBuffer_Release(&view);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *ext_fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(nothing))
{
    const struct persist_variant *variant = persist_select();
    if (variant)
        variant->fence();
    Py_RETURN_NONE;
}

static PyMethodDef ext_methods[] = {
    {"crc32", ext_crc32, METH_VARARGS, NULL},
    {"crc32_pieces", ext_crc32_pieces, METH_O, NULL},
    {"crc32_combine", ext_crc32_combine, METH_VARARGS, NULL},
    {"gather", ext_gather, METH_VARARGS, NULL},
    {"store", ext_store, METH_VARARGS, NULL},
    {"write_back", ext_write_back, METH_O, NULL},
    {"fence", ext_fence, METH_NOARGS, NULL},
    {"look", tensors_look, METH_VARARGS, NULL},
    {"match", outline_match, METH_VARARGS, NULL},
    {"dio_alignment", ext_dio_alignment, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static int ext_exec(PyObject *module)
{
    static const struct {
        const char *name;
        int kind;
    } kinds[OP_KINDS] = {
        {"WRITE", OP_WRITE},   {"READ", OP_READ},       {"FLUSH", OP_FLUSH},
        {"GATHER", OP_GATHER}, {"SCATTER", OP_SCATTER}, {"CHECKSUM", OP_CHECKSUM}, {"CHAIN", OP_CHAIN},
        {"UNLOCK", OP_UNLOCK}, {"LINKED", OP_LINKED},
    };
    PyObject *type = PyType_FromModuleAndSpec(module, &queue_object_spec, NULL);
    if (!type || PyModule_AddType(module, (PyTypeObject *)type) < 0)
        goto fail;
    for (size_t i = 0; i < OP_KINDS; i++) {
        if (PyModule_AddIntConstant(module, kinds[i].name, kinds[i].kind) < 0)
            goto fail;
    }
    if (PyModule_AddStringConstant(module, "CRC_IMPLEMENTATION", crc32_select()->name) < 0)
        goto fail;
    const struct persist_variant *persist = persist_select();
    if (PyModule_AddStringConstant(module, "PERSIST_IMPLEMENTATION", persist ? persist->name : "") < 0)
        goto fail;
    Py_DECREF(type);
    return 0;

fail:
    Py_XDECREF(type);
    return -1;
}

/* Python 3.12 and newer load the module into subinterpreters only if it says that it can do that. Python 3.11 refuses a
 * module with this slot, and its headers, for which this is built, have no names for the two. */
#define MULTIPLE_INTERPRETERS 3
#define PER_INTERPRETER_GIL_SUPPORTED ((void *)2)

static PyModuleDef_Slot ext_slots[] = {
    {Py_mod_exec, ext_exec},
    {0, NULL}, /* since 3.12: MULTIPLE_INTERPRETERS */
    {0, NULL},
};

static struct PyModuleDef ext_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "pccheck_async._ext",
    .m_doc = "Operations on bytes in C: see the stub beside it for the contracts.",
    .m_size = 0, /* the module has no state: a queue holds all that it needs */
    .m_methods = ext_methods,
    .m_slots = ext_slots,
};

PyMODINIT_FUNC PyInit__ext(void)
{
    if (Py_Version >= 0x030c0000)
        ext_slots[1] = (PyModuleDef_Slot){MULTIPLE_INTERPRETERS, PER_INTERPRETER_GIL_SUPPORTED};
    return PyModuleDef_Init(&ext_module);
}
