"""The rooms of the package: every module belongs to one, imports go downward, and none goes round in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import pccheck_async

ROOT = Path(pccheck_async.__file__).parent
FLOORS = (
    ("errors", "lazy_names", "_ext"),
    ("telemetry",),
    ("format",),
    ("state",),
    ("transfer",),
    ("medium",),
    ("store", "shelf"),
    ("bucket",),
    ("engine",),
    ("training",),
    ("tuning",),
    ("group",),
    ("api",),
    ("upkeep", "convert", "integrations"),
    ("", "policies", "statistics", "stores"),
    ("testing",),
    ("bench",),
    ("cli",),
    ("__main__",),
)
"""From the ground up. A room may import what is below it; ``""`` is the package itself, what ``import`` gives users."""
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
OPEN = {
    "format.checksum", "format.dtypes", "format.found_manifest", "format.manifest", "format.record", "format.skeleton",
    "group.actions", "group.messages",
    "medium.files", "medium.filesystem", "medium.folder", "medium.mapped", "medium.mapping", "medium.open_medium",
    "medium.renaming", "medium.status_file",
    "medium.windows", "shelf.format",
    "state.ambient", "state.foreign", "state.paths", "state.restore.parts", "state.restore.tree", "state.tensor_access",
    "state.values",
    "telemetry.events",
    "training.data", "training.epochs", "training.policy",
    "transfer.copying", "transfer.operations", "transfer.operations.python",
    "transfer.plan",
}  # fmt: skip
"""What other rooms import by its module, past the door: lists of names that belong together, what imports torch where
the room does not, and rooms inside a room."""
Trees = dict[str, ast.Module]
PURE = ("errors", "telemetry", "format", "state")
"""No await there, and no file descriptor."""
PURE_MODULES = ("bucket.names", "bucket.record", "bucket.protocol", "bucket.copies")
"""The same in other rooms."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip(".")


@pytest.fixture(scope="module")
def trees() -> Trees:
    """Every module's syntax by its name. Only while it is read: it is as large as torch."""
    return {module_of(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def room_of(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def imports(trees: Trees, module: str) -> set[str]:
    """The modules of the package that one imports; a name that is no module stands for the module it comes from."""
    found: set[str] = set()
    for node in ast.walk(trees[module]):
        if isinstance(node, ast.Import):
            assert not any(alias.name.startswith("pccheck_async.") for alias in node.names), module
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            package, _, source = (node.module or "").partition(".")
            if package == "pccheck_async":
                names = {f"{source}.{alias.name}".lstrip(".") for alias in node.names}
                found |= {name if name in trees or name == "_ext" else source for name in names}
    return found - {module}


def test_every_module_belongs_to_a_room(trees: Trees) -> None:
    assert {room_of(module) for module in trees} <= set(LEVEL)


@pytest.mark.slow
def test_imports_go_downward(trees: Trees) -> None:
    upward = [
        f"{module} -> {name}"
        for module in trees
        for name in imports(trees, module)
        if room_of(name) != room_of(module) and LEVEL[room_of(name)] >= LEVEL[room_of(module)]
    ]
    assert sorted(upward) == []


@pytest.mark.slow
def test_rooms_are_entered_by_their_doors(trees: Trees) -> None:
    offered = {
        f"{room}.{alias.name}"
        for room in LEVEL
        if (tree := trees.get(room)) is not None
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    past = [
        f"{module} -> {name}"
        for module in trees
        for name in imports(trees, module)
        if room_of(name) != room_of(module) and "." in name and name not in OPEN | offered
    ]
    assert sorted(past) == []


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others(trees: Trees) -> None:
    """What a package's ``__init__`` offers is below it: its modules import one another, and never the package."""
    try:
        TopologicalSorter({module: imports(trees, module) for module in trees}).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_pure_rooms_do_not_await(trees: Trees) -> None:
    asynchronous = (ast.AsyncFunctionDef, ast.Await, ast.AsyncWith, ast.AsyncFor)
    awaiting = [
        module
        for module, tree in trees.items()
        if (room_of(module) in PURE or module in PURE_MODULES)
        and any(isinstance(node, asynchronous) for node in ast.walk(tree))
    ]
    assert awaiting == []


@pytest.mark.slow
def test_nothing_unpickles(trees: Trees) -> None:
    """Pickles are written for others to read, and torch's restricted reader may refuse one."""
    for module, tree in trees.items():
        nodes = list(ast.walk(tree))
        named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        parts = [node for node in nodes if isinstance(node, ast.ImportFrom)]
        named |= {node.module or "" for node in parts if node.module != "pickle"}
        assert not {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"} & named, module
        taken = {alias.name for node in parts if node.module == "pickle" for alias in node.names}
        assert taken <= {"Pickler", "UnpicklingError"}, module
