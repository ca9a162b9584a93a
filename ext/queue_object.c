/* SPDX-License-Identifier: Apache-2.0 */
#include "binding.h"

#include <errno.h>
#include <stdbool.h>
#include <unistd.h>

#include "queue.h"

typedef struct {
    PyObject_HEAD
    struct queue *queue;
    struct request *live; /* submitted and not reaped, for the garbage collector */
    Py_ssize_t running;   /* how many those are */
    pid_t pid;            /* a forked child has neither the threads nor usable locks */
    bool closing;
} QueueObject;

static void request_link(QueueObject *self, struct request *request)
{
    request->before = NULL;
    request->after = self->live;
    if (self->live)
        self->live->before = request;
    self->live = request;
    self->running++;
}

static void request_unlink(QueueObject *self, struct request *request)
{
    if (request->before)
        request->before->after = request->after;
    else
        self->live = request->after;
    if (request->after)
        request->after->before = request->before;
    self->running--;
}

static bool is_forked(const QueueObject *self)
{
    return self->pid != getpid();
}

static int check_open(const QueueObject *self)
{
    if (is_forked(self)) {
        PyErr_Format(PyExc_RuntimeError, "the queue belongs to process %ld and does not work in its forked children",
                     (long)self->pid);
        return -1;
    }
    if (self->closing) {
        PyErr_SetString(PyExc_ValueError, "the queue is closed");
        return -1;
    }
    return 0;
}

static PyObject *queue_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"io_threads", "copy_threads", NULL};
    int io_threads, copy_threads, error;
    QueueObject *self = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii:Queue", names, &io_threads, &copy_threads))
        goto fail;
    if (io_threads < 1 || io_threads > QUEUE_MOST_THREADS || copy_threads < 1 || copy_threads > QUEUE_MOST_THREADS) {
        PyErr_Format(PyExc_ValueError, "a queue has 1 to %d threads of each kind, not %d and %d", QUEUE_MOST_THREADS,
                     io_threads, copy_threads);
        goto fail;
    }
    self = (QueueObject *)PyType_GenericAlloc(type, 0);
    if (!self)
        goto fail;
    self->pid = getpid();
    error = queue_open((unsigned)io_threads, (unsigned)copy_threads, &self->queue);
    if (error < 0) {
        errno = -error;
        PyErr_SetFromErrno(PyExc_OSError);
        goto fail;
    }
    return (PyObject *)self;

fail:
    Py_XDECREF((PyObject *)self);
    return NULL;
}

static PyObject *queue_fileno(QueueObject *self, PyObject *Py_UNUSED(ignored))
{
    return check_open(self) < 0 ? NULL : PyLong_FromLong(queue_fd(self->queue));
}

static PyObject *queue_py_submit(QueueObject *self, PyObject *batch)
{
    struct op_list requests = {0};
    PyObject *items = PySequence_Tuple(batch); /* a copy: parsing an operation may run code that changes the list */
    if (!items)
        goto fail;
    for (Py_ssize_t i = 0; i < PyTuple_Size(items); i++) {
        struct request *request = PyMem_Calloc(1, sizeof *request);
        if (!request) {
            PyErr_NoMemory();
            goto fail;
        }
        op_list_push(&requests, &request->op);
        if (request_parse(request, PyTuple_GetItem(items, i)) < 0)
            goto fail;
    }
    if (check_open(self) < 0) /* only now: parsing may have run code that closed the queue */
        goto fail;
    Py_DECREF(items);
    for (struct op *op = requests.first; op; op = op->next)
        request_link(self, (struct request *)op);
    queue_submit(self->queue, &requests);
    Py_RETURN_NONE;

fail:
    request_free_all(&requests);
    Py_XDECREF(items);
    return NULL;
}

static PyObject *queue_py_reap(QueueObject *self, PyObject *Py_UNUSED(ignored))
{
    struct op_list ended = {0};
    PyObject *list = NULL;

    if (is_forked(self)) {
        check_open(self);
        return NULL;
    }
    ended = queue_reap(self->queue);
    list = PyList_New((Py_ssize_t)ended.count);
    if (!list)
        goto fail;
    Py_ssize_t i = 0;
    for (const struct op *op = ended.first; op; op = op->next, i++) {
        PyObject *entry = request_completion(op);
        if (!entry)
            goto fail;
        PyList_SetItem(list, i, entry);
    }
    /* Only now: releasing objects may run arbitrary code, this function included. */
    for (struct op *op; (op = op_list_pop(&ended)) != NULL;) {
        request_unlink(self, (struct request *)op);
        request_free((struct request *)op);
    }
    return list;

fail:
    queue_unreap(self->queue, &ended);
    Py_XDECREF(list);
    return NULL;
}

static PyObject *queue_py_cancel(QueueObject *self, PyObject *argument)
{
    uint64_t token;
    if (!request_unsigned(argument, &token) || check_open(self) < 0)
        return NULL;
    return PyBool_FromLong(queue_cancel(self->queue, token));
}

static void close_queue(QueueObject *self)
{
    self->closing = true;
    if (is_forked(self)) {
        queue_disown(self->queue);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    queue_close(self->queue);
    Py_END_ALLOW_THREADS
}

static PyObject *queue_py_close(QueueObject *self, PyObject *Py_UNUSED(ignored))
{
    close_queue(self);
    Py_RETURN_NONE;
}

static PyObject *queue_get_running(QueueObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(self->running);
}

static int queue_traverse(QueueObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    if (is_forked(self))
        return 0; /* a child never releases what the queue holds */
    for (const struct request *request = self->live; request; request = request->after) {
        const int stop = request_traverse(request, visit, arg);
        if (stop)
            return stop;
    }
    return 0;
}

static int queue_clear(QueueObject *self)
{
    if (!self->queue || is_forked(self))
        return 0;
    (void)queue_reap(self->queue); /* every live request is in it */
    while (self->live) {
        struct request *request = self->live;
        request_unlink(self, request);
        request_free(request);
    }
    return 0;
}

/* Threads may use buffers until the queue is closed: so a forgotten queue is closed here, before the garbage collector
 * breaks cycles. All requests are released here, too: before Python 3.12.6, breaking the cycle of a memoryview while a
 * buffer of it is held crashes (gh-77894). May run twice, and for an object without references: makes none to it. */
static void queue_finalize(QueueObject *self)
{
    if (!self->queue || is_forked(self))
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (!self->closing) {
        if (PyErr_WarnFormat(PyExc_ResourceWarning, 1, "unclosed <pccheck_async._ext.Queue object at %p>", self) < 0)
            PyErr_WriteUnraisable((PyObject *)Py_TYPE((PyObject *)self));
        close_queue(self);
    }
    queue_clear(self);
    PyErr_Restore(type, value, traceback);
}

static void queue_dealloc(QueueObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    queue_finalize(self);
    if (self->queue && !is_forked(self)) /* a child leaks it: threads that do not exist there may hold its locks */
        queue_free(self->queue);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMethodDef queue_methods[] = {
    {"fileno", (PyCFunction)(void (*)(void))queue_fileno, METH_NOARGS, NULL},
    {"submit", (PyCFunction)(void (*)(void))queue_py_submit, METH_O, NULL},
    {"reap", (PyCFunction)(void (*)(void))queue_py_reap, METH_NOARGS, NULL},
    {"cancel", (PyCFunction)(void (*)(void))queue_py_cancel, METH_O, NULL},
    {"close", (PyCFunction)(void (*)(void))queue_py_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef queue_getset[] = {
    {"running", (getter)(void (*)(void))queue_get_running, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(queue_doc, "Queue(io_threads, copy_threads)\n--\n\n"
                        "Operations on bytes, submitted in batches, finished on one eventfd, reaped in batches.");

static PyType_Slot queue_slots[] = {
    {Py_tp_doc, (void *)queue_doc},
    {Py_tp_new, queue_new},
    {Py_tp_methods, queue_methods},
    {Py_tp_getset, queue_getset},
    {Py_tp_traverse, queue_traverse},
    {Py_tp_clear, queue_clear},
    {Py_tp_finalize, queue_finalize},
    {Py_tp_dealloc, queue_dealloc},
    {0, NULL},
};

PyType_Spec queue_object_spec = {
    .name = "pccheck_async._ext.Queue",
    .basicsize = sizeof(QueueObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = queue_slots,
};
