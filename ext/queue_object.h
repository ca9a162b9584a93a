/* The Python type Queue. */
#ifndef PCCHECK_QUEUE_OBJECT_H
#define PCCHECK_QUEUE_OBJECT_H

#include "binding.h"

extern PyType_Spec queue_object_spec;

#endif
