# SPDX-License-Identifier: Apache-2.0
"""Maintenance of stores and of the folders of groups, without an engine: the functions behind the command ``pccheck``.

Functions that only read are safe beside a running trainer; the others say what they need. ``import_`` ends in an
underscore because ``import`` is a keyword of Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pccheck_async.lazy_names import importer

if TYPE_CHECKING:
    from pccheck_async.api import (
        OpenCheckpoint,
        StoredState,
        StoredTensor,
    )
    from pccheck_async.convert import (
        Exported,
        Imported,
    )
    from pccheck_async.convert import (
        export_checkpoint as export,
    )
    from pccheck_async.convert import (
        import_checkpoint as import_,
    )
    from pccheck_async.store import (
        SpaceNeeded,
    )
    from pccheck_async.tuning import (
        Measurement,
        Point,
        TunedSettings,
        Tuning,
        read_tuning,
    )
    from pccheck_async.upkeep import (
        CheckedCheckpoint,
        Comparison,
        Damage,
        Description,
        LeafDifference,
        Recovery,
        Removal,
        Verification,
    )
    from pccheck_async.upkeep import (
        compare_checkpoints as compare,
    )
    from pccheck_async.upkeep import (
        copy_checkpoint as copy,
    )
    from pccheck_async.upkeep import (
        describe_checkpoint as describe,
    )
    from pccheck_async.upkeep import (
        pin_checkpoint as pin,
    )
    from pccheck_async.upkeep import (
        recover_store as recover,
    )
    from pccheck_async.upkeep import (
        reject_checkpoints as reject,
    )
    from pccheck_async.upkeep import (
        remove_checkpoints as remove,
    )
    from pccheck_async.upkeep import (
        unpin_checkpoint as unpin,
    )
    from pccheck_async.upkeep import (
        verify_checkpoints as verify,
    )

__all__ = [
    "CheckedCheckpoint",
    "Comparison",
    "Damage",
    "Description",
    "Exported",
    "Imported",
    "LeafDifference",
    "Measurement",
    "OpenCheckpoint",
    "Point",
    "Recovery",
    "Removal",
    "SpaceNeeded",
    "StoredState",
    "StoredTensor",
    "TunedSettings",
    "Tuning",
    "Verification",
    "compare",
    "copy",
    "describe",
    "export",
    "import_",
    "pin",
    "read_tuning",
    "recover",
    "reject",
    "remove",
    "unpin",
    "verify",
]

__getattr__ = importer(
    __name__,
    globals(),
    {
        "api": {"OpenCheckpoint": "OpenCheckpoint", "StoredState": "StoredState", "StoredTensor": "StoredTensor"},
        "convert": {
            "Exported": "Exported",
            "Imported": "Imported",
            "export_checkpoint": "export",
            "import_checkpoint": "import_",
        },
        "store": {"SpaceNeeded": "SpaceNeeded"},
        "tuning": {
            "Measurement": "Measurement",
            "Point": "Point",
            "TunedSettings": "TunedSettings",
            "Tuning": "Tuning",
            "read_tuning": "read_tuning",
        },
        "upkeep": {
            "CheckedCheckpoint": "CheckedCheckpoint",
            "Comparison": "Comparison",
            "Damage": "Damage",
            "Description": "Description",
            "LeafDifference": "LeafDifference",
            "Recovery": "Recovery",
            "Removal": "Removal",
            "Verification": "Verification",
            "compare_checkpoints": "compare",
            "copy_checkpoint": "copy",
            "describe_checkpoint": "describe",
            "pin_checkpoint": "pin",
            "recover_store": "recover",
            "reject_checkpoints": "reject",
            "remove_checkpoints": "remove",
            "unpin_checkpoint": "unpin",
            "verify_checkpoints": "verify",
        },
    },
)


def __dir__() -> list[str]:
    return __all__
