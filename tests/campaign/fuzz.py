"""Manifests forged under the eyes of a coverage-guided fuzzer: ``python -m tests.campaign.fuzz -max_total_time=300``.

Needs ``atheris``; its arguments are libFuzzer's. A finding is an exception of another kind than
CheckpointError, a hang or a crash.
"""

from __future__ import annotations

import random
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import atheris
import msgspec

with atheris.instrument_imports(include=["pccheck_async"]):
    from tests.hostile import Forger, Prey, examine_manifest, victim, with_right_checksums

_PREY = Prey.make()
_LIVE = victim()


def examine(data: bytes) -> None:
    """Decode, load, and restore a manifest."""
    examine_manifest(data, _PREY.payload, _LIVE)


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """Change the structure of a manifest; bytes now and then."""
    rng = random.Random(seed)
    try:
        tree = msgspec.msgpack.decode(data)
        forged = Forger(rng).forged(tree, partial(with_right_checksums, payload=_PREY.payload))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        forged = _PREY.manifest
    if rng.random() < 0.1:
        forged = bytes(atheris.Mutate(forged, most))
    return forged if len(forged) <= most else data


def main() -> None:
    """Fuzz until the time is over."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "whole").write_bytes(_PREY.manifest)
        limits = ["-max_len=20000", "-timeout=20", "-rss_limit_mb=3000"]
        atheris.Setup([sys.argv[0], folder, *limits, *sys.argv[1:]], examine, custom_mutator=mutate)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
