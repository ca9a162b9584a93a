"""Checkpoints as the files of others (torch.save, safetensors, torch.distributed.checkpoint), and back.

One module per format, which knows what that format can hold; memory is bounded by a few chunks on either way. May
import ``api`` and what is below it.
"""

from pccheck_async.convert.exporting import Exported, export_checkpoint
from pccheck_async.convert.importing import import_checkpoint

__all__ = ["Exported", "export_checkpoint", "import_checkpoint"]
