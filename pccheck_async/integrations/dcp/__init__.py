# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` on stores of this package: ``dcp.save``, ``dcp.async_save``, ``dcp.load``.

::

    dcp.save(state, checkpoint_id="run/step-10", storage_writer=StorageWriter("run"))
    dcp.load(state, checkpoint_id="run/step-10", storage_reader=StorageReader("run"))

DCP plans, each rank saves the items of its plan, and the group commits (:mod:`pccheck_async.group`). DCP's ``Metadata``
is not written, but made from the manifests of all ranks when a checkpoint is loaded.
"""

from pccheck_async.integrations.dcp.reader import StorageReader
from pccheck_async.integrations.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
