# SPDX-License-Identifier: Apache-2.0
"""The formats of a store's bytes, without I/O: commit record, manifest, skeleton, dtypes, keys, checksum.

No await and no file descriptor; of the package it imports :mod:`pccheck_async.errors` alone. Modules that import torch
are not imported here: :mod:`~pccheck_async.format.manifest` and :mod:`~pccheck_async.format.dtypes`.
"""

from pccheck_async.format.arguments import (
    check_count,
    check_name,
    check_reach,
    check_step,
    check_tier,
    describe_which,
    explained,
    formerly,
    matches,
    new_step,
    the_one,
    there_are,
    unknown_argument,
    which_one,
    whole_step,
)
from pccheck_async.format.checksum import combine, crc32, piece_sums
from pccheck_async.format.info import WINDOW_KEY, Action, CheckpointInfo, Metadata, Reach, Restored, Tier, Which
from pccheck_async.format.line import Line, Link
from pccheck_async.format.parts import Applied, Key, Membership, Parts, Run
from pccheck_async.format.record import Entry, Identity, Record, align, check_metadata, name_in

__all__ = [
    "WINDOW_KEY", "Action", "Applied", "CheckpointInfo", "Entry", "Identity", "Key", "Line", "Link", "Membership",
    "Metadata", "Parts", "Reach", "Record", "Restored", "Run", "Tier", "Which", "align", "check_count",
    "check_metadata", "check_name", "check_reach", "check_step", "check_tier", "combine", "crc32", "describe_which",
    "explained", "formerly", "matches", "name_in", "new_step", "piece_sums", "the_one", "there_are",
    "unknown_argument", "which_one", "whole_step",
]  # fmt: skip
