"""Meta's torchsnapshot: written tensor by tensor through an asyncio pipeline of its own; nothing is flushed."""

from __future__ import annotations

from typing import Any

from examples.paper.lab.methods.base import Done, Handle, Method, State
from examples.paper.lab.methods.files import missing, newest, remove_older, target

__all__ = ["TorchSnapshot", "TorchSnapshotAsync"]

_MARKER = ".snapshot_metadata"


class TorchSnapshot(Method):
    """``Snapshot.take``: training waits for all of it.

    The file that makes a snapshot complete is written in place, so a kill can leave an empty one. It pickles what it
    does not know, numpy's arrays among random numbers too, and version 0.1.0 cannot load that again: from torch 2.6 on,
    ``torch.load`` refuses it.
    """

    name = "torchsnapshot"
    durable = atomic = resumable = False

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether it is installed."""
        return missing("torchsnapshot")

    def save(self, state: State, step: int) -> Handle:
        """Write a new folder."""
        from torchsnapshot import Snapshot

        Snapshot.take(str(target(self.folder, step)), _application(state))
        return Done()

    def load(self, into: State) -> int:
        """Read into the tensors of ``into``."""
        from torchsnapshot import Snapshot

        step, place = newest(self.folder, _MARKER)
        application = _application(into)
        Snapshot(str(place)).restore(application)
        into.update(application["state"])
        return step

    def tidy(self) -> None:
        """Delete older checkpoints."""
        remove_older(self.folder, _MARKER)


class TorchSnapshotAsync(TorchSnapshot):
    """``Snapshot.async_take``: training waits for the copy into memory."""

    name = "torchsnapshot async"

    def save(self, state: State, step: int) -> Handle:
        """Start to write a new folder."""
        from torchsnapshot import Snapshot

        return _Pending(Snapshot.async_take(str(target(self.folder, step)), _application(state)))


class _Pending(Handle):
    def __init__(self, pending: Any) -> None:
        self._pending = pending

    def captured(self) -> None:
        pass

    def wait(self) -> None:
        self._pending.wait()


def _application(state: State) -> dict[str, Any]:
    from torchsnapshot import StateDict

    return {"state": StateDict(**state)}
