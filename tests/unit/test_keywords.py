"""The keyword arguments that users may rely on, and what became of those of version 0.1."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pccheck_async import (
    CheckpointEngine,
    Group,
    Keep,
    MemoryTier,
    StorageOptions,
    SyncCheckpointEngine,
    load,
    load_sync,
)
from pccheck_async.api import renamed
from pccheck_async.testing import CrashDisk, CrashWriter
from pccheck_async.testing.probe import probe

ENGINE = """
    max_in_flight keep_last keep save_last interval max_stall on_busy on_error allow_pickle overwrite group storage
    memory drain
"""
FIELDS = {
    Keep: "every best spaced",
    MemoryTier: "interval keep_last path keep_after_close replicas interface rate_limit",
    StorageOptions: """
        medium io writers chunk_bytes host_memory gpu_capture check_captures skip_unchanged lock_timeout
        exit_timeout
    """,
}
KINDS = pytest.mark.parametrize("kind", [CheckpointEngine, SyncCheckpointEngine])
Engine = Callable[..., Any]


@KINDS
def test_the_keywords_of_an_engine(kind: Engine) -> None:
    found = inspect.signature(kind).parameters.values()
    assert [each.name for each in found if each.kind is each.KEYWORD_ONLY] == ENGINE.split()
    assert [each.name for each in found if each.kind is not each.KEYWORD_ONLY] == ["path"]


@pytest.mark.parametrize(("kind", "names"), FIELDS.items())
def test_the_fields_of_its_parts(kind: Any, names: str) -> None:
    assert [field.name for field in fields(kind)] == names.split()
    with pytest.raises(TypeError):
        kind(None)  # by keyword alone
    with pytest.raises(FrozenInstanceError):
        setattr(kind(), names.split(maxsplit=1)[0], None)


def test_the_keywords_of_a_group() -> None:
    for function, others in ((Group, ["timeout"]), (Group.from_env, ["timeout"]), (Group.of, [])):
        found = inspect.signature(function).parameters.values()
        named = [each.name for each in found if each.kind is each.KEYWORD_ONLY]
        assert named == [*others, "replicated", "trusted_replicas"]


OLD: list[tuple[dict[str, Any], str]] = [
    ({"keep_every": 3}, "keep=Keep(every=3)"),
    ({"keep_best": ("loss", 2, "min")}, "keep=Keep(best=('loss', 2, 'min'))"),
    ({"spaced": [(1, 2)], "keep_every": 5}, "keep=Keep(every=5, spaced=[(1, 2)])"),
    ({"medium": "files"}, "storage=StorageOptions(medium='files')"),
    ({"io": "python"}, "storage=StorageOptions(io='python')"),
    ({"writers": 2, "chunk_bytes": 4096}, "storage=StorageOptions(writers=2, chunk_bytes=4096)"),
    ({"host_memory": 1 << 20}, "storage=StorageOptions(host_memory=1048576)"),
    ({"device": "stream"}, "storage=StorageOptions(gpu_capture='stream')"),
    ({"check_captures": True}, "storage=StorageOptions(check_captures=True)"),
    ({"lock_timeout": 0.5}, "storage=StorageOptions(lock_timeout=0.5)"),
    ({"exit_timeout": 1}, "storage=StorageOptions(exit_timeout=1)"),
    ({"keep_every": 3, "writers": 1}, "keep=Keep(every=3), storage=StorageOptions(writers=1)"),
]


@KINDS
@pytest.mark.parametrize(("old", "new"), OLD, ids=str)
def test_an_old_keyword_works_and_says_the_new_spelling(
    kind: Engine, old: dict[str, Any], new: str, tmp_path: Path
) -> None:
    with pytest.warns(DeprecationWarning, match="the old spelling goes") as caught:
        engine = kind(tmp_path, **old)
    (warning,) = caught
    assert f" is {kind.__name__}({new}) now; the old spelling goes with version 1.1" in str(warning.message)
    assert warning.filename == __file__
    parts = {"Keep": Keep, "StorageOptions": StorageOptions}
    assert probe(engine).core.config == probe(kind(tmp_path, **eval(f"dict({new})", parts))).core.config


def test_a_medium_of_before_is_not_shown_but_used() -> None:
    with pytest.warns(DeprecationWarning, match=r"StorageOptions\(io=\.\.\.\)"):
        engine = SyncCheckpointEngine("x", io=CrashWriter(CrashDisk()))
    with engine:
        assert engine.checkpoint({"x": 1}).result().step == 0


@pytest.mark.parametrize("name", ["replicated", "trusted_replicas"])
def test_the_old_globs_of_a_group(name: str, tmp_path: Path) -> None:
    group, globs = Group(0, 1, None, timeout=1), dict[str, Any]({name: ["a.*"]})
    with pytest.warns(DeprecationWarning, match=rf"group=Group\.of\(group, {name}=\['a\.\*'\]\)"):
        engine = SyncCheckpointEngine(tmp_path, group=group, **globs)
    assert getattr(probe(engine).core.peers.group, name) == ("a.*",)  # type: ignore[attr-defined]
    assert getattr(group, name) == ()
    with pytest.warns(DeprecationWarning, match="the old spelling goes"):
        SyncCheckpointEngine(tmp_path, **globs)


@KINDS
@pytest.mark.parametrize(
    ("both", "says"),
    [
        ({"keep_every": 3, "keep": Keep(every=4)}, r"give keep_every= or keep=Keep\(every=\.\.\.\), not both"),
        (
            {"io": "auto", "storage": StorageOptions(io="python")},
            r"io= or storage=StorageOptions\(io=\.\.\.\), not both",
        ),
        ({"device": "stream", "storage": StorageOptions(gpu_capture="snapshot")}, "device= or storage="),
        ({"replicated": ["a"], "group": Group(0, 1, None, replicated=["b"])}, "replicated= or group="),
    ],
)
def test_an_old_keyword_and_the_new_one_together(kind: Engine, both: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=says):
        kind(tmp_path, **both)


def test_an_old_keyword_beside_other_fields_of_the_new_one(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="the old spelling goes"):
        engine = SyncCheckpointEngine(tmp_path, io="python", storage=StorageOptions(writers=3))
    assert probe(engine).core.config.storage == StorageOptions(io="python", writers=3)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("writer", r"; did you mean storage=StorageOptions\(writers=\.\.\.\)"),
        ("keep_evry", r"; did you mean keep=Keep\(every=\.\.\.\)"),
        ("best", r"; did you mean keep=Keep\(best=\.\.\.\)\?$"),
        ("gpu_capture", r"; did you mean storage=StorageOptions\(gpu_capture=\.\.\.\)\?$"),
        ("replicate", r"; did you mean group=Group\.of\(group, replicated=\.\.\.\)"),
        ("intervall", r"; did you mean interval\?$"),
        ("colour", "; it has path, max_in_flight, keep_last, "),
        ("every", r"; did you mean interval or keep=Keep\(every=\.\.\.\)\?$"),
        ("save_every", r"; did you mean interval\?$"),
        ("save_steps", r"; did you mean interval\?$"),
        ("every_n_train_steps", r"; did you mean interval\?$"),
        ("every_n_epochs", r"; did you mean interval=n, in steps \(for each epoch, as many as it has\)\?$"),
        ("save_strategy", r"; did you mean interval=n, in steps \(for each epoch, as many as it has\)\?$"),
        ("save_total_limit", r"; did you mean keep_last\?$"),
        ("save_top_k", r'; did you mean keep=Keep\(best=\(metric, 1, "min"\)\)\?$'),
        ("dirpath", r"; did you mean path\?$"),
    ],
)
@KINDS
def test_a_keyword_that_there_is_not(kind: Engine, wrong: str, says: str) -> None:
    with pytest.raises(TypeError, match=rf"^{kind.__name__} has no argument '{wrong}'{says}"):
        kind("nowhere", **{wrong: 3})


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda _: Keep(evry=3), "^Keep has no argument 'evry'; did you mean every"),  # type: ignore[call-arg]
        (lambda _: Keep(last=3), "^Keep has no argument 'last'; it has every, best, spaced$"),  # type: ignore[call-arg]
        (lambda _: StorageOptions(writer=3), "^StorageOptions has .*; did you mean writers"),  # type: ignore[call-arg]
        (lambda _: MemoryTier(every=3), "^MemoryTier has .*; did you mean interval"),  # type: ignore[call-arg]
        (
            lambda engine: engine.restore({}, map_location="cpu"),
            "^SyncCheckpointEngine.restore has no .*; it has state",
        ),
        (lambda engine: engine.restore({}, strct=False), "did you mean strict"),
        (lambda engine: engine.checkpoint({}, epoch=1), "^SyncCheckpointEngine.checkpoint has .*; did you mean step"),
        (lambda engine: engine.checkpoint({}, 1), "3 were given; by name: step, metadata, "),
        (lambda engine: engine.step({}, 1, metrics={}), "did you mean metadata"),
        (lambda engine: load_sync(engine.path, map_location="cpu"), "^load_sync has .*; did you mean device"),  # type: ignore[call-arg]
        (lambda engine: load(engine.path, map_location="cpu"), "^load has .*; did you mean device"),  # type: ignore[call-arg]
        (lambda _: SyncCheckpointEngine.restore({}), "^SyncCheckpointEngine.restore was called on the class: make"),  # type: ignore[call-arg,arg-type]
        (lambda _: SyncCheckpointEngine(), r"^SyncCheckpointEngine\(\) missing 1 .* 'path'$"),  # type: ignore[call-arg]
        (lambda _: CheckpointEngine("a", 3), r"^CheckpointEngine\(\) takes .*; by name: max_in_flight"),  # type: ignore[call-arg]
    ],
)
def test_wrong_arguments_of_other_calls(call: Callable[[Any], object], says: str, tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(TypeError, match=says):
        call(engine)


@KINDS
def test_verbs_of_other_libraries(kind: Engine, tmp_path: Path) -> None:
    engine = kind(tmp_path)
    for name, here in {"save": r"checkpoint\(state", "load": r"restore\(state\)", "wait": r"drain\(\)"}.items():
        with pytest.raises(
            AttributeError, match=rf"'{kind.__name__}' object has no attribute '{name}': write .*{here}"
        ):
            getattr(engine, name)
    with pytest.raises(AttributeError, match=r"attribute 'colour'$"):
        _ = engine.colour
    assert not hasattr(engine, "state_dict")


def test_an_error_from_inside_a_call_stays_as_it_is(tmp_path: Path) -> None:
    class Broken:
        def state_dict(self) -> Any:
            return {}.update(1, 2)  # type: ignore[call-overload]

        def load_state_dict(self, state: Any) -> None: ...

    with SyncCheckpointEngine(tmp_path) as engine, pytest.raises(TypeError, match="update expected at most 1"):
        engine.checkpoint({"x": Broken()}, step=1)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"keep": 3}, "keep is a Keep; to keep the newest 3, write keep_last=3$"),
        ({"keep": "all"}, "keep is a Keep; .* write keep_last='all'$"),
        ({"storage": "python"}, r"storage is a StorageOptions, such as .*, not 'python'"),
        ({"keep": StorageOptions()}, "keep is a Keep"),
    ],
)
def test_a_part_of_another_type(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        SyncCheckpointEngine("nowhere", **setting)


def test_rules_are_equal_however_they_are_spelled() -> None:
    assert Keep(spaced=[(timedelta(minutes=1), timedelta(hours=1))]) == Keep(spaced=((60, 3600.0),))
    assert len({Keep(spaced=[(60, 3600)]), Keep(spaced=((60, 3600),))}) == 1


def test_settings_that_an_integration_hands_on() -> None:
    with pytest.warns(DeprecationWarning, match=r"^Callback\(io='python'\) is Callback\(storage=") as caught:
        assert renamed("Callback", {"io": "python", "interval": 3, "replicated": ["a"]}) == {
            "storage": StorageOptions(io="python"),
            "interval": 3,
            "replicated": ["a"],
        }
    assert caught[0].filename == __file__
    assert renamed("Callback", {"interval": 3}) == {"interval": 3}


def test_a_group_with_globs(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(1, 2, None)
    assert Group.of(group) is group
    named = Group.of(group, replicated=["a.*"])
    assert (named.rank, named.replicated, named.trusted_replicas, group.replicated) == (1, ("a.*",), (), ())
    with pytest.raises(TypeError, match=r"the group has replicated=\['a\.\*'\] already"):
        Group.of(named, replicated=["b"])
    for wrong in ("a.*", [1]):
        with pytest.raises(ValueError, match="replicated is a list of globs over paths"):
            Group(0, 1, None, replicated=wrong)  # type: ignore[arg-type]
