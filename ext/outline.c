/* The comparison of a live state with the pattern that an earlier walk over it left: see match() in the stub. */
#include "binding.h"

#include <stdlib.h>
#include <string.h>

enum { ITEMS, ORDERED, SEQUENCE, STATEFUL, OBJECT, KEYED, PARAMETERS, EQUAL };

struct walk {
    PyObject *leaves;
    PyObject *plain;
    PyObject *ask;
    PyObject *parameters; /* list, of the optimizer that is being compared; or NULL */
};

/* All functions here return 1 for a match, 0 if anything differs, -1 and a Python error. Values are held while they are
 * compared: state_dict() of an object may change the container that it lies in. */
static int match(struct walk *walk, PyObject *value, PyObject *pattern);

static int match_held(struct walk *walk, PyObject *value, PyObject *pattern)
{
    Py_INCREF(value);
    const int same = match(walk, value, pattern);
    Py_DECREF(value);
    return same;
}

/* Only keys of these types have the same node if they are equal, and compare without code of users. */
static int same_key(PyObject *key, PyObject *known)
{
    if (key == known)
        return 1;
    if ((PyUnicode_CheckExact(key) && PyUnicode_CheckExact(known)) || (PyLong_CheckExact(key) && PyLong_CheckExact(known)))
        return PyObject_RichCompareBool(key, known, Py_EQ);
    return 0;
}

static int match_ordered_items(struct walk *walk, PyObject *value, PyObject *keys, PyObject *children)
{
    PyObject *each = PyObject_GetIter(value);
    int same = each ? 1 : -1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(keys); i++) {
        PyObject *key = PyIter_Next(each);
        if (!key) {
            same = PyErr_Occurred() ? -1 : 0;
            break;
        }
        same = same_key(key, PyTuple_GET_ITEM(keys, i));
        if (same == 1) {
            PyObject *item = PyDict_GetItemWithError(value, key);
            same = item ? match_held(walk, item, PyTuple_GET_ITEM(children, i)) : PyErr_Occurred() ? -1 : 0;
        }
        Py_DECREF(key);
    }
    Py_XDECREF(each);
    return same;
}

/* (ITEMS, kind, keys, children): a dict of this kind with these keys, in their order. */
static int match_items(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *keys = PyTuple_GET_ITEM(pattern, 2), *children = PyTuple_GET_ITEM(pattern, 3);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(pattern, 1) || PyDict_Size(value) != PyTuple_GET_SIZE(keys))
        return PyErr_Occurred() ? -1 : 0;
    if (PyODict_Check(value)) /* its order is not that of the dict that it is */
        return match_ordered_items(walk, value, keys, children);
    PyObject *key, *item;
    Py_ssize_t at = 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(keys); i++) {
        if (!PyDict_Next(value, &at, &key, &item))
            return 0;
        same = same_key(key, PyTuple_GET_ITEM(keys, i));
        if (same == 1)
            same = match_held(walk, item, PyTuple_GET_ITEM(children, i));
    }
    return same;
}

/* (KEYED, kind, places, children): a dict whose keys are the optimizer's parameters with these numbers. */
static int match_keyed(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *places = PyTuple_GET_ITEM(pattern, 2), *children = PyTuple_GET_ITEM(pattern, 3);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(pattern, 1) || PyDict_Size(value) != PyTuple_GET_SIZE(places))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *key, *item;
    Py_ssize_t at = 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(places); i++) {
        const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(places, i));
        if (place == -1 && PyErr_Occurred())
            return -1;
        if (!walk->parameters || place < 0 || place >= PyList_GET_SIZE(walk->parameters) ||
            !PyDict_Next(value, &at, &key, &item))
            return 0;
        same = key == PyList_GET_ITEM(walk->parameters, place)
                   ? match_held(walk, item, PyTuple_GET_ITEM(children, i))
                   : 0;
    }
    return same;
}

static int by_address(const void *one, const void *other)
{
    const uintptr_t a = *(const uintptr_t *)one, b = *(const uintptr_t *)other;
    return (a > b) - (a < b);
}

/* Whether a list holds no object twice. */
static int all_different(PyObject *list)
{
    const size_t count = (size_t)PyList_GET_SIZE(list);
    uintptr_t *addresses = PyMem_Malloc(count * sizeof *addresses + 1);
    if (!addresses) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++)
        addresses[i] = (uintptr_t)PyList_GET_ITEM(list, (Py_ssize_t)i);
    qsort(addresses, count, sizeof *addresses, by_address);
    int different = 1;
    for (size_t i = 1; i < count && different; i++)
        different = addresses[i] != addresses[i - 1];
    PyMem_Free(addresses);
    return different;
}

/* (PARAMETERS, key, counts): a list of dicts, each of which has under this key a list of so many parameters. */
static int match_parameters(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *key = PyTuple_GET_ITEM(pattern, 1), *counts = PyTuple_GET_ITEM(pattern, 2);
    if (!PyList_CheckExact(value) || PyList_GET_SIZE(value) != PyTuple_GET_SIZE(counts))
        return 0;
    PyObject *all = PyList_New(0);
    if (!all)
        return -1;
    Py_XSETREF(walk->parameters, all);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(counts); i++) {
        PyObject *group = PyList_GET_ITEM(value, i);
        PyObject *parameters = PyDict_CheckExact(group) ? PyDict_GetItemWithError(group, key) : NULL;
        const Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GET_ITEM(counts, i)), end = PyList_GET_SIZE(all);
        if (PyErr_Occurred())
            return -1;
        if (!parameters || !PyList_CheckExact(parameters) || PyList_GET_SIZE(parameters) != count)
            return 0;
        if (PyList_SetSlice(all, end, end, parameters) < 0)
            return -1;
    }
    return all_different(all);
}

/* (SEQUENCE, kind, children): a list or a tuple. */
static int match_sequence(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *children = PyTuple_GET_ITEM(pattern, 2);
    const Py_ssize_t count = PyTuple_GET_SIZE(children);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(pattern, 1) || PySequence_Fast_GET_SIZE(value) != count)
        return 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < count; i++)
        same = i < PySequence_Fast_GET_SIZE(value)
                   ? match_held(walk, PySequence_Fast_GET_ITEM(value, i), PyTuple_GET_ITEM(children, i))
                   : 0;
    return same;
}

/* (STATEFUL, kind, path, child): an object whose state_dict() is called. */
static int match_stateful(struct walk *walk, PyObject *value, PyObject *pattern)
{
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(pattern, 1))
        return 0;
    PyObject *state = PyObject_CallFunctionObjArgs(walk->ask, value, PyTuple_GET_ITEM(pattern, 2), NULL);
    if (!state)
        return -1;
    const int same = match(walk, state, PyTuple_GET_ITEM(pattern, 3));
    Py_DECREF(state);
    return same;
}

/* (OBJECT, kind, absent, names, children): an object without the `absent` attributes of its own, with the `names`. */
static int match_object(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *absent = PyTuple_GET_ITEM(pattern, 2), *names = PyTuple_GET_ITEM(pattern, 3);
    PyObject *children = PyTuple_GET_ITEM(pattern, 4);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(pattern, 1))
        return 0;
    PyObject *own = PyObject_GenericGetDict(value, NULL);
    int same = own ? 1 : -1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(absent); i++) {
        const int there = PyDict_Contains(own, PyTuple_GET_ITEM(absent, i));
        same = there < 0 ? -1 : !there;
    }
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_GET_SIZE(names); i++) {
        PyObject *attribute = PyDict_GetItemWithError(own, PyTuple_GET_ITEM(names, i));
        if (attribute)
            same = match_held(walk, attribute, PyTuple_GET_ITEM(children, i));
        else
            same = PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(own);
    return same;
}

/* (ORDERED, attributes, items): an OrderedDict, its attributes first. */
static int match_ordered(struct walk *walk, PyObject *value, PyObject *pattern)
{
    if (!PyODict_CheckExact(value))
        return 0;
    PyObject *own = PyObject_GenericGetDict(value, NULL);
    if (!own)
        return -1;
    int same = match(walk, own, PyTuple_GET_ITEM(pattern, 1));
    Py_DECREF(own);
    if (same == 1)
        same = match(walk, value, PyTuple_GET_ITEM(pattern, 2));
    return same;
}

static int match_tagged(struct walk *walk, PyObject *value, PyObject *pattern)
{
    switch (PyLong_AsLong(PyTuple_GET_ITEM(pattern, 0))) {
    case ITEMS:
        return match_items(walk, value, pattern);
    case ORDERED:
        return match_ordered(walk, value, pattern);
    case SEQUENCE:
        return match_sequence(walk, value, pattern);
    case STATEFUL:
        return match_stateful(walk, value, pattern);
    case OBJECT:
        return match_object(walk, value, pattern);
    case KEYED:
        return match_keyed(walk, value, pattern);
    case PARAMETERS:
        return match_parameters(walk, value, pattern);
    case EQUAL:
        return PyObject_RichCompareBool(value, PyTuple_GET_ITEM(pattern, 1), Py_EQ);
    default:
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "no such pattern");
        return -1;
    }
}

static int match(struct walk *walk, PyObject *value, PyObject *pattern)
{
    if (pattern == Py_None)
        return PyList_Append(walk->plain, value) < 0 ? -1 : 1;
    if (PyType_Check(pattern)) {
        if ((PyObject *)Py_TYPE(value) != pattern)
            return 0;
        return value != Py_None && PyList_Append(walk->leaves, value) < 0 ? -1 : 1;
    }
    if (!PyTuple_Check(pattern))
        return pattern == Py_Ellipsis; /* which stands for anything; False for nothing */
    if (Py_EnterRecursiveCall(" while a state is compared"))
        return -1;
    const int same = match_tagged(walk, value, pattern);
    Py_LeaveRecursiveCall();
    return same;
}

PyObject *outline_match(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *values, *patterns;
    struct walk walk = {0};
    Py_ssize_t at;
    int same = 1;

    if (!PyArg_ParseTuple(args, "O!O!nO!O!O:match", &PyList_Type, &values, &PyTuple_Type, &patterns, &at, &PyList_Type,
                          &walk.leaves, &PyList_Type, &walk.plain, &walk.ask))
        return NULL;
    for (; at >= 0 && at < PyTuple_GET_SIZE(patterns) && at < PyList_GET_SIZE(values); at++) {
        const Py_ssize_t leaves = PyList_GET_SIZE(walk.leaves), plain = PyList_GET_SIZE(walk.plain);
        same = match_held(&walk, PyList_GET_ITEM(values, at), PyTuple_GET_ITEM(patterns, at));
        if (same == 1)
            continue;
        if (same == 0 && (PyList_SetSlice(walk.leaves, leaves, PyList_GET_SIZE(walk.leaves), NULL) < 0 ||
                          PyList_SetSlice(walk.plain, plain, PyList_GET_SIZE(walk.plain), NULL) < 0))
            same = -1;
        break;
    }
    Py_XDECREF(walk.parameters);
    return same < 0 ? NULL : PyLong_FromSsize_t(at);
}
