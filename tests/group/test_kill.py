"""SIGKILL of ranks, at every step of the commit: every restart finds one checkpoint on all ranks, none older."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.group_lives import POINTS, Kill, Lives

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("machine_asked_once"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


@pytest.mark.parametrize(
    ("nodes", "sides"),
    [
        pytest.param((0, 0), (False, True), id="shared"),
        pytest.param((0, 1, 1), (True,), id="node-local"),
        pytest.param((0, 1, 1), (False,), id="node-local, before", marks=pytest.mark.campaign),
    ],
)
def test_killed_at_every_step_of_a_commit(tmp_path: Path, nodes: tuple[int, ...], sides: tuple[bool, ...]) -> None:
    lives = Lives(tmp_path, seed=1)
    for point in POINTS:
        for after in sides:
            victim = 0 if point == "decide" else lives.random.randrange(len(nodes))
            lives.live(nodes, Kill(victim, point, after=after, count=1 if "join" in point else 3))
    lives.live(nodes, steps=2)
    assert lives.restored[-1] >= 0
    assert lives.kills.total() == len(sides) * len(POINTS)


@pytest.mark.parametrize(
    ("nodes", "after"),
    [
        pytest.param((0, 1, 1), False, id="two hosts, before"),
        pytest.param((0, 0), True, id="one host, after", marks=pytest.mark.campaign),
        pytest.param((0, 0), False, id="one host, before", marks=pytest.mark.campaign),
        pytest.param((0, 1, 1), True, id="two hosts, after", marks=pytest.mark.campaign),
    ],
)
def test_killed_at_every_step_of_a_commit_in_memory(
    tmp_path: Path, shared_memory: Path, nodes: tuple[int, ...], after: bool
) -> None:
    lives = Lives(tmp_path, seed=4, memory=shared_memory)
    for point in POINTS:
        for count in (1, 2) if "join" in point else (2, 5):
            victim = 0 if point == "decide" else lives.random.randrange(len(nodes))
            lives.live(nodes, Kill(victim, point, after=after, count=count))
    lives.live(nodes, steps=4)
    assert lives.restored[-1] >= 0
    assert lives.kills.total() == 2 * len(POINTS)


def test_all_ranks_killed(tmp_path: Path) -> None:
    lives = Lives(tmp_path, seed=2)
    for _ in range(4):
        lives.live((0, 0), Kill(None, seconds=lives.random.uniform(0, 0.05)))
    lives.live((0, 0), steps=1)
    assert lives.restored[-1] >= lives.restored[0]


def test_ranks_swap_nodes_and_worlds_change(tmp_path: Path) -> None:
    lives = Lives(tmp_path, seed=3)
    for nodes in ((0, 1, 1), (1, 0, 1), (1, 0), (0, 1, 0), (0, 1)):
        lives.live(nodes, steps=3)
    assert lives.restored[1:] == [lives.restored[1] + 3 * n for n in range(4)]


def _any_kill(lives: Lives, world: int) -> Kill:
    draw = lives.random
    if draw.random() < 0.3:
        return Kill(draw.choice([None, 0, draw.randrange(world)]), seconds=draw.uniform(0, 0.08))
    point = draw.choice(list(POINTS))
    victim = 0 if point == "decide" else draw.choice([0, draw.randrange(world)])
    return Kill(victim, point, after=draw.random() < 0.5, count=1 if "join" in point else draw.randrange(1, 6))


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("where", "worlds"),
    [
        ("shared", (2,)),
        ("shared", (4,)),
        ("shared", (8,)),
        ("nodes", (3,)),
        ("nodes", (2, 3)),
        ("shared, memory", (2,)),
        ("shared, memory", (3, 4)),
        ("nodes, memory", (2, 3)),
    ],
)
def test_many_kills(tmp_path: Path, shared_memory: Path, where: str, worlds: tuple[int, ...]) -> None:
    """Ranks on one filesystem, or on two nodes of their own, which they swap; worlds of one size, or of two.

    With memory, checkpoints there count as acknowledged: no machine is lost.
    """
    lives = Lives(tmp_path, seed=100, memory=shared_memory if "memory" in where else None)
    start = time.perf_counter()
    nodes = [0]
    for _ in range(200):
        world = lives.random.choice(worlds)
        nodes = [0] * world
        while where.startswith("nodes") and set(nodes) != {0, 1}:  # else parts are out of reach
            nodes = [lives.random.randrange(2) for _ in range(world)]
        lives.live(nodes, _any_kill(lives, len(nodes)))
    lives.live(nodes, steps=1)
    seconds = time.perf_counter() - start
    print(f"\n{where}, {worlds}: {dict(lives.kills)}; {len(lives.restored)} restarts compared, {seconds:.0f} s in all,")
    print(f"{lives.slowest:.1f} s the longest until all had restored")
    assert lives.kills.total() == 200
