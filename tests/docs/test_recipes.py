"""The programs of the page with recipes: killed at random and resumed, they end with the bits of a run that was not."""

from __future__ import annotations

import io
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path

import pytest
import torch

from pccheck_async import SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.errors import DamagedError
from tests.support.processes import passes_in_a_forked_child
from tests.support.readme_blocks import ROOT
from tests.support.recipes import MOST_LINES, programs, write_program
from tests.support.saving import saving
from tests.support.state_strategies import difference
from tests.support.warm import run_warm, start_warm

PAGE = "recipes.md"
FREE = {"rng.python", "rng.numpy"}
"""Generators that no program seeds, because none draws from them: they differ from run to run."""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def test_the_programs_are_short() -> None:
    for page in (PAGE, "notebooks.md"):
        for name, text in programs(page).items():
            assert len(text.splitlines()) < MOST_LINES, name


def start(script: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program in its own folder."""
    return start_warm(
        script, *arguments, cwd=script.parent, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(script: Path, *arguments: str) -> str:
    """Run a program to its end; return what it printed."""
    done = run_warm(script, *arguments, cwd=script.parent, env=ENVIRONMENT, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    printed: str = done.stdout
    return printed


def same_bits(one: Path, other: Path, but: set[str] = FREE) -> bool:
    """Whether the newest checkpoints of two stores are equal, ``but`` for leaves that differ from run to run."""
    compared = stores.compare(one, other)
    assert compared.one.step == compared.other.step
    assert compared.leaves >= 3
    return {".".join(each.path.split(".")[:2]) for each in compared.differences} <= but


def rows(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.campaign)])
def test_the_training_script_killed_at_random(seed: int, tmp_path: Path) -> None:
    choice, scripts = random.Random(seed), {}
    for name in ("once", "killed"):
        (tmp_path / name).mkdir()
        scripts[name] = write_program(PAGE, "train.py", tmp_path / name)
    finish(scripts["once"])
    once, killed = tmp_path / "once", tmp_path / "killed"
    total = rows(once / "log.csv")
    statuses = []
    for _ in range(5):
        at = rows(killed / "log.csv") + choice.randint(1, total // 5)
        with start(scripts["killed"]) as process:
            while rows(killed / "log.csv") < at and process.poll() is None:
                time.sleep(0.0005)
            process.send_signal(signal.SIGKILL)
        statuses.append(process.returncode)
        with (killed / "log.csv").open("a") as log:
            log.write(choice.choice(["", "99", "99999,0.5,", "5"]))  # a row that the kill has cut
    assert statuses[:2] == [-signal.SIGKILL] * 2
    finish(scripts["killed"])
    assert (killed / "log.csv").read_bytes() == (once / "log.csv").read_bytes()
    assert same_bits(once / "run", killed / "run")
    best = [torch.load(folder / "best.pt") for folder in (once, killed)]
    assert not difference(*best)


@pytest.mark.slow
def test_what_attach_is_worth_is_measured(tmp_path: Path) -> None:
    said = finish(write_program(PAGE, "stall.py", tmp_path), "32")
    number = r"-?\d+\.\d"
    for how in ("not attached", "attached"):
        line = rf"^{how}: training waits {number} ms for a checkpoint, and is {number} ms later in all"
        assert re.search(line, said, re.MULTILINE), said


def _newest_folder(output: Path) -> int:
    return max((int(folder.name.partition("-")[2]) for folder in output.glob("checkpoint-*")), default=0)


@pytest.mark.slow
def test_the_best_model_of_a_trainer_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    scripts = {}
    for name in ("once", "killed"):
        (tmp_path / name).mkdir()
        scripts[name] = write_program(PAGE, "best.py", tmp_path / name)
    said = finish(scripts["once"]).splitlines()
    once, killed = tmp_path / "once", tmp_path / "killed"
    best = re.findall(r"^best: step (\d+), .*", "\n".join(said), re.MULTILINE)
    assert len(best) == 1
    assert 20 < int(best[0]) < list_checkpoints(once / "run")[0].step
    statuses = []
    for step in (20, 35, 50, int(best[0])):  # while the Trainer writes this folder of its own, or soon after
        with start(scripts["killed"]) as process:
            while _newest_folder(killed / "output") < step and process.poll() is None:
                time.sleep(0.0005)
            process.kill()
        statuses.append(process.returncode)
    assert statuses[:3] == [-signal.SIGKILL] * 3
    again = finish(scripts["killed"]).splitlines()
    for line in [line for line in said if line.startswith("best: ")]:
        assert line in again
    assert [path.name for path in (killed / "output").iterdir()] == [f"checkpoint-{best[0]}"]
    assert same_bits(once / "run", killed / "run", but={"trainer.state", "trainer.unlogged"})  # how long it took
    weights = [(folder / "best" / "model.safetensors").read_bytes() for folder in (once, killed)]
    assert weights[0] == weights[1]


def state_of(step: int) -> dict[str, object]:
    return {"tensor": torch.arange(30_000) + step, "step": step}


def is_whole(store: Path, step: int) -> bool:
    return not difference(load_sync(store, step=step), state_of(step))


@pytest.mark.slow
def test_a_backup_beside_a_trainer(tmp_path: Path) -> None:
    script = write_program(PAGE, "backup.py", tmp_path)
    run, backup = tmp_path / "run", tmp_path / "backup"
    with SyncCheckpointEngine(run) as engine, saving(engine, state_of):
        for _ in range(10):
            finish(script, "run", "backup")
    finish(script, "run", "backup")
    kept = [info.step for info in list_checkpoints(backup)]
    assert len(kept) == 7
    assert kept == sorted(kept, reverse=True)
    assert kept[0] == list_checkpoints(run)[0].step
    assert all(is_whole(backup, step) for step in kept)
    assert "has steps" in finish(script, "run", "backup")  # nothing new
    assert [info.step for info in list_checkpoints(backup)] == kept
    shutil.rmtree(run)
    stores.copy(backup, tmp_path / "run-2")
    with SyncCheckpointEngine(tmp_path / "run-2") as engine:
        restored = engine.restore(state := state_of(0))
        assert restored is not None
        assert not difference(state, state_of(kept[0]))


@pytest.mark.slow
def test_what_is_in_a_plain_copy_of_a_live_store(tmp_path: Path) -> None:
    """Between two files that it copies, checkpoints become durable."""
    run, steps = tmp_path / "run", count()

    def copy_slowly(target: Path) -> None:
        target.mkdir()
        for file in sorted(run.iterdir()):  # commit, slot-000, ...
            subprocess.run(["cp", "-a", file, target], check=True)
            for _ in range(2):
                save()

    with SyncCheckpointEngine(run) as engine:

        def save() -> int:
            return engine.checkpoint(state_of(step := next(steps)), step=step).result(60).step

        for _ in range(3):
            save()
        copy_slowly(tmp_path / "plain")
        engine.pin(step=(pinned := save()))
        copy_slowly(tmp_path / "of-pinned")
        subprocess.run(["cp", "-al", run, tmp_path / "links"], check=True)
        seen = list_checkpoints(tmp_path / "links")
        last = save()
    with pytest.raises(DamagedError):
        load_sync(tmp_path / "plain")
    assert is_whole(tmp_path / "of-pinned", pinned)
    assert last not in [info.step for info in seen]
    assert [info.step for info in list_checkpoints(tmp_path / "links")] == [last, pinned]  # it went on with the store
    subprocess.run(["cp", "-a", run, tmp_path / "closed"], check=True)
    assert is_whole(tmp_path / "closed", last)


def _evaluated_store(folder: Path) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 1)
    with SyncCheckpointEngine(folder / "run", keep_last=2) as engine:
        for step in (1, 2):
            engine.checkpoint({"model": model}, step=step).result(60)
    return write_program(PAGE, "evaluate.py", folder)


def _bytes_of(store: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.iterdir()}


@pytest.mark.slow
def test_an_evaluation_from_a_read_only_mount(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    script = _evaluated_store(tmp_path / "evaluation")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    mount = f"mount --bind {script.parent / 'run'} {mounted} && mount -o remount,bind,ro {mounted}"
    if subprocess.run(["unshare", "-m", "bash", "-c", mount], capture_output=True, check=False).returncode:
        pytest.skip("this process may mount nothing")
    recover = f"{sys.executable} -m pccheck_async recover"  # it is in order, though no trainer can open it there
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", f"{mount} && {sys.executable} {script} {mounted} && {recover} {mounted}"],
        cwd=script.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^step (\d)", done.stdout, re.MULTILINE) == ["2", "1"]
    assert "the store's files cannot be written (Read-only file system)" in done.stdout
    assert "mounted read-only, so that no trainer can open the store; that is no damage" in " ".join(
        done.stdout.split()
    )
    assert (script.parent / "weights.safetensors").exists()


@pytest.mark.slow
def test_an_evaluation_by_a_user_who_may_only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("safetensors")
    with tempfile.TemporaryDirectory() as folder:  # that user may not enter the folders above tmp_path
        Path(folder).chmod(0o755)
        script = _evaluated_store(Path(folder) / "evaluation")
        run, exported = script.parent / "run", script.parent / "weights.safetensors"
        monkeypatch.setattr(sys, "argv", [str(script), str(run)])
        monkeypatch.chdir(script.parent)
        runpy.run_path(str(script))  # here, so that all is imported: nor may that user read every module
        exported.unlink()
        script.parent.chmod(0o777)
        for path in (*run.iterdir(), run):
            path.chmod(0o555)
        before = _bytes_of(run)

        def evaluate() -> None:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            output = io.StringIO()
            with redirect_stdout(output):
                runpy.run_path(str(script))
            assert "the store's files cannot be written (Permission denied)" in output.getvalue()

        assert passes_in_a_forked_child(evaluate)
        assert exported.exists()
        assert _bytes_of(run) == before
        run.chmod(0o755)
