"""torch's own tests of torch.distributed.checkpoint, with this package's writer and reader in place of torch's.

    python -m tests.campaign.dcp_conformance FOLDER [pytest's arguments]

``FOLDER`` is ``test/distributed/checkpoint`` of a checkout of torch's repository at the version that is installed;
torch's test framework needs the package ``expecttest``. Ranks are spawned, and each imports this module anew: it
changes torch when it is imported. What is left out needs the extensions of torch's files, which a store has not, or
CUDA, or tests what came after this version.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.testing._internal import common_distributed
from torch.testing._internal.distributed._tensor import common_dtensor

from pccheck_async.integrations.dcp import StorageReader, StorageWriter

FILES = {
    "test_file_system_checkpoint_cpu.py": "not (Rot13 or ZStandard or rowwise_to_colwise or dtype_mismatch_casting)",
    "test_dtensor_resharding.py": "",
}


class Writer(StorageWriter):
    """Takes the arguments of torch's."""

    def __init__(self, path: str, thread_count: int = 1, **_: Any) -> None:
        super().__init__(path)


class Reader(StorageReader):
    """Takes the arguments of torch's."""

    def __init__(self, path: str, **_: Any) -> None:
        super().__init__(path)


dcp.FileSystemWriter = Writer  # type: ignore[assignment, attr-defined]
dcp.FileSystemReader = Reader  # type: ignore[assignment, attr-defined]
common_dtensor.__dict__["skip_if_lt_x_gpu"] = partial(common_distributed.skip_if_lt_x_gpu, allow_cpu=True)


def main(folder: Path, arguments: list[str]) -> int:
    """Run the files; return the worst of pytest's exit statuses."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(folder))  # where spawned ranks find the test's module
    statuses = []
    for name, chosen in FILES.items():
        options = ["-q", "-p", "no:cacheprovider", "-W", "default", "-c", os.devnull, "--rootdir", str(folder)]
        statuses.append(pytest.main([*options, *(["-k", chosen] if chosen else []), *arguments, str(folder / name)]))
    return int(max(statuses))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
