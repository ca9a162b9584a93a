"""The hosts that hold copies: what survives the loss of some, by enumeration of all subsets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb

import pytest

from pccheck_async.group.placement import holders_of, peer_hosts


def survives(peers: list[tuple[int, ...]], lost: tuple[int, ...]) -> bool:
    return all(host not in lost or not {*each} <= {*lost} for host, each in enumerate(peers))


def share(hosts: int, replicas: int, lost: int) -> float:
    peers = peer_hosts(hosts, replicas)
    return sum(survives(peers, one) for one in combinations(range(hosts), lost)) / comb(hosts, lost)


@pytest.mark.parametrize("hosts", range(1, 13))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_each_host_has_copies_on_others_and_none_holds_more_than_others(hosts: int, replicas: int) -> None:
    peers, copies = peer_hosts(hosts, replicas), min(replicas, hosts - 1)
    assert all(len({*each}) == copies and host not in each for host, each in enumerate(peers))
    assert {*Counter(peer for each in peers for peer in each).values()} <= {copies}


@pytest.mark.parametrize("hosts", range(1, 13))
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_the_bound_of_gemini_holds_for_every_number_of_losses(hosts: int, replicas: int) -> None:
    """Its groups are those of m hosts; a ring has as many sets of m hosts, in a row, as it has hosts."""
    m = min(replicas + 1, hosts)
    groups = hosts // m if hosts % m == 0 else hosts // m - 1 + m + hosts % m
    for lost in range(hosts + 1):
        found = share(hosts, replicas, lost)
        if lost < m:
            assert found == 1
        else:
            assert found >= 1 - groups * comb(hosts - m, lost - m) / comb(hosts, lost) - 1e-12


def test_two_of_sixteen_hosts() -> None:
    assert share(16, 1, 2) == pytest.approx(1 - 8 / 120)  # the paper's 93.3 %


@pytest.mark.parametrize("hosts", range(2, 13))
@pytest.mark.parametrize("replicas", [1, 2])
def test_one_more_copy_on_the_same_hosts_loses_nothing_more(hosts: int, replicas: int) -> None:
    for lost in range(hosts):
        assert share(hosts, replicas + 1, lost) >= share(hosts, replicas, lost) - 1e-12


@pytest.mark.parametrize(
    "homes", [[0, 1], [0, 0, 1, 1], [0, 1, 0, 1, 2], [0, 0, 0, 1], [5, 5, 2, 7, 7, 7], [0, 0], [0, 1, 2, 3, 4, 5, 6]]
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_holders_are_ranks_of_other_hosts_and_share_the_work(homes: list[int], replicas: int) -> None:
    holders, hosts = holders_of(homes, replicas), len({*homes})
    for rank, held in enumerate(holders):
        where = [homes[rank], *(homes[each] for each in held)]
        assert len({*where}) == len(where) == 1 + min(replicas, hosts - 1)
    for home in {*homes}:
        loads = [sum(rank in held for held in holders) for rank in range(len(homes)) if homes[rank] == home]
        assert max(loads) - min(loads) <= replicas


def test_hosts_are_told_apart_by_their_numbers_alone() -> None:
    assert holders_of([3, 3, 1, 1], 1) == ((2,), (3,), (0,), (1,))
    assert holders_of([0, 0, 0, 1], 1) == ((3,), (3,), (3,), (0,))
