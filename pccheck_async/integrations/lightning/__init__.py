"""Lightning: exact resumption by a callback, and its ``CheckpointIO`` on stores of this package.

::

    trainer = Trainer(callbacks=[PCcheckCallback("run", interval=20)])
    trainer = Trainer(plugins=[PCcheckIO()], callbacks=[ModelCheckpoint(...)])

Tested with Lightning 2.6 (``lightning.pytorch``).
"""

import warnings

try:
    from lightning import __version__
except ImportError as error:
    raise ImportError(
        'pccheck_async.integrations.lightning needs Lightning: pip install "pccheck-async[lightning]"'
    ) from error

from pccheck_async.integrations.lightning.callback import PCcheckCallback
from pccheck_async.integrations.lightning.checkpoint_io import PCcheckIO

__all__ = ["PCcheckCallback", "PCcheckIO"]

if not __version__.startswith("2.6."):
    warnings.warn(f"Lightning {__version__}: pccheck_async is tested with 2.6", stacklevel=2)
