# SPDX-License-Identifier: Apache-2.0
"""Object storage as a place for committed checkpoints: copied there from a store, and read back by its readers.

It may import ``store`` and lower layers, but no engine. ``names``, ``record``, ``protocol`` and ``copies`` do no I/O;
``objects`` is the interface to object storage, ``owner`` orders the requests of one writer. obstore is imported when
the first bucket is opened.
"""

from pccheck_async.bucket.compression import Compressing, Compression, check_compression
from pccheck_async.bucket.copies import BucketState, Copied, Phase, copies_of
from pccheck_async.bucket.medium import BucketMedium, Stored
from pccheck_async.bucket.names import DATA
from pccheck_async.bucket.objects import Objects, RefusedError
from pccheck_async.bucket.obstore_objects import Location, is_location, open_objects, shown
from pccheck_async.bucket.owner import Owner
from pccheck_async.bucket.record import CommitRecord, Kept, PartName
from pccheck_async.bucket.upload import Draft, Upload, send_part

__all__ = [
    "DATA", "BucketMedium", "BucketState", "CommitRecord", "Compressing", "Compression", "Copied", "Draft", "Kept",
    "Location", "Objects", "Owner", "PartName", "Phase", "RefusedError", "Stored", "Upload", "check_compression",
    "copies_of", "is_location", "open_objects", "send_part", "shown",
]  # fmt: skip
