"""The advice of restore in an error is none for users of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pccheck_async import StateMismatchError, SyncCheckpointEngine
from pccheck_async.integrations.mismatch import advise_in_trainer


class Refusing:
    """Has another state than any that was saved."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state_dict: Any, /) -> None: ...

    def check_state_dict(self, state_dict: Any, /) -> None:
        raise ValueError("another data set")


MODEL = torch.nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"new": 1}, "missing from the checkpoint (1): new"),
        (
            {"model": torch.nn.Linear(3, 1)},
            "model.weight (float32 (1, 3) here, float32 (1, 2) in the checkpoint)",
        ),
        ({"data": Refusing()}, "data (another data set)"),
        ({"model": {"entirely": torch.zeros(1)}}, "restored. go on"),
        ({"optimizer": torch.optim.AdamW(MODEL.parameters())}, "param_groups.0 ("),
    ],
)
def test_advice_of_restore_is_replaced(change: dict[str, Any], kept: str, tmp_path: Path) -> None:
    state = {"model": MODEL, "data": {"at": 1}, "optimizer": torch.optim.SGD(MODEL.parameters())}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.checkpoint(state, step=1).result()
        with pytest.raises(StateMismatchError) as plain:
            engine.restore(state | change)
        with pytest.raises(StateMismatchError) as caught, advise_in_trainer(engine.path):
            engine.restore(state | change)
    said = str(caught.value)
    assert kept in said
    assert "strict=" not in said
    assert "keys=[...]" not in said
    assert f'; the weights alone: load_sync({str(tmp_path)!r}, keys=["model"])' in said
    assert caught.value.missing == plain.value.missing
    assert said != str(plain.value)


def test_advice_for_other_ranks_names_the_callback() -> None:
    with (
        pytest.raises(StateMismatchError, match=r'; PCcheckCallback\(private="modulo"\) gives'),
        advise_in_trainer("s"),
    ):
        raise StateMismatchError('differ: rng; restore(state, private="modulo") gives rank r those of rank r')
