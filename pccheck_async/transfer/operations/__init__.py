"""Operations on bytes, and the engines that perform them.

================  ==========================================================  ========================================
``io=``           who moves the bytes                                         where it works
================  ==========================================================  ========================================
``"io_uring"``    the kernel, with ``writers`` transfers in it at a time;     Linux 5.6 or newer that allows it; many
                  threads of the C extension copy and checksum                containers do not
``"threads"``     ``writers`` threads of the C extension, and others that     wherever the extension was built
                  copy and checksum
``"python"``      the same in pure Python                                     everywhere
``"auto"``        ``threads``, or ``python`` without the extension            everywhere
================  ==========================================================  ========================================

All of them write the same bytes, so a store may go from one to another. On the one disk where they were measured side
by side, io_uring was not faster than threads, and took as much of the processor. Where the kernel refuses it (a
seccomp filter, the sysctl ``kernel.io_uring_disabled``), asking for it raises ``ValueError`` with the cause.
``engine.statistics().io`` names the engine, why that one, and whether io_uring would work.
"""
