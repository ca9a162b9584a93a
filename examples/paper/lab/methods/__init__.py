"""Ways to save a training state, each behind the same small protocol; none changes what its peer does by itself."""

from examples.paper.lab.methods.base import Handle, Method, State, UnsupportedError
from examples.paper.lab.methods.checkfreq import CheckFreq
from examples.paper.lab.methods.dcp import DcpAsyncProcess, DcpAsyncThread, DcpSave
from examples.paper.lab.methods.deepspeed import DeepSpeedFast
from examples.paper.lab.methods.gpm import GPM
from examples.paper.lab.methods.lightning import LightningAsync
from examples.paper.lab.methods.pccheck import PCcheck, PCcheckMapped, PCcheckOverlapped
from examples.paper.lab.methods.safetensors import Safetensors
from examples.paper.lab.methods.savez import Savez, SavezCompressed, SavezCompressedDurable, SavezDurable
from examples.paper.lab.methods.shelf import ShelfInPlace, ShelfReassigned
from examples.paper.lab.methods.torch_checkpointing import TorchCheckpointing
from examples.paper.lab.methods.torch_save import TorchSave, TorchSaveFsync, TorchSaveRename
from examples.paper.lab.methods.torchsnapshot import TorchSnapshot, TorchSnapshotAsync

__all__ = ["CLUSTERING", "METHODS", "Handle", "Method", "State", "UnsupportedError", "find_method"]

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
"""Every method for training states by its name, whether it can run here or not."""

CLUSTERING: dict[str, type[Method]] = {
    method.name: method
    for method in (
        Savez,
        SavezDurable,
        SavezCompressed,
        SavezCompressedDurable,
        TorchSaveRename,
        PCcheck,
        PCcheckMapped,
        ShelfReassigned,
        ShelfInPlace,
    )
}
"""Those that the clusterings are saved by, in the order of the figure: states of some arrays and a few plain values."""


def find_method(name: str) -> type[Method]:
    """Return the method of that name for training states.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name not in METHODS:
        raise ValueError(f"there is no method {name!r}; there are: {', '.join(METHODS)}")
    return METHODS[name]
