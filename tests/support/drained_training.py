"""A training whose engine has a drain, to be killed at any moment; and what another machine finds in the bucket.

``python -m tests.support.drained_training train FOLDER URL SEED`` saves until it is killed, at a request of its drain
that the seed chooses, and tells each checkpoint that came to the bucket. ``check URL`` tells the newest step there.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from pccheck_async import Drain, SyncCheckpointEngine, list_checkpoints, stores
from pccheck_async.bucket.obstore_objects import ObstoreObjects

_ELEMENTS = 60_000
_KINDS = ("put", "create", "get", "list", "delete")


def state_of(step: int) -> dict[str, Any]:
    """Every byte follows from the step."""
    return {"weights": torch.arange(_ELEMENTS) * (step + 1), "step": step}


def dying_at(kind: str, number: int, after: bool) -> None:
    """Kill this process at the request of this kind and number: before it is sent, or when it was answered."""
    original: Callable[..., Any] = getattr(ObstoreObjects, kind)
    left = [number]

    async def request(self: ObstoreObjects, *arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if not left[0] and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(self, *arguments, **named)
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(ObstoreObjects, kind, request)


def options() -> dict[str, Any] | None:
    text = os.environ.get("DRAIN_OPTIONS")
    return json.loads(text) if text else None


def train(folder: str, url: str, seed: int) -> None:
    chosen = random.Random(seed)
    kind = _KINDS[seed % len(_KINDS)]
    dying_at(kind, chosen.randint(1, {"create": 6, "delete": 4}.get(kind, 12)), chosen.random() < 0.5)
    with SyncCheckpointEngine(folder, drain=Drain(url, keep_last=2, options=options())) as engine:
        restored = engine.restore(target := state_of(0))
        first = 0 if restored is None else restored.step + 1
        if restored is not None:
            assert torch.equal(target["weights"], state_of(restored.step)["weights"])
        for step in range(first, first + 200):
            pending = engine.checkpoint(state_of(step), step=step)
            if step % 2:
                pending.wait_reached("remote")
                print(step, flush=True)


def check(url: str) -> None:
    """Tell the newest step in the bucket, once all that counts was verified and another folder restored from it."""
    verified = stores.verify(url, every=True) if list_checkpoints(url) else None
    assert verified is None or verified.whole, verified
    with tempfile.TemporaryDirectory() as folder, SyncCheckpointEngine(folder) as engine:
        if verified is None:
            print(-1)
            return
        stores.copy(url, os.path.join(folder, "copy"))
        assert engine.latest is None
    with tempfile.TemporaryDirectory() as folder:
        stores.copy(url, folder)
        with SyncCheckpointEngine(folder) as engine:
            restored = engine.restore(target := state_of(0))
            assert restored is not None
            assert torch.equal(target["weights"], state_of(restored.step)["weights"])
            print(restored.step)


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        check(sys.argv[2])
