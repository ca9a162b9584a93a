"""The layers of the package: a module imports only from its own layer and those below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pccheck_async

ROOT = Path(pccheck_async.__file__).parent
LAYERS = [
    {  # pure: no await, no file descriptor
        "errors", "info", "checksum", "layout", "config", "statistics", "slots", "retention", "manifest", "plan",
        "segments", "state", "failures", "tracing", "tuning", "policy", "logs", "events", "metrics", "committed",
        "store_path", "_ext", "tensor_access",
    },
    {  # resources
        "memory", "machine", "limiter", "pool", "operations", "writer", "copying", "uninterrupted", "session", "hooks",
        "published", "regular_file", "fork_lock", "latch", "standard_files",
    },
    {  # engine
        "loop", "lifetime", "moment", "pending", "records", "reading", "image", "capture", "commit_file", "slot_files",
        "store", "restore", "scheduler", "read_lease", "steps", "restorer", "admissions", "overlap", "preemption",
        "training", "reporter", "publisher", "progress", "aborts", "pipeline", "stalls", "ledger", "core", "scratch",
        "trials", "tuned", "tuner", "engine_base", "engine", "sync", "loading", "data", "store_reader", "upkeep",
        "verified", "opened", "step_hooks", "windows",
    },
    {"", "bench", "cli", "converting", "testing", "examples", "__main__"},  # edge
]  # fmt: skip
STAGES = {"capture", "store", "restore"}
MODULES = sorted(path for path in ROOT.rglob("*.py") if "examples" not in path.parts)


def part(module: str) -> str:
    return [*module.split("."), ""][1] if module.startswith("pccheck_async") else ""


def layer(name: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if name in names]
    assert found, f"{name!r} has no layer: add it to the table"
    return found[0]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "pccheck_async" else {module}
    return {name for name in found if name.split(".")[0] == "pccheck_async"}


def own(path: Path) -> str:
    first = path.relative_to(ROOT).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_only_downward(path: Path) -> None:
    for name in imports(path):
        if own(path) in ("bench", "cli", "testing", "__main__"):
            continue  # the edge uses the public package
        assert layer(part(name)) <= layer(own(path)), f"{own(path)} imports {name} from a layer above"


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_stages_do_not_know_each_other(stage: str) -> None:
    assert not {part(name) for name in imports(ROOT / f"{stage}.py")} & (STAGES - {stage})


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_pure_modules_do_not_await(path: Path) -> None:
    if layer(own(path)) == 0:
        asynchronous = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
        assert not any(isinstance(node, asynchronous) for node in ast.walk(ast.parse(path.read_text())))


def test_nothing_unpickles() -> None:
    """Pickles are written for others to read, and torch's restricted reader may refuse one."""
    for path in MODULES:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        parts = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        named |= {node.module or "" for node in parts if node.module != "pickle"}
        assert not {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"} & named, path
        taken = {alias.name for node in parts if node.module == "pickle" for alias in node.names}
        assert taken <= {"Pickler", "UnpicklingError"}, path
