/* SPDX-License-Identifier: Apache-2.0 */
/* Copies from and to mapped files, which somebody may have truncated. */
#ifndef PCCHECK_GUARD_H
#define PCCHECK_GUARD_H

#include <stdint.h>

/* Do `body(argument)`, which reads and writes memory and owns nothing; -EIO where a page of it cannot be had (SIGBUS: the
 * file is shorter by now, the filesystem is full, the memory is broken). What was copied before that stays.
 *
 * The first call handles SIGBUS from then on; a fault of anything else goes to whatever handled it before. */
int64_t guard_run(void (*body)(void *argument), void *argument);

#endif
