/* pccheck_async._ext: the only file that knows Python. Contracts for callers: pccheck_async/_ext.pyi. */
#define PY_SSIZE_T_CLEAN

#include <Python.h>

#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

#include "copy.h"
#include "crc32.h"
#include "dlpack_forms.h"
#include "queue.h"
#include "transfer.h"

/* Below this, letting go of the GIL costs more than it gives. */
#define GIL_WORTHY_BYTES ((Py_ssize_t)64 << 10)

/* An operation with the Python objects that keep its memory where it is, from submit() until it is reaped. */
struct request {
    struct op op; /* first: a pointer to it is a pointer to the request */
    Py_buffer view;
    PyObject *segments;
    PyObject *keepalive;
    struct request *before, *after; /* in QueueObject.live */
};

typedef struct {
    PyObject_HEAD
    struct queue *queue;
    struct request *live; /* submitted and not reaped, for the garbage collector */
    Py_ssize_t running;   /* how many those are */
    pid_t pid;            /* a forked child has the memory but not the threads, and must not touch the locks */
    bool closing;
} QueueObject;

/* ---- Requests ---- */

static void request_free(struct request *request)
{
    for (struct op *step = request->op.steps, *next; step; step = next) {
        next = step->next;
        request_free((struct request *)step);
    }
    if (request->view.obj)
        PyBuffer_Release(&request->view);
    Py_XDECREF(request->segments);
    Py_XDECREF(request->keepalive);
    PyMem_Free(request);
}

static void free_all(struct op_list *list)
{
    for (struct op *op; (op = op_list_pop(list)) != NULL;)
        request_free((struct request *)op);
}

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

/* PyArg converter: an int of 64 bits, not negative. */
static int as_unsigned(PyObject *object, void *into)
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
    if (!as_unsigned(object, &value))
        return 0;
    if (value > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "checksum %R has more than 32 bits", object);
        return 0;
    }
    *(uint32_t *)into = (uint32_t)value;
    return 1;
}

/* Let the request own `segments` and `keepalive`, and see that the table stays inside the buffer. */
static int request_set_segments(struct request *request, PyObject *segments, PyObject *keepalive)
{
    struct op *op = &request->op;
    const size_t bytes = (size_t)PyBytes_GET_SIZE(segments);
    size_t bad;

    request->segments = Py_NewRef(segments);
    request->keepalive = Py_NewRef(keepalive);
    op->segments = PyBytes_AS_STRING(segments);
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

static int request_parse(struct request *request, PyObject *item);

static bool is_step(const struct op *op)
{
    return op->kind == OP_WRITE || op->kind == OP_FLUSH || op->kind == OP_UNLOCK;
}

/* Let the request own the operations of a chain. */
static int request_set_steps(struct request *request, PyObject *items)
{
    struct op **last = &request->op.steps;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        struct request *step = PyMem_Calloc(1, sizeof *step);
        if (!step) {
            PyErr_NoMemory();
            return -1;
        }
        *last = &step->op;
        last = &step->op.next;
        if (request_parse(step, PyTuple_GET_ITEM(items, i)) < 0)
            return -1;
        if (!is_step(&step->op)) {
            PyErr_SetString(PyExc_ValueError, "a chain is made of writes, flushes and unlocks");
            return -1;
        }
    }
    if (!request->op.steps) {
        PyErr_SetString(PyExc_ValueError, "a chain has at least one step");
        return -1;
    }
    return 0;
}

static int request_parse(struct request *request, PyObject *item)
{
    struct op *op = &request->op;
    PyObject *data = NULL, *segments = NULL, *keepalive = NULL, *steps = NULL;
    long number;
    int kind;
    bool parsed = false;

    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) < 2) {
        PyErr_SetString(PyExc_TypeError, "an operation is a tuple (token, kind, ...)");
        return -1;
    }
    number = PyLong_AsLong(PyTuple_GET_ITEM(item, 1));
    if (number == -1 && PyErr_Occurred())
        return -1;
    switch (number) {
    case OP_WRITE:
    case OP_READ:
        parsed = PyArg_ParseTuple(item, "O&iiO&O:transfer", as_unsigned, &op->token, &kind, &op->fd, as_unsigned,
                                  &op->offset, &data);
        break;
    case OP_FLUSH:
    case OP_UNLOCK:
        parsed = PyArg_ParseTuple(item, "O&ii:descriptor", as_unsigned, &op->token, &kind, &op->fd);
        break;
    case OP_GATHER:
        parsed = PyArg_ParseTuple(item, "O&iSOO:gather", as_unsigned, &op->token, &kind, &segments, &data, &keepalive);
        break;
    case OP_SCATTER:
        parsed = PyArg_ParseTuple(item, "O&iOO&SO:scatter", as_unsigned, &op->token, &kind, &data, as_checksum,
                                  &op->checksum, &segments, &keepalive);
        break;
    case OP_CHECKSUM:
        parsed = PyArg_ParseTuple(item, "O&iO:checksum", as_unsigned, &op->token, &kind, &data);
        break;
    case OP_CHAIN:
        parsed = PyArg_ParseTuple(item, "O&iO!:chain", as_unsigned, &op->token, &kind, &PyTuple_Type, &steps);
        break;
    default:
        PyErr_Format(PyExc_ValueError, "no kind of operation has the number %ld", number);
    }
    if (!parsed)
        return -1;

    op->kind = (enum op_kind)kind;
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
    if (steps)
        return request_set_steps(request, steps);
    return segments ? request_set_segments(request, segments, keepalive) : 0;
}

/* ---- Queue ---- */

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
    static char *names[] = {"io_threads", "copy_threads", "engine", NULL};
    const char *engine_name = "threads";
    const struct engine *engine;
    int io_threads, copy_threads, error;
    QueueObject *self = NULL;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii|s:Queue", names, &io_threads, &copy_threads, &engine_name))
        goto fail;
    if (io_threads < 1 || io_threads > ENGINE_MOST_THREADS || copy_threads < 1 || copy_threads > ENGINE_MOST_THREADS) {
        PyErr_Format(PyExc_ValueError, "a queue has 1 to %d threads of each kind, not %d and %d", ENGINE_MOST_THREADS,
                     io_threads, copy_threads);
        goto fail;
    }
    engine = queue_engine(engine_name);
    if (!engine) {
        PyErr_Format(PyExc_ValueError, "there is no engine named '%s'", engine_name);
        goto fail;
    }
    self = (QueueObject *)type->tp_alloc(type, 0);
    if (!self)
        goto fail;
    self->pid = getpid();
    error = queue_open(engine, &(struct engine_options){(unsigned)io_threads, (unsigned)copy_threads}, &self->queue);
    if (error < 0) {
        errno = -error;
        PyErr_SetFromErrno(PyExc_OSError);
        goto fail;
    }
    return (PyObject *)self;

fail:
    Py_XDECREF(self);
    return NULL;
}

static PyObject *queue_fileno(QueueObject *self, PyObject *Py_UNUSED(ignored))
{
    return check_open(self) < 0 ? NULL : PyLong_FromLong(queue_fd(self->queue));
}

static PyObject *queue_py_submit(QueueObject *self, PyObject *batch)
{
    struct op_list requests = {0};
    PyObject *items = PySequence_Tuple(batch); /* a copy: converting an operation may run code that changes a list */
    if (!items)
        goto fail;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items); i++) {
        struct request *request = PyMem_Calloc(1, sizeof *request);
        if (!request) {
            PyErr_NoMemory();
            goto fail;
        }
        op_list_push(&requests, &request->op);
        if (request_parse(request, PyTuple_GET_ITEM(items, i)) < 0)
            goto fail;
        if (request->op.kind == OP_UNLOCK) {
            PyErr_SetString(PyExc_ValueError, "only a chain unlocks: by itself it is a system call that never waits");
            goto fail;
        }
    }
    if (check_open(self) < 0) /* only now: the same code may have closed the queue */
        goto fail;
    Py_DECREF(items);
    for (struct op *op = requests.first; op; op = op->next)
        request_link(self, (struct request *)op);
    queue_submit(self->queue, &requests);
    Py_RETURN_NONE;

fail:
    free_all(&requests);
    Py_XDECREF(items);
    return NULL;
}

/* How each step that was performed ended: a list of (result, seconds of the monotonic clock). */
static PyObject *steps_of(const struct op *chain)
{
    PyObject *list = PyList_New((Py_ssize_t)chain->steps_ended);
    const struct op *step = chain->steps;
    for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(list); i++, step = step->next) {
        PyObject *entry = Py_BuildValue("Ld", (long long)step->result, (double)step->ended_at * 1e-9);
        if (!entry)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, entry);
    }
    return list;
}

static PyObject *completion(const struct op *op)
{
    const unsigned long long token = op->token;
    const long long result = op->result;
    if (op->result >= 0 && (op->kind == OP_GATHER || op->kind == OP_CHECKSUM))
        return Py_BuildValue("KLk", token, result, (unsigned long)op->checksum);
    if (op->steps_ended > 0) {
        PyObject *steps = steps_of(op);
        return steps ? Py_BuildValue("KLN", token, result, steps) : NULL;
    }
    return Py_BuildValue("KLO", token, result, Py_None);
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
        PyObject *entry = completion(op);
        if (!entry)
            goto fail;
        PyList_SET_ITEM(list, i, entry);
    }
    /* Only now, since letting go of objects runs any code, this function included. */
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
    if (!as_unsigned(argument, &token) || check_open(self) < 0)
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
    Py_VISIT(Py_TYPE(self));
    for (struct request *request = self->live; request; request = request->after) {
        Py_VISIT(request->view.obj);
        Py_VISIT(request->keepalive);
        for (struct op *step = request->op.steps; step; step = step->next)
            Py_VISIT(((struct request *)step)->view.obj);
    }
    return 0;
}

/* Nothing may be let go of while a thread may use it: so this is where a forgotten queue is closed, before
 * queue_clear() breaks cycles. */
static void queue_finalize(QueueObject *self)
{
    if (!self->queue || self->closing || is_forked(self))
        return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (PyErr_ResourceWarning((PyObject *)self, 1, "unclosed %R", self) < 0)
        PyErr_WriteUnraisable((PyObject *)self);
    close_queue(self);
    PyErr_Restore(type, value, traceback);
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

static void queue_dealloc(QueueObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    if (PyObject_CallFinalizerFromDealloc((PyObject *)self) < 0)
        return;
    PyObject_GC_UnTrack(self);
    if (self->queue && !is_forked(self)) { /* a child leaks it: locks of vanished threads guard it */
        queue_clear(self);
        queue_free(self->queue);
    }
    type->tp_free(self);
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

PyDoc_STRVAR(queue_doc, "Queue(io_threads, copy_threads, engine='threads')\n--\n\n"
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

static PyType_Spec queue_spec = {
    .name = "pccheck_async._ext.Queue",
    .basicsize = sizeof(QueueObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = queue_slots,
};

/* ---- Functions ---- */

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

static PyObject *ext_gather(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct request request = {.op.kind = OP_GATHER};
    PyObject *segments;
    PyObject *checksum = NULL;

    if (!PyArg_ParseTuple(args, "Sw*:gather", &segments, &request.view))
        return NULL;
    request.op.size = (uint64_t)request.view.len;
    if (request_set_segments(&request, segments, Py_None) == 0) {
        const struct op *op = &request.op;
        if (request.view.len < GIL_WORTHY_BYTES) {
            copy_gather(op->segments, op->segment_count, request.view.buf, op->size, &request.op.checksum);
        } else {
            Py_BEGIN_ALLOW_THREADS
            copy_gather(op->segments, op->segment_count, request.view.buf, op->size, &request.op.checksum);
            Py_END_ALLOW_THREADS
        }
        checksum = PyLong_FromUnsignedLong(request.op.checksum);
    }
    PyBuffer_Release(&request.view);
    Py_DECREF(request.segments);
    Py_DECREF(request.keepalive);
    return checksum;
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

static void set_dlpack_error(int error)
{
    if (error == -ENOMEM)
        PyErr_NoMemory();
    else if (error == -ENODATA)
        PyErr_SetString(PyExc_NotImplementedError, "DLPack tells no shape or no strides of a tensor");
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "DLPack does not say what is wrong with a tensor");
}

static PyObject *ext_dlpack_forms(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule, *tensors, *bytes = NULL;
    struct dlpack_forms forms = {0};
    int addresses = 0;

    if (!PyArg_ParseTuple(args, "OO!|p:dlpack_forms", &capsule, &PyList_Type, &tensors, &addresses))
        return NULL;
    const struct dlpack_exchange *exchange = PyCapsule_GetPointer(capsule, DLPACK_CAPSULE);
    if (!exchange)
        return NULL;
    exchange = dlpack_known(exchange);
    if (!exchange) {
        PyErr_SetString(PyExc_NotImplementedError, "this DLPack API does not tell what a tensor is");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = Py_NewRef(PyList_GET_ITEM(tensors, i)); /* what is asked may run code that empties the list */
        const int error = dlpack_forms_add(&forms, exchange, tensor, addresses);
        Py_DECREF(tensor);
        if (error) {
            set_dlpack_error(error);
            goto end;
        }
    }
    bytes = PyBytes_FromStringAndSize(forms.table, (Py_ssize_t)forms.used);
end:
    dlpack_forms_free(&forms);
    return bytes;
}

static PyMethodDef ext_methods[] = {
    {"crc32", ext_crc32, METH_VARARGS, NULL},
    {"gather", ext_gather, METH_VARARGS, NULL},
    {"dlpack_forms", ext_dlpack_forms, METH_VARARGS, NULL},
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
        {"UNLOCK", OP_UNLOCK},
    };
    PyObject *type = PyType_FromModuleAndSpec(module, &queue_spec, NULL);
    if (!type || PyModule_AddType(module, (PyTypeObject *)type) < 0)
        goto fail;
    for (size_t i = 0; i < OP_KINDS; i++) {
        if (PyModule_AddIntConstant(module, kinds[i].name, kinds[i].kind) < 0)
            goto fail;
    }
    if (PyModule_AddStringConstant(module, "CRC_IMPLEMENTATION", crc32_select()->name) < 0)
        goto fail;
    Py_DECREF(type);
    return 0;

fail:
    Py_XDECREF(type);
    return -1;
}

static PyModuleDef_Slot ext_slots[] = {
    {Py_mod_exec, ext_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef ext_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "pccheck_async._ext",
    .m_doc = "Operations on bytes in C: see the stub beside it for the contracts.",
    .m_size = 0, /* no state of the module's own: a queue holds all that it needs */
    .m_methods = ext_methods,
    .m_slots = ext_slots,
};

PyMODINIT_FUNC PyInit__ext(void)
{
    return PyModuleDef_Init(&ext_module);
}
