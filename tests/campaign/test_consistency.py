"""A thousand overlapped checkpoints, each compared with what the state was when it was taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.test_overlap import FLAVOURS, check_consistency


@pytest.mark.campaign
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's own compiler
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_saved_is_the_state_at_the_step(tmp_path: Path, flavour: str) -> None:
    assert check_consistency(tmp_path, flavour, checkpoints=168, backend="inductor") == 168
