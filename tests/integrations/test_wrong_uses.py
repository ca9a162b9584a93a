"""What a user may get wrong with the trainers' adapters, where work could be lost or foreign code be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import (
    Keep,
    StateMismatchError,
    StorageOptions,
    SyncCheckpointEngine,
    list_checkpoints,
    load_sync,
)
from pccheck_async.errors import UnsupportedStateError
from tests.support.killed_training import bits
from tests.support.lazily import Lazily, need_framework

need_framework("lightning", "transformers")
pl, kit, hf = Lazily("lightning.pytorch"), Lazily("tests.support.lightning_run"), Lazily("transformers")
lightning = Lazily("pccheck_async.integrations.lightning")
transformers = Lazily("pccheck_async.integrations.transformers")

pytestmark = [
    pytest.mark.slow,
    # Lightning's own:
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
SAMPLES = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _quiet(nothing_left_behind: None) -> None: ...


def trainer(*callbacks: Any, epochs: int = 1, steps: int = -1, plugins: Any = None) -> Any:
    return pl.Trainer(
        max_epochs=epochs, max_steps=steps, accelerator="cpu", callbacks=[*callbacks], plugins=plugins, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip


@pytest.mark.parametrize("room", [lightning, transformers], ids=["lightning", "transformers"])
def test_engine_keywords_of_before_work_with_one_warning_at_the_line_of_the_user(room: Any, tmp_path: Path) -> None:
    new = r"PCcheckCallback\(keep=Keep\(every=3\), storage=StorageOptions\(exit_timeout=1\)\) now"
    with pytest.warns(
        DeprecationWarning, match=rf"^PCcheckCallback\(keep_every=3, exit_timeout=1\) is {new}"
    ) as caught:
        room.PCcheckCallback(tmp_path, keep_every=3, exit_timeout=1)
    assert [each.filename for each in caught] == [__file__]
    room.PCcheckCallback(tmp_path, keep=Keep(every=3), storage=StorageOptions(exit_timeout=1))


@pytest.mark.parametrize(("room", "old"), [(lightning, "folder"), (transformers, "store")], ids=["lightning", "hf"])
def test_the_path_by_its_name_of_before_works_with_one_warning_at_the_line_of_the_user(
    room: Any, old: str, tmp_path: Path
) -> None:
    where: dict[str, Any] = {old: str(tmp_path)}
    now = rf"^PCcheckCallback\({old}='{tmp_path}'\) is PCcheckCallback\(path='{tmp_path}'\) now; the old spelling goes"
    with pytest.warns(DeprecationWarning, match=now) as caught:
        room.PCcheckCallback(**where)
    assert [each.filename for each in caught] == [__file__]
    room.PCcheckCallback(path=tmp_path)
    with pytest.raises(TypeError, match=f"PCcheckCallback: give {old}= or path=, not both"):
        room.PCcheckCallback(tmp_path, **where)
    with pytest.raises(TypeError, match="PCcheckCallback takes the folder of its store as first argument, path"):
        room.PCcheckCallback(interval=3)


@pytest.mark.parametrize("room", [lightning, transformers], ids=["lightning", "hf"])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("save_steps", "interval"),
        ("save_strategy", "interval=n, in steps (for each epoch, as many as it has)"),
        ("every_n_epochs", "interval=n, in steps (for each epoch, as many as it has)"),
        ("save_total_limit", "keep_last"),
        ("metric_for_best_model", 'keep=Keep(best=(metric, 1, "min"))'),
        ("dirpath", "path"),
        ("resume_stoped", "resume_stopped"),
    ],
)
def test_keywords_of_others_are_answered_with_ours(room: Any, wrong: str, right: str) -> None:
    with pytest.raises(TypeError) as caught:
        room.PCcheckCallback(**{wrong: "x"})
    assert str(caught.value) == f"PCcheckCallback has no argument '{wrong}'; did you mean {right}?"


def test_an_unknown_keyword_of_checkpoint_io_names_it() -> None:
    with pytest.raises(TypeError, match=r"^PCcheckIO has no argument 'writer'; did you mean storage="):
        lightning.PCcheckIO(writer=3)


def test_engine_keywords_of_before_of_checkpoint_io(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"^PCcheckIO\(writers=2\) is PCcheckIO\(storage=StorageOptions\("):
        plugin = lightning.PCcheckIO(writers=2)
    plugin.save_checkpoint({"x": torch.ones(3)}, tmp_path / "saved")
    plugin.teardown()
    assert [info.step for info in list_checkpoints(tmp_path / "saved")] == [0]


def loader(size: int = 4) -> Any:
    return torch.utils.data.DataLoader([*SAMPLES], batch_size=size)  # type: ignore[arg-type]


def test_a_callback_that_gets_another_trainer_resumes(tmp_path: Path) -> None:
    """As it would in another process, instead of replacing the checkpoint by the first steps of a new model."""
    saver = lightning.PCcheckCallback(tmp_path / "s")
    trainer(saver).fit(kit.Counting(), loader())
    trainer(saver, epochs=2).fit(model := kit.Counting(), loader())
    assert model.trained == [3, 4, 5]
    again = trainer(saver, epochs=3)
    with pytest.raises(StateMismatchError, match="nothing was restored"):
        again.fit(kit.Counting(width=5), loader())
    assert [info.step for info in list_checkpoints(tmp_path / "s")] == [5]


def test_fit_after_an_error_resumes(tmp_path: Path) -> None:
    """As in another process: what is in memory has half of a batch, and Lightning would begin the epoch again."""

    class Fails(pl.Callback):  # type: ignore[name-defined]
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4 and len(model.trained) == 5:
                raise ZeroDivisionError

    model = kit.Counting()
    start = {name: each.clone() for name, each in model.state_dict().items()}
    again = trainer(lightning.PCcheckCallback(tmp_path / "s", interval=2), Fails(), epochs=2)
    with pytest.raises(ZeroDivisionError):
        again.fit(model, loader())
    again.fit(model, loader())
    assert model.trained == [0, 1, 2, 3, 4, 4, 5]
    whole = kit.Counting()
    whole.load_state_dict(start)
    trainer(epochs=2).fit(whole, loader())
    assert bits(model.state_dict()) == bits(whole.state_dict())


def test_a_position_that_the_data_does_not_have_is_named(tmp_path: Path) -> None:
    trainer(lightning.PCcheckCallback(tmp_path / "s"), steps=4).fit(kit.Counting(), loader(2))
    with pytest.raises(StateMismatchError, match="after 4 of 6 batches of an epoch, which has 3 now"):
        trainer(lightning.PCcheckCallback(tmp_path / "s"), epochs=2).fit(kit.Counting(), loader())


def test_checkpoint_io_leaves_a_callbacks_store_alone(tmp_path: Path) -> None:
    trainer(lightning.PCcheckCallback(tmp_path / "run")).fit(kit.Counting(), loader())
    saved = bits(load_sync(tmp_path / "run")["model"])
    other = trainer(plugins=[lightning.PCcheckIO()])
    other.fit(kit.Counting(), loader())
    with pytest.raises(FileExistsError, match="PCcheckIO did not save, and does not replace"):
        other.save_checkpoint(tmp_path / "run")
    with pytest.raises(ValueError, match="PCcheckCallback resumes from its own by itself"):
        trainer(plugins=[lightning.PCcheckIO()], epochs=2).fit(kit.Counting(), loader(), ckpt_path=tmp_path / "run")
    assert bits(load_sync(tmp_path / "run")["model"]) == saved


def test_a_store_as_ckpt_path_is_answered_with_what_to_do(tmp_path: Path) -> None:
    store = tmp_path / "run"
    trainer(lightning.PCcheckCallback(store)).fit(kit.Counting(), loader())
    for folder in (store, tmp_path / "new"):
        again = trainer(lightning.PCcheckCallback(folder), epochs=2)
        with pytest.raises(ValueError, match=r"ckpt_path is '.*run', a store of this package: leave ckpt_path out"):
            again.fit(kit.Counting(), loader(), ckpt_path=store)
    other = trainer(lightning.PCcheckCallback(tmp_path / "new"), plugins=[lightning.PCcheckIO()], epochs=2)
    own = tmp_path / "own"
    saver = trainer(plugins=[lightning.PCcheckIO()])
    saver.fit(kit.Counting(), loader())
    saver.save_checkpoint(own)
    saver.strategy.checkpoint_io.teardown()
    other.fit(model := kit.Counting(), loader(), ckpt_path=own)
    assert model.trained == [3, 4, 5]


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_a_store_as_resume_from_checkpoint_is_answered_with_what_to_do(tmp_path: Path) -> None:
    arguments = hf.TrainingArguments(
        str(tmp_path / "output"), max_steps=2, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    made = hf.Trainer(Loss(), arguments, train_dataset=[{"x": x} for x in SAMPLES])
    transformers.PCcheckCallback(tmp_path / "store").attach(made)
    made.train()
    with pytest.raises(ValueError, match=r"a store of this package: leave resume_from_checkpoint out, and PCcheckCal"):
        made.train(resume_from_checkpoint=str(tmp_path / "store"))


def test_checkpoint_io_leaves_folders_of_others_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="PCcheckIO did not save"):
        lightning.PCcheckIO().save_checkpoint({"global_step": 1}, tmp_path / "mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "notes"]


class Hostile:
    """Leaves a trace where it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def test_weights_only_unpickles_nothing(tmp_path: Path) -> None:
    io = lightning.PCcheckIO(allow_pickle=True)
    io.save_checkpoint({"odd": Hostile(tmp_path / "trace"), "global_step": 1}, tmp_path / "c")
    with pytest.raises(UnsupportedStateError, match=r"odd: a pickled .*Hostile"):
        io.load_checkpoint(tmp_path / "c", weights_only=True)
    assert not (tmp_path / "trace").exists()
    io.load_checkpoint(tmp_path / "c")
    assert (tmp_path / "trace").exists()


class Loss(torch.nn.Module):
    """A model as the Trainer of Hugging Face takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_a_folder_that_is_older_than_the_store_is_refused(tmp_path: Path) -> None:
    """``resume_from_checkpoint=True`` finds the Trainer's own folder, which is seldom as new as the store."""

    def train(steps: int, **options: Any) -> None:
        arguments = hf.TrainingArguments(
            str(tmp_path / "output"), max_steps=steps, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="steps", save_steps=2, logging_strategy="no",
        )  # fmt: skip
        made = hf.Trainer(Loss(), arguments, train_dataset=[{"x": x} for x in SAMPLES])
        transformers.PCcheckCallback(tmp_path / "store").attach(made)
        made.train(**options)

    train(2)
    train(2, resume_from_checkpoint=True)  # as new: no error
    train(4)
    with pytest.raises(ValueError, match=r"checkpoint-2 at step 2, and .*store holds step 4: leave resume_from_checkp"):
        train(5, resume_from_checkpoint=str(tmp_path / "output" / "checkpoint-2"))


def test_ckpt_path_beside_a_run_that_has_ended(tmp_path: Path) -> None:
    """Nothing would be trained, and the file would be loaded over what was restored."""
    trainer(lightning.PCcheckCallback(tmp_path / "s")).fit(kit.Counting(), loader())
    other = trainer()
    other.fit(kit.Counting(), loader())
    other.save_checkpoint(tmp_path / "other.ckpt")
    again = trainer(lightning.PCcheckCallback(tmp_path / "s"))
    with pytest.raises(ValueError, match="holds step 2, the last one of a run that has ended: leave ckpt_path out"):
        again.fit(kit.Counting(), loader(), ckpt_path=tmp_path / "other.ckpt", weights_only=False)


def test_the_class_in_place_of_a_callback() -> None:
    with pytest.raises(TypeError, match=r"was called on the class: make an object of it first, PCcheckCallback\("):
        trainer(lightning.PCcheckCallback).fit(kit.Counting(), loader())
    with pytest.raises(TypeError, match=r"PCcheckCallback\.attach was called on the class: make an object"):
        transformers.PCcheckCallback.attach(trainer())


def test_the_callback_of_the_other_framework(tmp_path: Path) -> None:
    with pytest.raises(
        AttributeError, match=r"in the other trainer use that of pccheck_async\.integrations\.lightning"
    ):
        trainer(transformers.PCcheckCallback(tmp_path)).fit(kit.Counting(), loader())
    saver = lightning.PCcheckCallback(tmp_path)
    with pytest.raises(
        AttributeError, match=r"integrations\.transformers: PCcheckCallback\(path\)\.attach\(trainer\)$"
    ):
        hf.trainer_callback.CallbackHandler([saver], None, None, None, None).on_init_end(None, None, None)
    with pytest.raises(AttributeError, match="attribute 'attach': this one is"):
        saver.attach(None)
    with pytest.raises(TypeError, match=r"^a lightning\..*Trainer lacks .*and that of Lightning takes"):
        transformers.PCcheckCallback(tmp_path).attach(trainer())
    assert not hasattr(saver, "colour")


def test_the_store_of_another_trainer_is_named(tmp_path: Path) -> None:
    trainer(lightning.PCcheckCallback(tmp_path / "s")).fit(model := kit.Counting(), loader())
    with (
        SyncCheckpointEngine(tmp_path / "s") as engine,
        pytest.raises(StateMismatchError, match=r"saved through pccheck_async\.integrations\.lightning\.PCcheck"),
    ):
        engine.restore({"model": model, "optimizer": torch.optim.SGD(model.parameters()), "step": 0})
