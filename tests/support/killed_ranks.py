"""Ranks that train together and are killed together, as a launcher does when one of them dies."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from tests.support.killed_training import Journal
from tests.support.ranks import meet, meeting_place

Work = Callable[["RankJournal"], object]


class RankJournal:
    """What one rank computed: ``train 7`` of rank 1 stands in the journal as ``1 train 7``, moments likewise."""

    def __init__(self, journal: Journal, rank: int) -> None:
        self._journal = journal
        self.rank = rank

    def note(self, key: str, value: object) -> None:
        """Write what was computed, then reach the moment ``key`` of this rank."""
        self._journal.note(f"{self.rank} {key}", value)

    def reach(self, moment: str) -> None:
        """Die if this is the moment."""
        self._journal.reach(f"{self.rank} {moment}")


def on_ranks(world: int, work: Work) -> Callable[[Journal], None]:
    """Return what :func:`tests.support.killed_training.live` runs: gloo ranks, all killed where one kills itself."""

    def launch(journal: Journal) -> None:
        place = meeting_place()
        ranks = [_fork(rank, world, place, work, journal) for rank in range(world)]
        codes: dict[int, int] = {}
        while len(codes) < world:
            child, status = os.waitpid(-os.getpgrp(), 0)
            if child in ranks:
                codes[ranks.index(child)] = os.waitstatus_to_exitcode(status)
            if -signal.SIGKILL in codes.values():
                os.kill(os.getpid(), signal.SIGKILL)  # and with it, in live(), all others
        assert not any(codes.values()), f"ranks ended with {codes}"

    return launch


def _fork(rank: int, world: int, place: tuple[int, str], work: Work, journal: Journal) -> int:
    if pid := os.fork():
        return pid
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=meet(place), rank=rank, world_size=world)
        work(RankJournal(journal, rank))
        dist.destroy_process_group()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a forked child must not return into the test runner
        traceback.print_exc()
        os._exit(1)
