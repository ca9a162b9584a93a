"""The names that users may rely on: this test fails where one comes, goes or moves."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from collections.abc import Sequence

import pytest
from typer.main import get_command

import pccheck_async
from pccheck_async.cli import app

NAMES = {
    "pccheck_async": """
        Adaptive CheckpointEngine CheckpointError CheckpointInfo Drain FlatShard Group GroupError Keep MemoryTier
        NoCheckpointError PendingCheckpoint Policy RNGState Restored ResumableLoader ResumableSampler Shelf
        StateMismatchError Stateful StorageOptions SyncCheckpointEngine TornCaptureError TrainingStep list_checkpoints
        load load_sync open_checkpoint
    """,
    "pccheck_async.errors": """
        CheckpointError ClosedError CorruptStoreError DamagedError DurabilityUnknownError GroupError
        IncompleteCheckpointError InfeasibleError InvalidTuningError NewerFormatError NoCheckpointError ReadError
        ReplicasDifferError
        StateMismatchError StoreError StoreFailedError StoreFullError StoreLockedError TornCaptureError
        UnsupportedStateError WriteError
    """,
    "pccheck_async.policies": """
        Adaptive CheckFreqInterval Decision EverySeconds EverySteps PCcheckInterval Policy SaveReport StepReport
        YoungDaly
    """,
    "pccheck_async.statistics": "CheckpointProgress Decisions Distribution EngineStatistics Event Stage",
    "pccheck_async.stores": """
        CheckedCheckpoint Comparison Damage Description Exported Imported LeafDifference Measurement OpenCheckpoint
        Point Recovery Removal SpaceNeeded StoredState StoredTensor TunedSettings Tuning Verification compare copy
        describe export import_ pin read_tuning recover reject remove unpin verify
    """,
}
MOVED = {
    "StoreFullError": "errors.StoreFullError",
    "EverySteps": "policies.EverySteps",
    "EngineStatistics": "statistics.EngineStatistics",
    "Verification": "stores.Verification",
    "verify_checkpoints": "stores.verify",
    "import_checkpoint": "stores.import_",
    "pin_checkpoint": "stores.pin",
}


@pytest.mark.parametrize(("module", "names"), NAMES.items())
def test_the_public_names(module: str, names: str) -> None:
    found: Sequence[str] = importlib.import_module(module).__all__
    assert sorted(found) == sorted(names.split())
    for name in found:
        assert getattr(importlib.import_module(module), name) is not None
    assert {*found} <= {*dir(importlib.import_module(module))}


ENGINE_VERBS = ["pin", "unpin", "remove", "reject"]
READING = ["verify", "copy", "compare"]


@pytest.mark.parametrize("verb", [*ENGINE_VERBS, *READING])
def test_a_verb_takes_a_step_and_a_name_everywhere(verb: str) -> None:
    functions = [getattr(pccheck_async.stores, verb)]
    if verb in ENGINE_VERBS:
        functions += [getattr(pccheck_async.CheckpointEngine, verb), getattr(pccheck_async.SyncCheckpointEngine, verb)]
    for function in functions:
        parameters = inspect.signature(function).parameters
        for name in ("step", "name"):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY, function
            assert parameters[name].default in (None, ()), function
    options = {option for each in get_command(app).commands[verb].params for option in each.opts}  # type: ignore[attr-defined]
    assert {"--step", "--name"} <= options


def test_both_engines_take_the_same_arguments() -> None:
    for verb in ("open", "close", "step", "checkpoint", "restore", "drain", "tune", *ENGINE_VERBS):
        one, other = (
            inspect.signature(getattr(engine, verb)).parameters
            for engine in (pccheck_async.CheckpointEngine, pccheck_async.SyncCheckpointEngine)
        )
        assert one == other, verb


def test_the_root_has_at_most_35_names() -> None:
    assert len(pccheck_async.__all__) <= 35


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_a_name_of_before_works_and_says_where_it_is(old: str, new: str) -> None:
    module, _, name = new.partition(".")
    with pytest.warns(DeprecationWarning, match=rf"pccheck_async\.{old} is pccheck_async\.{new} now") as caught:
        value = getattr(pccheck_async, old)
    assert value is getattr(importlib.import_module(f"pccheck_async.{module}"), name)
    assert caught[0].filename == __file__


def test_every_name_of_before_leads_somewhere() -> None:
    for old in pccheck_async._MOVED:
        with pytest.warns(DeprecationWarning, match=" now; "):
            assert getattr(pccheck_async, old) is not None


@pytest.mark.parametrize("module", NAMES)
def test_an_unknown_name_is_an_attribute_error(module: str) -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        importlib.import_module(module).nonsense  # noqa: B018


def test_its_modules_need_no_import_of_their_own_and_torch_comes_with_the_first_name() -> None:
    code = (
        "import sys, pccheck_async as p; p.stores, p.policies, p.statistics, p.errors; "
        "assert 'torch' not in sys.modules; p.stores.verify; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
