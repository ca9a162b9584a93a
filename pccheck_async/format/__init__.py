"""The bytes of a store, purely: commit record, manifest, skeleton, dtypes, keys, checksum.

No await and no file descriptor; of the package it imports :mod:`pccheck_async.errors` alone. What imports torch is not
offered here, but by its module: :mod:`~pccheck_async.format.manifest` and :mod:`~pccheck_async.format.dtypes`.
"""

from pccheck_async.format.checksum import combine, crc32, piece_sums
from pccheck_async.format.info import CheckpointInfo, Metadata, Restored, check_count, check_step, new_step, whole_step
from pccheck_async.format.parts import Applied, Key, Membership, Parts, Run
from pccheck_async.format.record import Entry, Identity, NewerFormatError, Record, align, check_metadata

__all__ = [
    "Applied", "CheckpointInfo", "Entry", "Identity", "Key", "Membership", "Metadata", "NewerFormatError", "Parts",
    "Record", "Restored", "Run", "align", "check_count", "check_metadata", "check_step", "combine", "crc32", "new_step",
    "piece_sums", "whole_step",
]  # fmt: skip
