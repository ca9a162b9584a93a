/* An operation with the Python objects that keep its memory where it is, from submit() until it is reaped. */
#ifndef PCCHECK_REQUEST_H
#define PCCHECK_REQUEST_H

#include "binding.h"

#include "engine.h"

struct request {
    struct op op; /* first: a pointer to it is a pointer to the request */
    Py_buffer view;
    PyObject *segments;
    PyObject *keepalive;
    struct request *before, *after; /* in the list of the live requests of a queue */
};

/* PyArg converter into a uint64_t: an int that is not negative. */
int request_unsigned(PyObject *object, void *into);

/* Fill a zeroed request with what the tuple `item` says: 0, or -1 and a Python error. To be freed in either case. */
int request_parse(struct request *request, PyObject *item);

/* Let the request, its kind and size set, own `segments` and `keepalive`, and see that the table stays inside the
 * buffer: 0, or -1 and a Python error. */
int request_set_segments(struct request *request, PyObject *segments, PyObject *keepalive);

/* What reap() returns of an operation that has ended; NULL and a Python error where there is no memory for it. */
PyObject *request_completion(const struct op *op);

/* Visit, for the garbage collector, all that may be part of a cycle. */
int request_traverse(const struct request *request, visitproc visit, void *arg);

/* Let go of all that the request owns, and of itself. That may run any code. */
void request_free(struct request *request);

/* Free all requests of a list, and empty it. */
void request_free_all(struct op_list *list);

#endif
