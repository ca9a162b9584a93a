# SPDX-License-Identifier: Apache-2.0
"""Test doubles of media that crash, fail, hang or are slow, for tests of the engine and of programs that use it.

Every double is a :class:`~pccheck_async.medium.Medium`; hand it to the engine as ``StorageOptions(io=...)``. The
effects of a power failure on a training job's checkpoints, for instance::

    history = []
    disk = CrashDisk(observer=history.append)          # a DiskSnapshot at every operation boundary
    async with CheckpointEngine("anywhere", storage=StorageOptions(io=CrashWriter(disk))) as engine:
        pending = await engine.checkpoint(state, step=1)
        disk.acknowledge((await pending.durable()).counter)
    for snapshot in history:
        for image in power_loss_images(snapshot, sector=512):
            try:
                found = load_sync("anywhere", io=ImageWriter(image))
            except NoCheckpointError:
                assert snapshot.acknowledged is None   # nothing was promised yet

:class:`FailingWriter` fails the k-th operation, :class:`StuckWriter` holds operations back until they are released,
:class:`ThrottledWriter` has the bandwidth of a slow disk; they wrap any medium, the real files too.
:data:`MEDIUM_CHECKS` are the checks that your own medium has to pass.
"""

from pccheck_async.testing.crash import CrashDisk, CrashWriter, ImageWriter
from pccheck_async.testing.crash_mapped import ATOM, CrashMapping, MappedCrashWriter
from pccheck_async.testing.crash_shelf import CrashShelfFile
from pccheck_async.testing.doubles import CHANGES, Access, FailingWriter, StuckWriter, ThrottledWriter, WrappingWriter
from pccheck_async.testing.medium_conformance import MEDIUM_CHECKS
from pccheck_async.testing.power_loss import DiskSnapshot, Image, power_loss_images

__all__ = [
    "ATOM",
    "CHANGES",
    "MEDIUM_CHECKS",
    "Access",
    "CrashDisk",
    "CrashMapping",
    "CrashShelfFile",
    "CrashWriter",
    "DiskSnapshot",
    "FailingWriter",
    "Image",
    "ImageWriter",
    "MappedCrashWriter",
    "StuckWriter",
    "ThrottledWriter",
    "WrappingWriter",
    "power_loss_images",
]  # fmt: skip
