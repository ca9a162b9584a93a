/* SPDX-License-Identifier: Apache-2.0 */
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
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_Size(keys); i++) {
        PyObject *key = PyIter_Next(each);
        if (!key) {
            same = PyErr_Occurred() ? -1 : 0;
            break;
        }
        same = same_key(key, PyTuple_GetItem(keys, i));
        if (same == 1) {
            PyObject *item = PyDict_GetItemWithError(value, key);
            same = item ? match_held(walk, item, PyTuple_GetItem(children, i)) : PyErr_Occurred() ? -1 : 0;
        }
        Py_DECREF(key);
    }
    Py_XDECREF(each);
    return same;
}

/* (ITEMS, kind, keys, children): a dict of this kind with these keys, in their order. */
static int match_items(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *keys = PyTuple_GetItem(pattern, 2), *children = PyTuple_GetItem(pattern, 3);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(pattern, 1) || PyDict_Size(value) != PyTuple_Size(keys))
        return PyErr_Occurred() ? -1 : 0;
    if (!PyDict_CheckExact(value)) /* the order of an OrderedDict is not that of the dict that it is */
        return match_ordered_items(walk, value, keys, children);
    PyObject *key, *item;
    Py_ssize_t at = 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_Size(keys); i++) {
        if (!PyDict_Next(value, &at, &key, &item))
            return 0;
        same = same_key(key, PyTuple_GetItem(keys, i));
        if (same == 1)
            same = match_held(walk, item, PyTuple_GetItem(children, i));
    }
    return same;
}

/* (KEYED, kind, places, children): a dict whose keys are the optimizer's parameters with these numbers. */
static int match_keyed(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *places = PyTuple_GetItem(pattern, 2), *children = PyTuple_GetItem(pattern, 3);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(pattern, 1) || PyDict_Size(value) != PyTuple_Size(places))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *key, *item;
    Py_ssize_t at = 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_Size(places); i++) {
        const Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(places, i));
        if (place == -1 && PyErr_Occurred())
            return -1;
        if (!walk->parameters || place < 0 || place >= PyList_Size(walk->parameters) ||
            !PyDict_Next(value, &at, &key, &item))
            return 0;
        same = key == PyList_GetItem(walk->parameters, place)
                   ? match_held(walk, item, PyTuple_GetItem(children, i))
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
    const size_t count = (size_t)PyList_Size(list);
    uintptr_t *addresses = PyMem_Malloc(count * sizeof *addresses + 1);
    if (!addresses) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++)
        addresses[i] = (uintptr_t)PyList_GetItem(list, (Py_ssize_t)i);
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
    PyObject *key = PyTuple_GetItem(pattern, 1), *counts = PyTuple_GetItem(pattern, 2);
    if (!PyList_CheckExact(value) || PyList_Size(value) != PyTuple_Size(counts))
        return 0;
    PyObject *all = PyList_New(0);
    if (!all)
        return -1;
    PyObject *before = walk->parameters;
    walk->parameters = all;
    Py_XDECREF(before);
    for (Py_ssize_t i = 0; i < PyTuple_Size(counts); i++) {
        PyObject *group = PyList_GetItem(value, i);
        PyObject *parameters = PyDict_CheckExact(group) ? PyDict_GetItemWithError(group, key) : NULL;
        const Py_ssize_t count = PyLong_AsSsize_t(PyTuple_GetItem(counts, i)), end = PyList_Size(all);
        if (PyErr_Occurred())
            return -1;
        if (!parameters || !PyList_CheckExact(parameters) || PyList_Size(parameters) != count)
            return 0;
        if (PyList_SetSlice(all, end, end, parameters) < 0)
            return -1;
    }
    return all_different(all);
}

/* The item of a list or a tuple, also of a subclass that overrides `__getitem__`; NULL if it has none there. */
static PyObject *sequence_item(PyObject *value, Py_ssize_t i)
{
    if (PyList_Check(value))
        return i < PyList_Size(value) ? PyList_GetItem(value, i) : NULL;
    return i < PyTuple_Size(value) ? PyTuple_GetItem(value, i) : NULL;
}

/* (SEQUENCE, kind, children): a list or a tuple. */
static int match_sequence(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *children = PyTuple_GetItem(pattern, 2);
    const Py_ssize_t count = PyTuple_Size(children);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(pattern, 1) || 
        (PyList_Check(value) ? PyList_Size(value) : PyTuple_Size(value)) != count)
        return 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < count; i++) {
        PyObject *item = sequence_item(value, i);
        same = item ? match_held(walk, item, PyTuple_GetItem(children, i)) : 0;
    }
    return same;
}

/* (STATEFUL, kind, path, child): an object whose state_dict() is called. */
static int match_stateful(struct walk *walk, PyObject *value, PyObject *pattern)
{
    if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(pattern, 1))
        return 0;
    PyObject *state = PyObject_CallFunctionObjArgs(walk->ask, value, PyTuple_GetItem(pattern, 2), NULL);
    if (!state)
        return -1;
    const int same = match(walk, state, PyTuple_GetItem(pattern, 3));
    Py_DECREF(state);
    return same;
}

/* (OBJECT, kind, absent, names, children): an object without the `absent` attributes of its own, with the `names`. */
static int match_object(struct walk *walk, PyObject *value, PyObject *pattern)
{
    PyObject *absent = PyTuple_GetItem(pattern, 2), *names = PyTuple_GetItem(pattern, 3);
    PyObject *children = PyTuple_GetItem(pattern, 4);
    if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(pattern, 1))
        return 0;
    PyObject *own = PyObject_GenericGetDict(value, NULL);
    int same = own ? 1 : -1;
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_Size(absent); i++) {
        const int there = PyDict_Contains(own, PyTuple_GetItem(absent, i));
        same = there < 0 ? -1 : !there;
    }
    for (Py_ssize_t i = 0; same == 1 && i < PyTuple_Size(names); i++) {
        PyObject *attribute = PyDict_GetItemWithError(own, PyTuple_GetItem(names, i));
        if (attribute)
            same = match_held(walk, attribute, PyTuple_GetItem(children, i));
        else
            same = PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(own);
    return same;
}

/* (ORDERED, attributes, items): an OrderedDict, its attributes first. */
static int match_ordered(struct walk *walk, PyObject *value, PyObject *pattern)
{
    if ((PyObject *)Py_TYPE(value) != PyTuple_GetItem(PyTuple_GetItem(pattern, 2), 1))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *own = PyObject_GenericGetDict(value, NULL);
    if (!own)
        return -1;
    int same = match(walk, own, PyTuple_GetItem(pattern, 1));
    Py_DECREF(own);
    if (same == 1)
        same = match(walk, value, PyTuple_GetItem(pattern, 2));
    return same;
}

static int match_tagged(struct walk *walk, PyObject *value, PyObject *pattern)
{
    switch (PyLong_AsLong(PyTuple_GetItem(pattern, 0))) {
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
        return PyObject_RichCompareBool(value, PyTuple_GetItem(pattern, 1), Py_EQ);
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
    for (; at >= 0 && at < PyTuple_Size(patterns) && at < PyList_Size(values); at++) {
        const Py_ssize_t leaves = PyList_Size(walk.leaves), plain = PyList_Size(walk.plain);
        same = match_held(&walk, PyList_GetItem(values, at), PyTuple_GetItem(patterns, at));
        if (same == 1)
            continue;
        if (same == 0 && (PyList_SetSlice(walk.leaves, leaves, PyList_Size(walk.leaves), NULL) < 0 ||
                          PyList_SetSlice(walk.plain, plain, PyList_Size(walk.plain), NULL) < 0))
            same = -1;
        break;
    }
    Py_XDECREF(walk.parameters);
    return same < 0 ? NULL : PyLong_FromSsize_t(at);
}
