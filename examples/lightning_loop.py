"""A training with Lightning that is saved while it runs. Kill it at any moment and start it again: it continues.

python examples/lightning_loop.py [STEPS]    # trains 40 steps more; the second run resumes
"""

import logging
import sys

import lightning.pytorch as pl
import torch
from torch import nn

from pccheck_async import ResumableLoader, list_checkpoints
from pccheck_async.integrations.lightning import PCcheckCallback

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 40
STORE = "checkpoints/lightning_loop"
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def training_step(self, inputs, _):
        return nn.functional.mse_loss(self.net(inputs), inputs.sum(1, keepdim=True))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


pl.seed_everything(0, verbose=False)
loader = ResumableLoader(torch.randn(512, 16), batch_size=32, seed=0)
saver = PCcheckCallback(STORE, interval=10, keep_last=2)
saved = list_checkpoints(STORE)
print(f"resumed after step {saved[0].step}" if saved else "starting from scratch")
first = saved[0].step + 1 if saved else 0
quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
trainer = pl.Trainer(max_steps=first + STEPS, accelerator="cpu", callbacks=[saver], **quiet)
trainer.fit(Model(), loader)
print(f"saved: {list_checkpoints(STORE)[0]}")
