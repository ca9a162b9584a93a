"""SIGKILL in mid-drain, at every kind of request: what counts in the bucket is whole, and nothing reported is lost."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from tests.support.object_server import BUCKET, environment_for, find_server, options_for, served
from tests.support.warm import start_warm

pytestmark = pytest.mark.usefixtures("machine_asked_once")
PROGRAM = ("-m", "tests.support.drained_training")


def started(*words: object, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start the program."""
    return start_warm(*PROGRAM, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, bucket=True)


def killed_again_and_again(folder: Path, url: str, kills: int, env: dict[str, str] = {}) -> None:  # noqa: B006
    """Kill one life after the other; each third one goes on in an empty folder."""
    reported, env = -1, os.environ | env
    for seed in range(kills):
        if seed % 3 == 2:
            shutil.rmtree(folder, ignore_errors=True)
        with started("train", folder, url, seed, env=env) as life:
            output, errors = life.communicate(timeout=120)
        assert life.returncode == -signal.SIGKILL, f"seed {seed}: {life.returncode} {output} {errors}"
        reported = max([reported, *map(int, output.split())])
        with started("check", url, env=env) as check:
            output, errors = check.communicate(timeout=120)
        assert check.returncode == 0, f"seed {seed}: {errors}"
        assert int(output) >= reported, f"seed {seed}: step {reported} was reported, {output} is there"
    assert reported > 0


@pytest.mark.slow
def test_killed_in_mid_drain(tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    killed_again_and_again(tmp_path / "run", f"file://{tmp_path}/bucket", 4)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_killed_200_times_beside_a_server(tmp_path: Path) -> None:
    if find_server() is None:
        pytest.skip("SeaweedFS is not installed")
    import json

    (tmp_path / "server").mkdir()
    with served(tmp_path / "server") as port:
        env = environment_for(port) | {"DRAIN_OPTIONS": json.dumps(options_for(port))}
        killed_again_and_again(tmp_path / "run", f"s3://{BUCKET}/killed", 200, env)
