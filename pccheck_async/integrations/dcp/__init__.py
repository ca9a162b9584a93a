# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed.checkpoint`` on stores of this package: ``dcp.save``, ``dcp.async_save``, ``dcp.load``.

::

    dcp.save(state, checkpoint_id="run/step-10", storage_writer=StorageWriter("run"))
    dcp.load(state, checkpoint_id="run/step-10", storage_reader=StorageReader("run"))

DCP plans, and each rank saves the items of its plan; the commit is the group's (:mod:`pccheck_async.group`).
Nothing is written for DCP beside that: its ``Metadata`` is made of the manifests of all ranks.
"""

from pccheck_async.integrations.dcp.reader import StorageReader
from pccheck_async.integrations.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
