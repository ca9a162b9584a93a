"""Forged manifests, records and identities under the eyes of a coverage-guided fuzzer.

Run: ``python -m tests.campaign.fuzz -max_total_time=300``. Needs ``atheris``; its arguments are libFuzzer's. A finding
is an exception of another kind than CheckpointError, a hang, a crash, memory beyond the file's, or anything executed.
"""

from __future__ import annotations

import random
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["pccheck_async"]):
    from pccheck_async import CheckpointError
    from pccheck_async.format.record import IDENTITY_NAME, decode_identity, newest_record
    from tests.support.hostile import Forger, Prey, confine, examine_manifest, victim, with_right_checksums

MANIFEST, RECORD, IDENTITY = range(3)
"""What an input is: its first byte."""

_PREY = Prey.make()
_LIVE = victim()
_WHOLE = {MANIFEST: _PREY.manifest, RECORD: _PREY.entries, IDENTITY: _PREY.image.files[IDENTITY_NAME]}
_STORE_ID = decode_identity(_WHOLE[IDENTITY]).id_bytes


def examine(data: bytes) -> None:
    """Decode, load, and restore a manifest; decode a record or an identity."""
    kind, data = data[0] % 3 if data else 0, data[1:]
    if kind == MANIFEST:
        examine_manifest(data, _PREY.payload, _LIVE)
    elif kind == RECORD:
        record = newest_record(_PREY.commit(data), _STORE_ID)
        repr([entry.info for entry in record.entries] if record else None)
    else:
        with suppress(CheckpointError):
            repr(decode_identity(data))


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Change the structure; bytes now and then."""
    rng = random.Random(seed)
    kind = data[0] % 3 if data and rng.random() < 0.9 else rng.randrange(3)
    codec = msgspec.json if kind == IDENTITY else msgspec.msgpack
    finish = partial(with_right_checksums, payload=_PREY.payload) if kind == MANIFEST else lambda tree: tree
    try:
        forged = Forger(rng).forged(codec.decode(data[1:]), finish, codec.encode)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        forged = _WHOLE[kind]
    if rng.random() < 0.1:
        forged = bytes(atheris.Mutate(forged, most - 1))
    return bytes([kind]) + forged if len(forged) < most else data


def main() -> None:
    """Fuzz until the time is over."""
    with tempfile.TemporaryDirectory() as folder:
        for kind, whole in _WHOLE.items():
            (Path(folder) / str(kind)).write_bytes(bytes([kind]) + whole)
        limits = ["-max_len=20000", "-timeout=20", "-rss_limit_mb=3000"]
        confine()
        atheris.Setup([sys.argv[0], folder, *limits, *sys.argv[1:]], examine, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
