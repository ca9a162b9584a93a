# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as the files of other tools (torch, safetensors, DCP, Lightning, Hugging Face), and back.

One module per format, with the limits of that format; memory is bounded by a few chunks on either way. May
import ``api`` and the rooms below it.
"""

from pccheck_async.convert.exporting import Exported, export_checkpoint
from pccheck_async.convert.importing import Imported, import_checkpoint

__all__ = ["Exported", "Imported", "export_checkpoint", "import_checkpoint"]
