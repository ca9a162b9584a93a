# SPDX-License-Identifier: Apache-2.0
"""Lightning: a callback for exact resumption, and a ``CheckpointIO`` and a strategy that save into stores.

::

    trainer = Trainer(callbacks=[PCcheckCallback("run", interval=20)])
    trainer = Trainer(plugins=[PCcheckIO()], callbacks=[ModelCheckpoint(...)])
    trainer = Trainer(strategy=PCcheckModelParallelStrategy(), callbacks=[ModelCheckpoint(...)])  # FSDP2

Tested with Lightning 2.6 (``lightning.pytorch``).
"""

from pccheck_async.integrations.versions import require

require("lightning", "2.6")

from pccheck_async.integrations.lightning.callback import PCcheckCallback  # noqa: E402
from pccheck_async.integrations.lightning.checkpoint_io import PCcheckIO  # noqa: E402
from pccheck_async.integrations.lightning.strategy import PCcheckModelParallelStrategy  # noqa: E402

__all__ = ["PCcheckCallback", "PCcheckIO", "PCcheckModelParallelStrategy"]
