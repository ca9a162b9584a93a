"""Hugging Face's safetensors: a file of tensors by name, and of nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from examples.paper.lab.methods.base import Done, Handle, Method, State, UnsupportedError
from examples.paper.lab.methods.files import missing, sync_folder

__all__ = ["Safetensors"]


class Safetensors(Method):
    """``save_file``, then flushed, and renamed as torch.save's strongest form is; training waits."""

    name = "safetensors + fsync + rename"
    durable = atomic = True
    resumable = False

    @classmethod
    def why_not(cls) -> str | None:
        """Return whether it is installed."""
        return missing("safetensors")

    @property
    def file(self) -> Path:
        """The checkpoint."""
        return self.folder / "checkpoint.safetensors"

    def save(self, state: State, step: int) -> Handle:
        """Replace the file."""
        from safetensors.torch import save_file

        temporary = self.file.with_suffix(".tmp")
        save_file(_named(state), temporary, {"step": str(step)})
        fd = os.open(temporary, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        temporary.rename(self.file)
        sync_folder(self.folder)
        return Done()

    def load(self, into: State) -> int:
        """Copy out of the mapped file."""
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            for name, tensor in _named(into).items():
                tensor.copy_(file.get_tensor(name))
            return int(file.metadata()["step"])


def _named(state: State, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors by their path; the format has no place for anything else."""
    found: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            found[name] = value.detach()
        elif isinstance(value, dict):
            found |= _named(value, f"{name}.")
        else:
            raise UnsupportedError(f"safetensors stores tensors alone, and {name} is a {type(value).__name__}")
    return found
