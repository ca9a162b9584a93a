"""Ways to save a training state, each behind the same small protocol; none changes what its peer does by itself."""

from pccheck_async.bench.methods.base import Handle, Method, State, UnsupportedError
from pccheck_async.bench.methods.checkfreq import CheckFreq
from pccheck_async.bench.methods.dcp import DcpAsyncProcess, DcpAsyncThread, DcpSave
from pccheck_async.bench.methods.deepspeed import DeepSpeedFast
from pccheck_async.bench.methods.gpm import GPM
from pccheck_async.bench.methods.lightning import LightningAsync
from pccheck_async.bench.methods.pccheck import PCcheck, PCcheckOverlapped
from pccheck_async.bench.methods.safetensors import Safetensors
from pccheck_async.bench.methods.torch_checkpointing import TorchCheckpointing
from pccheck_async.bench.methods.torch_save import TorchSave, TorchSaveFsync, TorchSaveRename
from pccheck_async.bench.methods.torchsnapshot import TorchSnapshot, TorchSnapshotAsync

__all__ = ["METHODS", "Handle", "Method", "State", "UnsupportedError", "find_method"]

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        PCcheck,
        PCcheckOverlapped,
        TorchSave,
        TorchSaveFsync,
        TorchSaveRename,
        CheckFreq,
        GPM,
        DcpSave,
        DcpAsyncThread,
        DcpAsyncProcess,
        TorchCheckpointing,
        TorchSnapshot,
        TorchSnapshotAsync,
        Safetensors,
        LightningAsync,
        DeepSpeedFast,
    )
}
"""Every method by its name, whether it can run here or not."""


def find_method(name: str) -> type[Method]:
    """Return the method of that name.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]
