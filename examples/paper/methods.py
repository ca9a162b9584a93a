"""Four ways to save a training run, behind one seam: two strengths of torch.save, CheckFreq's scheme, and PCcheck's.

Each saves the same parts (model, optimizer, scheduler, random numbers, position in the data) and the step, so that a
training loop can swap one for another::

    with METHODS["pccheck"](folder, parts, every=50) as method:
        for step in range(method.load() + 1, steps + 1):
            with method.step(step):
                train_one_step()
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from pccheck_async import Stateful, SyncCheckpointEngine

Parts = Mapping[str, Stateful]


class TornFileError(Exception):
    """A file that a plain torch.save was killed in; there is no other."""


class Method:
    """Save the parts after every step that is due; leaving the context waits for what is still being saved."""

    def __init__(self, folder: Path, parts: Parts, every: int) -> None:
        self.folder, self.parts, self.every = folder, parts, every
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Bracket a training step."""
        yield
        if step % self.every == 0:
            self.save(step)

    def save(self, step: int) -> None:
        """Save; when this returns, training may go on."""
        raise NotImplementedError

    def load(self) -> int:
        """Restore the parts from the newest checkpoint and return its step; 0 where there is none."""
        raise NotImplementedError

    def wait(self) -> None:
        """Wait for what is being saved in the background; raises what made it fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.wait()


class TorchSave(Method):
    """Plain torch.save over the only file: training waits, nothing is flushed, and a kill inside leaves a torn file."""

    @property
    def file(self) -> Path:
        return self.folder / "checkpoint.pt"

    def gathered(self, step: int) -> dict[str, Any]:
        return {"step": step, **{name: part.state_dict() for name, part in self.parts.items()}}

    def save(self, step: int) -> None:
        torch.save(self.gathered(step), self.file)

    def load(self) -> int:
        if not self.file.exists():
            return 0
        if not zipfile.is_zipfile(self.file):  # its directory is written last
            raise TornFileError(f"{self.file} is torn: torch.save was killed while it wrote over its only checkpoint")
        # The numpy arrays among the random numbers need the unpickler; this program wrote the file itself.
        saved = torch.load(self.file, map_location="cpu", weights_only=False)
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        step: int = saved["step"]
        return step


class TorchSaveFsync(TorchSave):
    """torch.save into a new file, flushed before it takes the old one's name: safe, and training waits for it all."""

    def save(self, step: int) -> None:
        write_safely(self.gathered(step), self.file)


class CheckFreq(TorchSave):
    """CheckFreq (FAST '21): a snapshot in memory beside the next forward and backward, written in the background.

    Parameters and optimizer state change in ``optimizer.step`` alone, so their copy has until then, and is waited for
    there. All else is copied before ``save`` returns: BatchNorm's statistics change in forward. One checkpoint is on
    its way at a time.
    """

    def __init__(self, folder: Path, parts: Parts, every: int) -> None:
        super().__init__(folder, parts, every)
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.copied = threading.Event()
        self.copied.set()
        optimizer, model = parts["optimizer"], parts["model"]
        assert isinstance(optimizer, torch.optim.Optimizer)
        assert isinstance(model, torch.nn.Module)
        self.late = {name for name, _ in model.named_parameters()}
        optimizer.register_step_pre_hook(self.before_update)

    def save(self, step: int) -> None:
        self.wait()
        state = self.gathered(step)
        state["model"] = {k: v if k in self.late else v.clone() for k, v in state["model"].items()}
        self.copied.clear()
        self.thread = threading.Thread(target=self.copy_and_write, args=(state,), name="checkfreq")
        self.thread.start()

    def before_update(self, *_: object) -> None:
        self.copied.wait()

    def copy_and_write(self, state: dict[str, Any]) -> None:
        try:
            try:
                state |= {name: copied(state[name]) for name in ("model", "optimizer")}
            finally:
                self.copied.set()
            write_safely(state, self.file)
        except BaseException as error:  # noqa: BLE001 - raised by wait(), on the training thread
            self.error = error

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            raise error


class PCcheck(Method):
    """This package: captured beside the next forward and backward, and up to two are written while training goes on."""

    def __init__(self, folder: Path, parts: Parts, every: int) -> None:
        super().__init__(folder, parts, every)
        self.engine = SyncCheckpointEngine(folder, max_in_flight=2, interval=every)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        with self.engine.step(self.parts, step - 1):  # numbered from 0
            yield

    def load(self) -> int:
        restored = self.engine.restore(self.parts)
        return restored.step + 1 if restored else 0

    def __enter__(self) -> Self:
        self.engine.open()
        optimizer = self.parts["optimizer"]
        assert isinstance(optimizer, torch.optim.Optimizer)
        self.engine.attach(optimizer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.__exit__(kind, error, traceback)


METHODS: dict[str, type[Method]] = {
    "torch_save": TorchSave,
    "torch_save_fsync": TorchSaveFsync,
    "checkfreq": CheckFreq,
    "pccheck": PCcheck,
}


def copied(state: Any) -> Any:
    """Return nested dicts and lists with every tensor cloned."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: copied(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(copied(value) for value in state)
    return state


def write_safely(state: dict[str, Any], file: Path) -> None:
    """Replace a file such that a crash at any moment leaves the old or the new one, whole."""
    temporary = file.with_suffix(".tmp")
    with temporary.open("wb") as output:
        torch.save(state, output)
        output.flush()
        os.fsync(output.fileno())  # or the name could come to stand for bytes that were never written
    temporary.rename(file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)  # or the old name could come back
    finally:
        os.close(folder)
