"""A data loader with worker processes and random augmentations that resumes in the middle of an epoch.

python examples/resume_data.py [BATCHES]    # reads 40 batches more; the second run gets the next ones, none twice
"""

import sys
import zlib

import torch
from torch.utils.data import Dataset

from pccheck_async import ResumableLoader, SyncCheckpointEngine

BATCHES = int(sys.argv[1]) if len(sys.argv) > 1 else 40


class Noisy(Dataset[torch.Tensor]):
    """1,000 samples, each with noise that is drawn when it is read."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.randn(8)


def main() -> None:
    seen = {"samples": 0, "checksum": 0}  # plain values are saved, too, and replaced by what was saved
    loader = ResumableLoader(Noisy(), batch_size=32, seed=1, num_workers=2)
    state = {"loader": loader, "seen": seen}
    with SyncCheckpointEngine("checkpoints/resume_data", interval=10) as engine:
        restored = engine.restore(state)
        first = restored.step + 1 if restored else 0
        print(f"resumed after batch {restored.step}" if restored else "starting from scratch")
        for step, batch in zip(range(first, first + BATCHES), loader.forever(), strict=False):
            with engine.step(state, step):
                seen["samples"] += len(batch)
                seen["checksum"] = zlib.crc32(batch.numpy().tobytes(), seen["checksum"])
        print(f"epoch {loader.sampler.epoch}: {seen['samples']} samples in all, checksum {seen['checksum']:08x}")


if __name__ == "__main__":  # worker processes may import this file
    main()
