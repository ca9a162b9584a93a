"""Forged stores: an error of this package, or some state; no crash, no memory beyond the file's, nothing executed."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pccheck_async.format.record import IDENTITY_NAME
from pccheck_async.testing import Image
from tests.support.hostile import (
    Forger,
    Prey,
    confine,
    examine_image,
    examine_manifest,
    of_version_2,
    victim,
    with_right_checksums,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_asked_once")]


def manifests(rng: random.Random, count: int, log: Callable[[str], None]) -> Counter[str]:
    prey, forger, live = Prey.make(), Forger(rng), victim()
    original = msgspec.msgpack.decode(prey.manifest)
    versions = (original, of_version_2(original))
    counts: Counter[str] = Counter()
    for number in range(count):
        forged = forger.forged(versions[number % 2], partial(with_right_checksums, payload=prey.payload))
        log(f"manifest {number} {forged.hex() if len(forged) < 9000 else len(forged)}")
        counts["manifest " + examine_manifest(forged, prey.payload, live)] += 1
        if number % 51 == 0:
            live = victim()
            counts["store with a forged manifest " + examine_image(prey.with_manifest(forged))] += 1
    return counts


def _json(tree: Any) -> bytes:
    try:
        return msgspec.json.encode(tree)
    except UnicodeEncodeError:
        return b"{}"


def records(rng: random.Random, count: int, log: Callable[[str], None]) -> Counter[str]:
    prey, forger = Prey.make(), Forger(rng)
    original = msgspec.msgpack.decode(prey.entries)
    identity = msgspec.json.decode(prey.image.files[IDENTITY_NAME])
    counts: Counter[str] = Counter()
    for number in range(count):
        if number % 4:
            body = forger.forged(original)
            generation = rng.choice((1, 7, 2**32, 2**63, 2**64 - 1))
            log(f"record {number} {generation} {body[:4000].hex()}")
            image = prey.with_record(body, generation)
        else:
            text = forger.forged(identity, encode=_json)
            log(f"identity {number} {text[:4000]!r}")
            image = Image({**prey.image.files, IDENTITY_NAME: text}, b"")
        counts[f"{'record' if number % 4 else 'identity'} {examine_image(image)}"] += 1
    return counts


def in_a_cage(folder: Path, seed: int, forge: Callable[..., Counter[str]], count: int) -> Counter[str]:
    """Run in a forked child with little memory; what it looked at last stands in a file, should it die."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            confine()
            last = os.open(folder / "last", os.O_RDWR | os.O_CREAT)

            def log(text: str) -> None:
                signal.alarm(30)  # a hang is a death
                os.pwrite(last, text.encode() + b"\n", 0)

            os.write(writer, msgspec.json.encode(forge(random.Random(seed), count, log)))
            status = 0
        except BaseException:  # noqa: BLE001 - a forked child must not return into the test runner
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        found = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, f"seed {seed}, status {status}: {(folder / 'last').read_bytes()[:3000]!r}"
    return Counter(msgspec.json.decode(found))


@pytest.mark.parametrize("forge", [manifests, records])
def test_forged_stores(tmp_path: Path, forge: Callable[..., Counter[str]]) -> None:
    counts = in_a_cage(tmp_path, 1, forge, 800 if forge is manifests else 120)
    assert len(counts) >= 3


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(8))
def test_many_forged_stores(tmp_path: Path, seed: int) -> None:
    counts: Counter[str] = Counter()
    end = time.monotonic() + 75
    number = 1000 * seed
    while time.monotonic() < end:
        number += 2
        counts += in_a_cage(tmp_path, number, manifests, 4000)
        counts += in_a_cage(tmp_path, number + 1, records, 600)
    print(f"\n{sum(counts.values())} forged: {dict(counts)}")
