/* SPDX-License-Identifier: Apache-2.0 */
/* Python's headers and what the files that bind to it share: module, queue_object, request,
 * outline, tensors. All others are plain C. */
#ifndef PCCHECK_BINDING_H
#define PCCHECK_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* such builds have no stable ABI yet */
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include "operation.h"

/* The type pccheck_async._ext.Queue. */
extern PyType_Spec queue_object_spec;

/* pccheck_async._ext.match */
PyObject *outline_match(PyObject *module, PyObject *args);

/* pccheck_async._ext.look */
PyObject *tensors_look(PyObject *module, PyObject *args);

/* An operation with the Python objects that keep its memory where it is, from submit() until it is reaped. */
struct request {
    struct op op; /* first: a pointer to it is a pointer to the request */
    Py_buffer view;
    PyObject *segments;
    PyObject *keepalive;
    PyObject *sums; /* bytes, filled by gather and checksum */
    struct request *before, *after; /* in the list of the live requests of a queue */
};

/* PyArg converter into a uint64_t: an int that is not negative. */
int request_unsigned(PyObject *object, void *into);

/* Fill a zeroed request from the tuple `item`: 0, or -1 and a Python error. To be freed in either case. */
int request_parse(struct request *request, PyObject *item);

/* Let the request, its kind and size set, own `segments` and `keepalive`; check that the table stays inside the buffer:
 * 0, or -1 and a Python error. */
int request_set_segments(struct request *request, PyObject *segments, PyObject *keepalive);

/* Let the request, its size set, own a table for checksums: 0, or -1 and a Python error. */
int request_set_sums(struct request *request);

/* Return the tuple that reap() reports for an ended operation; NULL and a Python error if memory ran out. */
PyObject *request_completion(const struct op *op);

/* Visit, for the garbage collector, all objects that may be part of a cycle. */
int request_traverse(const struct request *request, visitproc visit, void *arg);

/* Release all that the request owns, and free it. That may run arbitrary Python code. */
void request_free(struct request *request);

/* Free all requests of a list, and empty it. */
void request_free_all(struct op_list *list);

#endif
