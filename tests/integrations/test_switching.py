"""Runs that change over in the middle, from a framework's own checkpoints to ours and back, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pccheck_async import ResumableLoader, RNGState, SyncCheckpointEngine, list_checkpoints, load_sync, stores
from pccheck_async.errors import CorruptStoreError, UnsupportedStateError
from tests.support.killed_training import bits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("nothing_left_behind"),
    # Lightning's own:
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches .* is smaller than the logging interval"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/nonexistent/evil",)


# -- the files of Hugging Face's Trainer


def trainer(folder: Path, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    tokens = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(1))
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=2, report_to=[], use_cpu=True, disable_tqdm=True,
        logging_steps=1, logging_strategy="steps", **options,
    )  # fmt: skip
    samples = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=samples)


def final(trained: Any) -> str:
    """All that a run ends with, its losses included."""
    losses = [(line["step"], line["loss"]) for line in trained.state.log_history if "loss" in line]
    return bits([losses, trained.model.state_dict(), trained.optimizer.state_dict(), trained.lr_scheduler.state_dict()])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run of 12 steps with checkpoints at 3, 6, 9 and 12, and what it ended with."""
    folder = tmp_path_factory.mktemp("transformers")
    whole = trainer(folder, save_steps=3)
    whole.train()
    return folder, final(whole)


@pytest.fixture
def folder(run: tuple[Path, str], tmp_path: Path) -> Path:
    return Path(shutil.copytree(run[0] / "checkpoint-3", tmp_path / "checkpoint-3"))


def test_a_folder_of_transformers_and_back(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    info = stores.import_(folder, tmp_path / "s")
    assert (info.source, info.step, info.missing) == ("transformers", 3, ())
    state = load_sync(tmp_path / "s")
    assert bits(state["model"]) == bits(load_file(folder / "model.safetensors"))
    for part in ("optimizer", "scheduler"):
        assert bits(state[part]) == bits(torch.load(folder / f"{part}.pt", weights_only=True))
    assert type(state["optimizer"]["param_groups"][0]["betas"]) is tuple
    trainer(tmp_path)._load_rng_state(str(folder))
    theirs = RNGState().state_dict()
    RNGState().load_state_dict(state["rng"])
    assert bits(RNGState().state_dict()) == bits(theirs)
    stores.export(tmp_path / "s", tmp_path / "out", to="transformers")
    for title in ("optimizer.pt", "scheduler.pt"):
        assert bits(torch.load(tmp_path / "out" / title)) == bits(torch.load(folder / title))
    assert bits(load_file(tmp_path / "out" / "model.safetensors")) == bits(load_file(folder / "model.safetensors"))
    mine, other = (torch.load(each / "rng_state.pth", weights_only=False) for each in (tmp_path / "out", folder))
    assert repr(mine) == repr(other)
    assert bits([*mine["numpy"][1], mine["cpu"]]) == bits([*other["numpy"][1], other["cpu"]])
    assert (tmp_path / "out" / "trainer_state.json").read_text() == (folder / "trainer_state.json").read_text()


@pytest.mark.parametrize("step", [3, 6])  # inside an epoch, and at its end
def test_a_run_of_transformers_changes_over_and_back(run: tuple[Path, str], tmp_path: Path, step: int) -> None:
    adapter = pytest.importorskip("pccheck_async.integrations.transformers", exc_type=ImportError)
    folder, whole = run
    stores.import_(folder / f"checkpoint-{step}", tmp_path / "s")
    ours = trainer(tmp_path / "ours", save_strategy="no")
    callback = adapter.PCcheckCallback(tmp_path / "s", interval=1, keep_last=20).attach(ours)
    ours.train()
    assert callback.restored is not None
    assert callback.restored.step == step
    assert final(ours) == whole
    stores.export(tmp_path / "s", tmp_path / "checkpoint-8", to="transformers", step=8)
    theirs = trainer(tmp_path / "theirs", save_strategy="no")
    theirs.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert final(theirs) == whole


def damage(*titles: str, keep: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        for title in titles:
            (folder / title).write_bytes((folder / title).read_bytes()[:keep])

    return cut


def write(title: str, value: Any) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        if title.endswith(".json"):
            (folder / title).write_text(json.dumps(value))
        else:
            torch.save(value, folder / title)

    return rewrite


def linked(folder: Path) -> None:
    (folder / "optimizer.pt").rename(folder.parent / "elsewhere.pt")
    (folder / "optimizer.pt").symlink_to("../elsewhere.pt")


def sharded(weight_map: dict[str, str]) -> Callable[[Path], None]:
    def index(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "model-1.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return index


def huge(folder: Path) -> None:
    header = {"x": {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))


@pytest.mark.parametrize(
    ("harm", "error", "says"),
    [
        (damage("optimizer.pt", keep=900), CorruptStoreError, "checkpoint-3/optimizer.pt is no whole file"),
        (damage("model.safetensors", keep=900), CorruptStoreError, "checkpoint-3/model.safetensors is no whole file"),
        (damage("rng_state.pth", keep=0), CorruptStoreError, "checkpoint-3/rng_state.pth"),
        (damage("trainer_state.json", keep=99), CorruptStoreError, "checkpoint-3/trainer_state.json is no JSON"),
        (write("trainer_state.json", {}), CorruptStoreError, "trainer_state.json is no state of a Trainer"),
        (write("optimizer.pt", [Evil(), np.ones]), UnsupportedStateError, "cannot be .* numpy.ones, posix.mkdir"),
        (write("rng_state.pth", {"python": Evil()}), UnsupportedStateError, r"rng_state.pth cannot .*: posix.mkdir"),
        (write("rng_state.pth", {"python": 3}), CorruptStoreError, "rng_state.pth holds no states of generators"),
        (linked, UnsupportedStateError, r"optimizer.pt is a link to .*/elsewhere.pt, outside the checkpoint"),
        (sharded({"x": "../model.safetensors"}), CorruptStoreError, "cannot be files beside it"),
        (sharded({"x": "model-2.safetensors"}), FileNotFoundError, "not there: model-2.safetensors"),
        (sharded({"x": "model-1.safetensors"}), CorruptStoreError, "index.json lack x"),
        (huge, CorruptStoreError, "checkpoint-3/model.safetensors is no whole file"),
        (lambda folder: (folder / "model.safetensors").unlink(), UnsupportedStateError, "has no model.safetensors"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_of_transformers_is_said(
    folder: Path, tmp_path: Path, harm: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    harm(folder)
    with pytest.raises(error, match=says):
        stores.import_(folder, tmp_path / "s")
    assert {*os.listdir(tmp_path)} <= {"checkpoint-3", "elsewhere.pt"}


def test_what_a_folder_of_transformers_lacks_is_said(folder: Path, tmp_path: Path) -> None:
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    (folder / "optimizer.pt").unlink()
    (folder / "model.safetensors").unlink()
    torch.save({"a": torch.ones(3)}, folder / "pytorch_model-1.bin")
    write("pytorch_model.bin.index.json", {"weight_map": {"a": "pytorch_model-1.bin"}})(folder)
    info = stores.import_(folder, tmp_path / "s")
    assert info.missing == ("optimizer (there is no optimizer.pt)", "rng (of 1 ranks, each its own)")
    state = load_sync(tmp_path / "s")
    assert {*state} == {"model", "scheduler", "trainer"}
    assert bits(state["model"]) == bits({"a": torch.ones(3)})


def test_of_several_models_in_a_folder_that_which_the_trainer_takes(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    torch.save({"a": torch.ones(3)}, folder / "pytorch_model.bin")
    write("model.safetensors.index.json", {"weight_map": {"a": "lost.safetensors"}})(folder)
    info = stores.import_(folder, tmp_path / "s")
    assert info.missing == (
        "pytorch_model.bin (left out: the Trainer takes model.safetensors)",
        "model.safetensors.index.json (left out: the Trainer takes model.safetensors)",
    )
    assert bits(load_sync(tmp_path / "s")["model"]) == bits(load_file(folder / "model.safetensors"))
    taken = trainer(tmp_path)
    taken._load_from_checkpoint(str(folder))
    theirs = load_file(folder / "model.safetensors")
    mine = taken.model.state_dict()
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


def test_a_folder_of_transformers_without_the_state_of_the_trainer(folder: Path, tmp_path: Path) -> None:
    (folder / "trainer_state.json").unlink()
    info = stores.import_(folder, tmp_path / "s")
    assert (info.source, info.step) == ("transformers", 3)
    assert info.missing == ("trainer (there is no trainer_state.json; the step is that of the folder's name)",)
    assert {*load_sync(tmp_path / "s")} == {"model", "optimizer", "scheduler", "rng"}
    folder.rename(tmp_path / "renamed")
    info = stores.import_(tmp_path / "renamed", tmp_path / "s")
    assert (info.step, info.counter) == (4, 1)
    assert info.missing == ("trainer (there is no trainer_state.json; the step is counted on from the store)",)


# -- the file of Lightning


def module() -> Any:
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        """Draws from generators that a file of Lightning does not hold; ``seeded`` by the step in every batch."""

        def __init__(self, width: int = 8, seeded: bool = True) -> None:
            super().__init__()
            self.save_hyperparameters()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(
                torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.5), torch.nn.Linear(width, 1)
            )
            self.losses: dict[int, float] = {}

        def training_step(self, batch: Any, _: int) -> Any:
            if self.hparams["seeded"]:
                torch.manual_seed(self.global_step)
            loss = self.net(batch[0]).square().mean()
            self.losses[self.global_step] = loss.item()
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Module


def fit(model: Any, *callbacks: Any, ckpt_path: Path | None = None, positioned: bool = False) -> str:
    """Train four epochs of five steps; return what they end with. ``positioned``: the loader has a ``state_dict``."""
    lightning = pytest.importorskip("lightning.pytorch")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    own = any(isinstance(each, lightning.callbacks.ModelCheckpoint) for each in callbacks)
    data = torch.utils.data.TensorDataset(torch.randn(20, 4, generator=torch.Generator().manual_seed(1)))
    loader = ResumableLoader(data, batch_size=4) if positioned else torch.utils.data.DataLoader(data, 4)
    fitting = lightning.Trainer(max_epochs=4, callbacks=[*callbacks], enable_checkpointing=own, **options)
    fitting.fit(model, loader, ckpt_path=ckpt_path)
    schedulers = [config.scheduler.state_dict() for config in fitting.lr_scheduler_configs]
    return bits([model.state_dict(), *(each.state_dict() for each in fitting.optimizers), *schedulers])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two runs: one at the third step, inside an epoch, with a loader that has positions; one at epochs' ends."""
    saver = pytest.importorskip("lightning.pytorch").callbacks.ModelCheckpoint
    folder = tmp_path_factory.mktemp("lightning")
    every = {"save_top_k": -1, "filename": "{step}"}
    fit(module()(), saver(folder / "inside", every_n_train_steps=3, **every), positioned=True)
    fit(module()(), saver(folder / "ends", every_n_epochs=1, **every))
    return folder


@pytest.mark.parametrize(
    ("file", "positioned", "last"),
    [
        ("inside/step=3.ckpt", True, 6),  # the seventh step, inside the second epoch
        ("ends/step=5.ckpt", False, 9),  # inside an epoch Lightning itself begins such a loader anew
    ],
)
def test_a_run_of_lightning_changes_over_and_back(
    checkpoints: Path, tmp_path: Path, file: str, positioned: bool, last: int
) -> None:
    adapter = pytest.importorskip("pccheck_async.integrations.lightning", exc_type=ImportError)
    whole, ours, theirs = module()(), module()(), module()()
    end = fit(whole, positioned=positioned)
    info = stores.import_(checkpoints / file, tmp_path / "s")
    callback = adapter.PCcheckCallback(tmp_path / "s", interval=1, keep_last=20)
    assert fit(ours, callback, positioned=positioned) == end
    assert callback.restored == info
    assert [*ours.losses.items()] == [*whole.losses.items()][info.step + 1 :]
    assert [each.step for each in list_checkpoints(tmp_path / "s")] == [*range(19, info.step - 1, -1)]
    stores.export(tmp_path / "s", tmp_path / "back.ckpt", to="lightning", step=last)
    assert fit(theirs, ckpt_path=tmp_path / "back.ckpt", positioned=positioned) == end
    assert [*theirs.losses.items()] == [*whole.losses.items()][last + 1 :]


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_file_of_an_epochs_end_whose_schedule_goes_by_a_metric(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    from pccheck_async.integrations.lightning import PCcheckCallback
    from tests.support import lightning_run as kit

    lightning = pytest.importorskip("lightning.pytorch")

    class Model(kit.Model):
        def on_train_batch_start(self, *_: Any) -> None:
            torch.manual_seed(self.global_step)  # a file of Lightning holds no generators

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.log("validation", self.net(batch).square().mean())

    def train(*callbacks: Any, epochs: int = 4, **options: Any) -> str:
        torch.manual_seed(0)
        model = Model()
        saves = {"enable_checkpointing": epochs == 2}
        trainer = kit.make_trainer(tmp_path, *callbacks, max_epochs=epochs, val_check_interval=0.5, **saves)
        data = torch.utils.data.DataLoader(kit.Samples(24, random=False), 4)
        torch.manual_seed(0)
        trainer.fit(model, data, torch.utils.data.DataLoader(kit.Samples(8, random=False), 4), **options)
        return bits([model.state_dict(), *(each.state_dict() for each in trainer.optimizers)])

    saver = lightning.callbacks.ModelCheckpoint(tmp_path, save_last=True, monitor="validation")
    train(saver, epochs=2)
    stores.import_(tmp_path / "last.ckpt", tmp_path / "s")
    theirs = train(ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert train(PCcheckCallback(tmp_path / "s")) == theirs


def test_a_file_of_lightning_and_back(checkpoints: Path, tmp_path: Path) -> None:
    file = checkpoints / "inside" / "step=3.ckpt"
    info = stores.import_(file, tmp_path / "s")
    assert (info.source, info.step) == ("lightning", 2)
    assert info.missing == ("rng (a file of Lightning holds none)",)
    held, state = torch.load(file, weights_only=True), load_sync(tmp_path / "s")
    assert bits(state["model"]) == bits(held["state_dict"])
    assert bits(state["optimizers"]) == bits(held["optimizer_states"])
    assert type(state["optimizers"][0]["param_groups"][0]["betas"]) is tuple
    exported = stores.export(tmp_path / "s", tmp_path / "out.ckpt", to="lightning")
    assert exported.changed == ()
    assert bits(torch.load(tmp_path / "out.ckpt", weights_only=True)) == bits(held)
    loaded = module().load_from_checkpoint(tmp_path / "out.ckpt")
    assert bits(loaded.state_dict()) == bits(held["state_dict"])


def test_what_is_wrong_with_a_file_of_lightning_is_said(checkpoints: Path, tmp_path: Path) -> None:
    file = checkpoints / "inside" / "step=3.ckpt"
    data, held = file.read_bytes(), torch.load(file, weights_only=True)
    wrong: list[tuple[bytes | dict[str, Any], type[Exception], str]] = [
        (data[:-900], CorruptStoreError, "wrong.ckpt is no whole file of torch.save"),
        (held | {"hyper_parameters": {"a": Evil(), "b": np.ones}}, UnsupportedStateError, "numpy.ones, posix.mkdir"),
        (held | {"global_step": "3"}, CorruptStoreError, "wrong.ckpt has no global_step"),
        ({"weights": {}}, UnsupportedStateError, "wrong.ckpt is no checkpoint of Lightning"),
    ]
    for content, error, says in wrong:
        if isinstance(content, bytes):
            (tmp_path / "wrong.ckpt").write_bytes(content)
        else:
            torch.save(content, tmp_path / "wrong.ckpt")
        with pytest.raises(error, match=says):
            stores.import_(tmp_path / "wrong.ckpt", tmp_path / "s", source="lightning")
    assert os.listdir(tmp_path) == ["wrong.ckpt"]
    torch.save(
        {key: held[key] for key in ("state_dict", "pytorch-lightning_version", "global_step")}, tmp_path / "w.ckpt"
    )
    info = stores.import_(tmp_path / "w.ckpt", tmp_path / "s")
    lacks = ["optimizers", "lr_schedulers", "callbacks", "loops", "rng"]
    assert [line.split()[0] for line in info.missing] == lacks
    for source, stripped in ((None, ("state_dict", "pytorch-lightning_version")), ("lightning", ("state_dict",))):
        torch.save({key: held[key] for key in stripped}, tmp_path / "w.ckpt")  # of all but the weights
        newest = list_checkpoints(tmp_path / "s")[0].step
        counted = stores.import_(tmp_path / "w.ckpt", tmp_path / "s", source=source)  # type: ignore[arg-type]
        assert counted.step == newest + 1
        assert [line.split(" (")[0] for line in counted.missing] == [*lacks, "the step"]
        assert bits(load_sync(tmp_path / "s")["model"]) == bits(held["state_dict"])


@pytest.mark.parametrize("others", [True, False])
def test_what_the_plugins_of_lightning_saved_is_its_file(checkpoints: Path, tmp_path: Path, others: bool) -> None:
    adapter = pytest.importorskip("pccheck_async.integrations.lightning", exc_type=ImportError)
    held = torch.load(checkpoints / "inside" / "step=3.ckpt", weights_only=True)
    if others:  # as PCcheckModelParallelStrategy saves it
        parts = {name: held[name] for name in ("state_dict", "optimizer_states")}
        rest = {name: held[name] for name in held if name not in parts}
        with SyncCheckpointEngine(tmp_path / "s") as engine:
            engine.checkpoint({**parts, adapter.checkpoint_io.OTHERS: rest}, step=3).result(60)
    else:
        io = adapter.PCcheckIO()
        io.save_checkpoint(held, tmp_path / "s")
        io.teardown()
    assert stores.export(tmp_path / "s", tmp_path / "out.ckpt", to="lightning").changed == ()
    assert bits(torch.load(tmp_path / "out.ckpt", weights_only=True)) == bits(held)
    assert stores.import_(tmp_path / "out.ckpt", tmp_path / "back").metadata == {}  # PCcheckIO reads no such state
    with pytest.raises(UnsupportedStateError, match=r"it has no model, no trainer, and nothing was written"):
        stores.export(tmp_path / "s", tmp_path / "out", to="transformers")


def test_what_no_framework_saved_is_not_exported_for_one(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "s") as engine:
        engine.checkpoint({"model": torch.nn.Linear(2, 2)}, step=1).result(60)
    fits = "and nothing was written; export it with --to torch"
    for to, lacks in (("lightning", f"loops, no others, {fits}"), ("transformers", f"trainer, {fits}")):
        with pytest.raises(
            UnsupportedStateError, match=f"integrations.{to} saved no such checkpoint: it has no {lacks}"
        ):
            stores.export(tmp_path / "s", tmp_path / "out", to=to)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="the whole checkpoint"):
            stores.export(tmp_path / "s", tmp_path / "out", to=to, root="model")  # type: ignore[arg-type]
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.parametrize(
    ("others", "says"),
    [
        ({"trainer": {"epoch": 1}}, "KeyError: 'state'"),
        ({"trainer": 3}, "TypeError"),
        ({"trainer": {"state": "text"}}, "JSONDecodeError"),
        ({"trainer": {"state": "{}"}, "rng": {"python": 3}}, "KeyError: 'numpy'"),
    ],
)
def test_a_state_with_parts_that_are_named_as_the_adapter_names_them_is_not_exported(
    tmp_path: Path, others: dict[str, Any], says: str
) -> None:
    with SyncCheckpointEngine(tmp_path / "s") as engine:
        engine.checkpoint({"model": {"w": torch.ones(2)}, **others}, step=1).result(60)
    with pytest.raises(UnsupportedStateError, match=f"integrations.transformers saved no such checkpoint: {says}"):
        stores.export(tmp_path / "s", tmp_path / "out", to="transformers")
    assert os.listdir(tmp_path) == ["s"]
