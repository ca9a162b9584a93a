# SPDX-License-Identifier: Apache-2.0
"""The ranks that hold copies of another rank's checkpoints in memory, each on another host (Gemini, SOSP'23).

Hosts form groups of m = replicas + 1, in which each has copies of the others: so the loss of fewer than m hosts loses
nothing, and of m hosts only that of one whole group. Hosts that make no whole group join the last one, in a ring: the
copies of each are on the next ones. Any number of hosts will do, and of ranks on each.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["holders_of", "peer_hosts"]


def peer_hosts(hosts: int, replicas: int) -> list[tuple[int, ...]]:
    """Return the hosts that hold copies of each host's checkpoints: as many as ``replicas``, or as there are."""
    together = min(replicas + 1, hosts)
    peers: list[tuple[int, ...]] = []
    while len(peers) < hosts:
        first, left = len(peers), hosts - len(peers)
        size = together if left >= 2 * together else left
        peers += [tuple(first + (at + each) % size for each in range(1, together)) for at in range(size)]
    return peers


def holders_of(homes: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that hold copies of each rank's checkpoints.

    Args:
        homes: The host of each rank.
        replicas: Copies of each, on as many other hosts; fewer if there are no more hosts.
    """
    numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
    ranks: list[list[int]] = [[] for _ in numbers]
    for rank, home in enumerate(homes):
        ranks[numbers[home]].append(rank)
    peers = peer_hosts(len(ranks), replicas)
    return tuple(
        tuple(ranks[peer][ranks[numbers[home]].index(rank) % len(ranks[peer])] for peer in peers[numbers[home]])
        for rank, home in enumerate(homes)
    )
