"""Checkpoints as the files of others, and back."""

from pccheck_async.convert.exporting import Exported, export_checkpoint
from pccheck_async.convert.importing import import_checkpoint

__all__ = ["Exported", "export_checkpoint", "import_checkpoint"]
