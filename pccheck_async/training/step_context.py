"""The context around one training step, blocking and asynchronous: ``with engine.step(...) as this_step``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn

from pccheck_async.engine import block_on, run
from pccheck_async.training.run import TrainingRun, TrainingStep

__all__ = ["AsyncStepContext", "StepContext"]


class _Context:
    """What both contexts are made of.

    Args:
        training: The training run of the engine.
        this: The step.
        checkpoint: The engine's method, which takes the checkpoint when one is due.
    """

    def __init__(self, training: TrainingRun, this: TrainingStep, checkpoint: Callable[..., Any]) -> None:
        self._training = training
        self._this = this
        self._checkpoint = checkpoint


class StepContext(_Context, AbstractContextManager[TrainingStep, None]):
    """What ``SyncCheckpointEngine.step`` returns."""

    def __enter__(self) -> TrainingStep:
        self._training.begin(self._this)
        return self._this

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        training, this = self._training, self._this
        if training.end(this, failed=kind is not None):
            training.note(this, self._checkpoint(this.state, **training.arguments(this)))
        if kind is None and training.is_last(this):
            block_on(training.core, training.save_and_go(this))

    def __aenter__(self) -> NoReturn:
        raise TypeError("use 'with engine.step(...)': this engine is a SyncCheckpointEngine")

    def __aexit__(self, *_: object) -> None: ...


class AsyncStepContext(_Context, AbstractAsyncContextManager[TrainingStep, None]):
    """What ``CheckpointEngine.step`` returns."""

    async def __aenter__(self) -> TrainingStep:
        self._training.begin(self._this)
        return self._this

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        training, this = self._training, self._this
        if training.end(this, failed=kind is not None):
            training.note(this, await self._checkpoint(this.state, **training.arguments(this)))
        if kind is None and training.is_last(this):
            await run(training.core, training.save_and_go(this))
            await training.let_cancel()

    def __enter__(self) -> NoReturn:
        raise TypeError("use 'async with engine.step(...)', or a SyncCheckpointEngine where nothing is async")

    def __exit__(self, *_: object) -> None: ...
