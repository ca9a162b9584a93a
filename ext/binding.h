/* Python's headers, for the files that bind to it: module, queue_object, request. All others are plain C. */
#ifndef PCCHECK_BINDING_H
#define PCCHECK_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#endif
