# SPDX-License-Identifier: Apache-2.0
"""Export of checkpoints to the formats of torch, safetensors, DCP, Lightning and Hugging Face, and import from them.

One module per format, with the limits of that format. Memory is bounded by a few chunks in both directions. May import
``api`` and the rooms below it.
"""

from pccheck_async.convert.exporting import Exported, export_checkpoint
from pccheck_async.convert.importing import Imported, import_checkpoint

__all__ = ["Exported", "Imported", "export_checkpoint", "import_checkpoint"]
