"""The adaptive policy on a real machine: the example GPT trains, and for a while another process takes the cores.

Run: ``python -m tests.campaign.hog [--folder DIR] [--seconds 40] [--overhead 0.03]``. Three phases of that length:
alone, beside the hog, alone again. Prints every decision, and what checkpoints cost in each phase as the policy
measured it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

from pccheck_async import Adaptive, SyncCheckpointEngine
from tests.campaign.throughput import Run

_HOG = "while True: sum(range(1000))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--overhead", type=float, default=0.03)
    args = parser.parse_args()
    run, policy = Run(4, 256), Adaptive(args.overhead)
    step, said = 0, ""
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as folder,
        SyncCheckpointEngine(folder, interval=policy) as engine,
    ):
        engine.attach(run.optimizer)
        for phase, hogs in (("alone", 0), ("beside a hog", 2), ("alone again", 0)):
            others = [subprocess.Popen([sys.executable, "-c", _HOG]) for _ in range(hogs)]
            before, stall, saves, start = step, engine.statistics().stall_seconds, engine.statistics().admitted, 0.0
            start = time.perf_counter()
            while time.perf_counter() - start < args.seconds:
                with engine.step(run.state, step):
                    run.train()
                step += 1
                decision = engine.statistics().interval
                if decision.reason != said:
                    said = decision.reason
                    print(f"  {time.perf_counter() - start:5.1f} s, step {step}: {said}")
            for other in others:
                other.kill()
                other.wait()
            seconds, statistics = time.perf_counter() - start, engine.statistics()
            print(
                f"{phase}: {seconds / (step - before) * 1e3:.0f} ms per step, {statistics.admitted - saves} saves in "
                f"{step - before} steps, stall {(statistics.stall_seconds - stall) / seconds:.2%}, {policy.measured()}"
            )


if __name__ == "__main__":
    main()
