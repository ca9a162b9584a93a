# SPDX-License-Identifier: Apache-2.0
"""The ranks that hold copies of another rank's checkpoints in memory, each on another host (Gemini, SOSP'23).

Hosts form groups of m = replicas + 1, in which each has copies of the others: so the loss of fewer than m hosts loses
no checkpoint, and the loss of m hosts only if they are one whole group. Hosts that are too few for another group join
the last one, in a ring: the copies of each host are on the next ones. Hosts and ranks may be of any number.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["holders_of", "peer_hosts"]


def peer_hosts(hosts: int, replicas: int) -> list[tuple[int, ...]]:
    """Return, for each host, the hosts that hold copies of its checkpoints: ``replicas`` of them, or all others."""
    together = min(replicas + 1, hosts)
    peers: list[tuple[int, ...]] = []
    while len(peers) < hosts:
        first, left = len(peers), hosts - len(peers)
        size = together if left >= 2 * together else left
        peers += [tuple(first + (at + each) % size for each in range(1, together)) for at in range(size)]
    return peers


def holders_of(homes: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Return, for each rank, the ranks that hold copies of its checkpoints.

    Args:
        homes: The host of each rank.
        replicas: Number of copies, each on another host; fewer if there are not as many hosts.
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
