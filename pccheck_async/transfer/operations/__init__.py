# SPDX-License-Identifier: Apache-2.0
"""Operations on bytes (write, read, flush, copy, checksum), and the two backends that perform them.

================  ========================================================================  =========================
``io=``           bytes are moved by                                                        where it works
================  ========================================================================  =========================
``"threads"``     ``writers`` threads of the C extension; further ones copy and checksum    the extension was built
``"python"``      the same number of threads in pure Python                                 everywhere
``"auto"``        ``threads``, or ``python`` without the extension                          everywhere
================  ========================================================================  =========================

Both write the same bytes, so a store may be used with either. ``engine.statistics().io`` names the backend and the
reason for it. A third backend on io_uring was removed: it was never faster.

This package may import the format's checksum, and :func:`.tensor_access.exempt_this_thread`.
"""

from pccheck_async.transfer.operations.base import (
    MOST_BYTES_ON_LOOP,
    ChainStep,
    Kind,
    NativeOperations,
    Operations,
    Step,
)
from pccheck_async.transfer.operations.python import OperationsAtOnce, PythonOperations

__all__ = [
    "MOST_BYTES_ON_LOOP", "ChainStep", "Kind", "NativeOperations", "Operations", "OperationsAtOnce", "PythonOperations",
    "Step",
]  # fmt: skip
