"""What a ``checkpoint_id`` means."""

from __future__ import annotations

from pathlib import Path

import pytest

from pccheck_async.integrations.dcp import StorageReader, StorageWriter
from pccheck_async.integrations.dcp.ids import name_of, step_of


@pytest.mark.parametrize(
    ("checkpoint_id", "name"),
    [
        (None, None),
        ("", None),
        ("/data/run7", None),
        ("/data/run7/", None),
        ("/data/run7/step-10", "step-10"),
        ("/data/run7/a/../step-10/", "step-10"),
        ("/data/run7/a/3", "a/3"),
        (Path("/data/run7/best"), "best"),
        ("step-10", "step-10"),
        ("10", "10"),
    ],
)
def test_names(checkpoint_id: str | Path | None, name: str | None) -> None:
    assert name_of(checkpoint_id, "/data/run7") == name


@pytest.mark.parametrize("checkpoint_id", ["/data/run70", "/data", "other/step-10", "../run7"])
def test_paths_outside_the_root_are_refused(checkpoint_id: str) -> None:
    with pytest.raises(ValueError, match=r"outside the root '/data/run7'"):
        name_of(checkpoint_id, "/data/run7")


@pytest.mark.parametrize(
    ("name", "step"), [(None, None), ("best", None), ("step-10", 10), ("a/epoch=3-step=0070", 70), ("10x", None)]
)
def test_steps(name: str | None, step: int | None) -> None:
    assert step_of(name) == step


@pytest.mark.parametrize("kind", [StorageReader, StorageWriter])
def test_what_can_be_an_id(kind: type[StorageReader | StorageWriter]) -> None:
    assert kind.validate_checkpoint_id("/data/run7/step-10")
    assert not kind.validate_checkpoint_id("s3://bucket/run7")


def test_the_writer_is_no_stager() -> None:
    """DCP would take a writer that has ``stage`` for its stager, which keeps the whole state."""
    assert not hasattr(StorageWriter, "stage")


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_last"):
        StorageWriter(tmp_path, keep_last=0)
