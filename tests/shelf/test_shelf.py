"""Variables of a shelf: any value, used in place, changed in transactions, found again."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import Shelf, SyncCheckpointEngine, load_sync
from pccheck_async.errors import UnsupportedStateError
from tests.support.state_strategies import NUMPY_DTYPES, TORCH_DTYPES, difference, tensor_of

MIB = 1 << 20


class Undo(BaseException):
    """Nothing else catches it."""


@contextmanager
def undone(shelf: Shelf, *names: str) -> Iterator[None]:
    """A transaction that an exception ends."""
    with suppress(Undo), shelf.transaction(*names):
        yield
        raise Undo


VALUES: dict[str, Any] = {
    "none": None,
    "yes": True,
    "small": -7,
    "huge": -(3**500),
    "float": 0.1,
    "nan": math.nan,
    "complex": 1 - 2j,
    "text": "æ\udc80",
    "bytes": b"\0\xff",
    "list": list(range(50)),
    "nested": {"a": [1, {"b": (None, {1, "x"})}], 3: "int key", ("t", 1): [], "s": {"string": "key"}},
    "ordered": OrderedDict(z=1, a=2),
    "array": np.arange(12.0).reshape(3, 4),
    "fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "strided": np.arange(20)[::-3],
    "scalar": np.float32(1.5),
    "zero-dim": np.array(5),
    "empty": np.zeros((0, 3), np.int8),
    "tensor": torch.arange(6).reshape(2, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "expanded": torch.ones(1, 3).expand(4, 3),
    "conj": torch.tensor([1 + 2j]).conj(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "layers": [{"w": torch.ones(3), "b": np.zeros(2)} for _ in range(12)],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_with_every_bit(name: str, path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf[name] = VALUES[name]
        assert not difference(VALUES[name], shelf[name])
    with Shelf(path) as shelf:
        assert not difference(VALUES[name], shelf[name])
        assert shelf.verify() == ()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype: torch.dtype, shared_memory: Path) -> None:
    tensor = tensor_of(dtype, (2, 3), bytes(range(100, 200)))
    with Shelf(shared_memory / "shelf", MIB) as shelf:
        shelf["x"] = tensor
        assert not difference(tensor, shelf.x)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_arrays_of_every_dtype(dtype: str, shared_memory: Path) -> None:
    array = np.frombuffer(bytes(4 * np.dtype(dtype).itemsize), dtype)
    with Shelf(shared_memory / "shelf", MIB) as shelf:
        shelf["x"] = array
        assert not difference(array, shelf.x)


def test_arrays_that_share_memory_still_do(path: Path) -> None:
    base = np.arange(10.0)
    with Shelf(path, MIB) as shelf:
        shelf["views"] = [base[:6], base[4:], torch.from_numpy(base)]
        first, second, tensor = shelf.views
        with shelf.transaction("views"):
            first[5] = -1
        assert second[1] == tensor[5] == -1


def test_arrays_are_in_the_file(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"], shelf["t"] = np.zeros(4), torch.zeros(4)
        x, t = shelf.x, shelf["t"]
        assert x is shelf["x"]
        with shelf.transaction("x", "t"):
            x[2], t[1] = 5, 6
    with Shelf(path) as shelf:
        assert shelf.x.tolist() == [0, 0, 5, 0]
        assert shelf.t.tolist() == [0, 6, 0, 0]


def test_the_verbs_of_a_mapping(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf.a, shelf["b"], shelf["transaction"] = 1, 2, 3
        assert "a" in shelf
        assert "c" not in shelf
        assert 1 not in shelf
        assert list(shelf) == ["a", "b", "transaction"]
        assert dict(shelf) == {"a": 1, "b": 2, "transaction": 3}
        assert "a" in dir(shelf)
        del shelf.a, shelf["transaction"]
        assert len(shelf) == 1
        with pytest.raises(KeyError, match="no 'a' on the shelf; there are: b"):
            shelf["a"]
        with pytest.raises(KeyError):
            del shelf["a"]
        with pytest.raises(AttributeError):
            _ = shelf.a
        with pytest.raises(AttributeError):
            del shelf.a
        assert repr(shelf) == f"<Shelf '{path}' open, 1 variables, transaction {shelf.sequence}>"


def test_what_is_assigned_is_copied(path: Path) -> None:
    array, nested = np.zeros(3), {"a": [1]}
    with Shelf(path, MIB) as shelf:
        shelf["x"], shelf["n"] = array, nested
        array[0], nested["a"] = 1, []
        assert shelf.x[0] == 0
        assert shelf.n == {"a": [1]}


def test_an_exception_undoes_everything(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"], shelf["y"], shelf["config"], shelf["gone"] = np.zeros(3), np.zeros(3), {"lr": [1]}, "here"
        x, y, config = shelf.x, shelf.y, shelf.config
        free = shelf.free_bytes
        with undone(shelf, "x", "y", "config"):
            x[0], y[1] = 1, 2
            config["lr"].append(2)
            shelf["new"] = 5
            shelf["y"] = np.ones(1)
            del shelf["gone"]
            assert dict(shelf).keys() == {"x", "y", "config", "new"}
        assert x.tolist() == [0, 0, 0]
        assert x is shelf.x
        assert shelf.y.tolist() == [0, 0, 0]
        assert shelf.config == {"lr": [1]}
        assert list(shelf) == ["x", "y", "config", "gone"]
        assert shelf.free_bytes == free
        assert shelf.verify() == ()


def test_a_transaction_inside_another(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"], shelf["config"] = np.zeros(4), {"n": 0}
        x, free = shelf.x, shelf.free_bytes
        with shelf.transaction("x", "config"):
            x[0] = 1
            shelf.config["n"] = 1
            with shelf.transaction("x", "config"):
                x[1] = 1
            with undone(shelf, "x", "config"):
                x[2] = 1
                shelf.config["n"] = 2
                shelf["y"] = 1
            assert x.tolist() == [1, 1, 0, 0]
            assert shelf.config == {"n": 1}
            x[3] = 1
        assert "y" not in shelf
        with undone(shelf, "x"), shelf.transaction("x"):
            x[:] = 9
        assert x.tolist() == [1, 1, 0, 1]
        assert shelf.free_bytes == free
    with Shelf(path) as shelf:
        assert shelf.x.tolist() == [1, 1, 0, 1]
        assert shelf.config == {"n": 1}


def test_what_is_assigned_inside_another_transaction_is_undone_to_what_that_one_had_changed(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["config"] = {"lr": [1]}
        with shelf.transaction("config"):
            shelf.config["lr"].append(2)
            with undone(shelf):
                shelf["config"] = {"lr": []}
            assert shelf.config == {"lr": [1, 2]}
    with Shelf(path) as shelf:
        assert shelf.config == {"lr": [1, 2]}


def test_a_third_transaction_is_undone_to_what_the_second_had_changed(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["config"] = {"n": 0}
        with shelf.transaction("config"):
            shelf.config["n"] = 1
            with shelf.transaction("config"):
                shelf.config["n"] = 2
                with undone(shelf, "config"):
                    shelf.config["n"] = 3
                assert shelf.config == {"n": 2}
    with Shelf(path) as shelf:
        assert shelf.config == {"n": 2}


def test_containers_change_in_transactions(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["state"] = {"step": 0, "w": torch.zeros(3), "history": []}
        w = shelf.state["w"]
        with shelf.transaction("state"):
            shelf.state["step"] = 1
            w += 1
            shelf.state["history"].append("one")
            shelf.state["new"] = np.arange(3)
        shelf.state["step"] = 99  # outside: nothing protects it
        assert shelf.verify() == ("state",)
    with Shelf(path) as shelf:
        expected = {"step": 1, "w": torch.ones(3), "history": ["one"], "new": np.arange(3)}
        assert not difference(expected, shelf.state)


def test_changes_outside_a_transaction_are_told(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"], shelf["y"] = np.zeros(3), np.zeros(3)
        shelf.x[1] = 1
        assert shelf.verify() == ("x",)
    with Shelf(path) as shelf:
        assert shelf.verify() == ("x",)
        with shelf.transaction("x"):
            pass  # what it holds now is what is meant
        assert shelf.verify() == ()


def test_augmented_assignment_keeps_the_array(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"] = np.zeros(3)
        x = shelf.x
        shelf["x"] += 1
        shelf.x *= 2
        assert shelf.x is x
        assert x.tolist() == [2, 2, 2]
        assert shelf.verify() == ()


def test_arrays_that_are_left_behind_become_private(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"], shelf["gone"], shelf["end"] = np.full(3, 1.0), torch.full((3,), 2.0), np.full(3, 3.0)
        x, gone, end = shelf.x, shelf.gone, shelf.end
        shelf["x"] = x + 10
        del shelf["gone"]
        shelf["filler"] = np.zeros(6000)
        for array, was in ((x, 1), (gone, 2)):
            assert array.tolist() == [was] * 3
            array[:] = -1
        assert shelf.x.tolist() == [11] * 3
        assert shelf.verify() == ()
    end[:] = -3
    assert end.tolist() == [-3] * 3
    with Shelf(path) as shelf:
        assert shelf.end.tolist() == [3] * 3
        assert not shelf.filler.any()
        assert shelf.verify() == ()


def test_a_shelf_from_its_own_arrays(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"] = np.arange(4.0)
        shelf["y"] = shelf.x
        shelf["x"] = shelf.x[1:3]
        assert shelf.x.tolist() == [1, 2]
        assert shelf.y.tolist() == [0, 1, 2, 3]
        with shelf.transaction("y"):
            shelf.y[0] = 7
            shelf["x"], shelf["y"] = shelf.y, shelf.x
        assert shelf.x.tolist() == [7, 1, 2, 3]
        assert shelf.y.tolist() == [1, 2]


@pytest.mark.slow
def test_growth_erasure_and_reuse_leak_nothing(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        free, windows = shelf.free_bytes, Path("/proc/self/maps").read_text().count(str(path))
        for round_ in range(60):
            for number in range(4):
                shelf[f"v{number}"] = np.full((round_ * 37 + number * 211) % 4000 + 1, round_)
            with shelf.transaction("v1", "v3"):
                shelf.v1[:] = -1
                del shelf["v2"]
            assert shelf.v1[0] == -1
            assert shelf.v3[0] == round_
            del shelf["v0"]
            with undone(shelf, "v1"):
                shelf["more"] = np.zeros(5000)
            del shelf.v1, shelf.v3
            assert shelf.free_bytes == free
        gc.collect()
        assert Path("/proc/self/maps").read_text().count(str(path)) == windows
        assert path.stat().st_size == MIB


def test_it_grows_and_arrays_stay_where_they_are(path: Path) -> None:
    with Shelf(path, 100_000) as shelf:
        shelf["x"] = np.arange(5)
        x = shelf.x
        address = x.ctypes.data
        shelf.grow(MIB)
        shelf.grow(10)  # never shrinks
        assert shelf.nbytes == MIB
        with shelf.transaction("x"):
            x += 1
        shelf["large"] = np.ones(60_000)
        assert x.ctypes.data == address
        with undone(shelf, "x"):
            x[:] = -1
            shelf.grow(2 * MIB)
            shelf["large"] = np.ones(150_000)
        assert x.tolist() == [1, 2, 3, 4, 5]
        assert shelf.nbytes == 2 * MIB
    with Shelf(path, 3 * MIB) as shelf:
        assert shelf.nbytes == path.stat().st_size == 3 * MIB
        assert shelf.x.tolist() == [1, 2, 3, 4, 5]
        assert shelf.large.sum() == 60_000


@pytest.mark.slow
def test_threads_take_turns(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"] = np.zeros(2, int)
        x = shelf.x

        def work() -> None:
            for _ in range(50):
                with shelf.transaction("x"):
                    x[0] += 1
                    x[1] += 1

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert x.tolist() == [150, 150]
        assert shelf.verify() == ()


def test_another_task_is_refused_inside_a_transaction(path: Path) -> None:
    async def main(shelf: Shelf) -> None:
        entered = asyncio.Event()

        async def hold() -> None:
            with shelf.transaction("x"):
                entered.set()
                await asyncio.sleep(0.01)

        async def disturb() -> None:
            await entered.wait()
            with pytest.raises(RuntimeError, match="do not await"):
                shelf["y"] = 1

        await asyncio.gather(hold(), disturb())
        shelf["y"] = 2

    with Shelf(path, MIB) as shelf:
        shelf["x"] = 0
        asyncio.run(main(shelf))
        assert shelf.y == 2


def test_transactions_end_in_their_order(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        outer, inner = shelf.transaction(), shelf.transaction()
        outer.__enter__()
        shelf["x"] = 1
        inner.__enter__()
        shelf["y"] = 1
        with pytest.raises(RuntimeError, match="opposite order"):
            outer.__exit__(None, None, None)
        assert list(shelf) == []
        shelf["x"] = 2
        with pytest.raises(RuntimeError, match="inside a transaction"), shelf.transaction():
            shelf.close()


def test_readers_share_it(path: Path) -> None:
    with Shelf(path, MIB) as shelf:
        shelf["x"], shelf["config"] = np.arange(3), {"a": 1}
    with Shelf(path, readonly=True) as one, Shelf(path, readonly=True) as other:
        one.x[0] = 9  # its own
        assert other.x.tolist() == [0, 1, 2]
        assert one.config == {"a": 1}
        assert one.verify() == ()
        with pytest.raises(Exception, match="opened to be read"):
            one["x"] = 1
    with Shelf(path) as shelf:
        assert shelf.x.tolist() == [0, 1, 2]


def test_an_engine_saves_it_and_restores_it(path: Path, tmp_path: Path) -> None:
    with Shelf(path, MIB) as shelf, SyncCheckpointEngine(tmp_path / "store") as engine:
        shelf["centres"], shelf["weights"], shelf["step"] = np.arange(4.0), torch.arange(4.0), 3
        shelf["nested"] = {"w": torch.ones(2), "names": ["a"]}
        centres = shelf.centres
        state = {"shelf": shelf}
        engine.checkpoint(state, step=1).result(60)
        saved = load_sync(tmp_path / "store")["shelf"]
        with shelf.transaction("centres", "weights", "nested"):
            centres[:] = -1
            shelf.weights.zero_()
            shelf.nested["names"].append("b")
            shelf["step"] = 4
            shelf["later"] = 1
        engine.restore(state, strict=False)
        assert shelf.centres is centres
        assert centres.tolist() == [0, 1, 2, 3]
        assert not difference(saved, dict(shelf))
        assert shelf.verify() == ()
    with Shelf(path) as shelf:
        assert not difference(saved, dict(shelf))


class TestWhatPyMMGotWrong:
    """Faults that its paper, its code and its successor document."""

    def test_in_place_updates_are_not_torn(self, path: Path) -> None:
        """An exception, or a crash (see tests/crash/test_crash_shelf.py), in the middle of an update leaves nothing of
        it."""
        with Shelf(path, MIB) as shelf:
            shelf["x"] = np.zeros(10_000)
            with undone(shelf, "x"):
                shelf.x[:5000] = 1
            assert not shelf.x.any()

    def test_keys_are_strings_and_all_else(self, path: Path) -> None:
        with Shelf(path, MIB) as shelf:
            shelf["d"] = {"key": np.ones(2), 5: "five", (1, "a"): None, "": {"deeper": True}}
            with shelf.transaction("d"):
                shelf.d["other key"] = shelf.d.pop("key")
        with Shelf(path) as shelf:
            assert list(shelf.d) == [5, (1, "a"), "", "other key"]
            assert shelf.d["other key"].tolist() == [1, 1]

    def test_lists_have_more_than_ten_items(self, path: Path) -> None:
        with Shelf(path, MIB) as shelf:
            shelf["l"] = [np.full(2, n) for n in range(300)]
            with shelf.transaction("l"):
                shelf.l.append("the last")
                shelf.l[11] += 1
        with Shelf(path) as shelf:
            assert len(shelf.l) == 301
            assert shelf.l[11].tolist() == [12, 12]

    def test_what_cannot_be_kept_is_refused_at_once(self, path: Path) -> None:
        with Shelf(path, MIB) as shelf:
            shelf["x"] = 1
            for value in (object(), lambda: 1, {"a": [object()]}, np.array([None]), torch.nn.Linear(2, 2)):
                with pytest.raises(UnsupportedStateError, match=r"^x"):
                    shelf["x"] = value
            assert shelf.x == 1


def test_an_array_that_a_nested_abort_gives_back_is_committed_with_what_is_stored_then(path: Path) -> None:
    with Shelf(path) as shelf:
        with shelf.transaction():
            shelf["x"] = np.zeros(1000)
            with suppress(KeyboardInterrupt), shelf.transaction("x"):
                x = shelf["x"]
                x[:] = 5
                raise KeyboardInterrupt
            assert not x.any()
            x[:] = 7
        assert shelf.verify() == ()
    with Shelf(path) as shelf:
        assert shelf.verify() == ()
        assert (shelf["x"] == 7).all()
