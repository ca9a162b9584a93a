"""The campaign that measures a group beside DCP comes to its table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pccheck_async.medium.filesystem import filesystem_type

MIB = 1 << 20


@pytest.mark.campaign
def test_two_ranks_once(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk", tmp_path / "out.json"
    disk.mkdir()
    command = [sys.executable, "-m", "tests.campaign.group_beside_dcp", str(disk), f"--json={out}"]
    command += ["--size=1MiB", "--rounds=1", "--worlds=2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert list(disk.iterdir()) == []

    rows = {(row["state"], row["method"]): row for row in json.loads(out.read_text())["rows"]}
    methods = ("engine", "dcp.save", "dcp.async_save")
    assert list(rows) == [(state, method) for state in ("replicated", "private") for method in methods]
    printed = [line.split()[:3] for line in done.stdout.splitlines()[-len(rows) :]]
    assert printed == [["2", *key] for key in rows]
    for (_, method), row in rows.items():
        stall, ended, durable = (row[figure]["median"] for figure in ("stall", "ended", "durable"))
        assert 0 < stall <= ended <= durable
        assert ended == durable or method != "engine"
    if filesystem_type(disk) != "tmpfs":  # whose bytes the kernel does not count
        copies = {key: row["written"]["median"] / MIB for key, row in rows.items()}
        expected = {key: 1 if key[0] == "replicated" else 2 for key in rows}
        assert {key: round(number) for key, number in copies.items()} == expected
