"""Ray Train whose two workers save one checkpoint together. Kill a worker, or all: they continue.

python examples/ray_train.py [STEPS]    # trains 40 steps more; the second run resumes
"""

import sys
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import Checkpoint, CheckpointConfig, CheckpointUploadMode, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from pccheck_async import RNGState, SyncCheckpointEngine, list_checkpoints


def report(saved: Any, metrics: dict[str, Any]) -> None:
    """Tell Ray of a checkpoint, when it is durable. Ray deletes what it is told of, so this is never the store."""
    saved.result()
    pointer = Path(ray.train.get_context().get_storage().experiment_fs_path, f"step-{metrics['step']}")
    pointer.mkdir(exist_ok=True)
    ray.train.report(metrics, Checkpoint(pointer), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(torch.distributed.get_rank())  # every worker draws its own batches
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, saved = {"model": model, "optimizer": optimizer, "rng": RNGState()}, None
    with SyncCheckpointEngine(config["store"], group=torch.distributed.group.WORLD) as engine:  # on every worker
        engine.attach(optimizer)
        restored = engine.restore(state)  # what the store has, whatever Ray was told
        for step in range(restored.step + 1 if restored else 0, config["end"]):
            inputs = torch.randn(32, 16)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9 or step + 1 == config["end"] or ray.train.get_preemption_info():  # the same on all
                if saved:
                    report(*saved)  # the one before: this one is written while training continues
                saved = engine.checkpoint(state, step=step), {"step": step, "loss": loss.item()}
        if saved:
            report(*saved)


def main() -> None:
    store, runs = Path("checkpoints/ray_train").absolute(), Path("checkpoints/ray_runs").absolute()
    done = max((info.step + 1 for info in list_checkpoints(store)), default=0)
    print(f"resumed after step {done - 1}" if done else "starting from scratch")
    ray.init(num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    run = RunConfig("train", str(runs), checkpoint_config=CheckpointConfig(2), failure_config=FailureConfig(1))
    loop = {"store": str(store), "end": done + (int(sys.argv[1]) if len(sys.argv) > 1 else 40)}
    trainer = TorchTrainer(train, train_loop_config=loop, scaling_config=ScalingConfig(num_workers=2), run_config=run)
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
