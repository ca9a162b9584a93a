"""Hosts that share no network: each rank in a network namespace of its own, with an address on one bridge."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.group.test_memory_replicas import test_what_survives_is_what_the_placement_says as what_survives
from tests.support import ranks

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.root,
    pytest.mark.timeout(1800),
    pytest.mark.usefixtures("machine_asked_once"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded", "ignore:the checkpoint of step"),
]
HOSTS = 4
NETWORK = "10.213.77"
BRIDGE = f"{NETWORK}.254"


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def name_of(host: int) -> str:
    return f"pccheck-host-{host}"


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each host its namespace; rank r of a job runs on host r, and finds the others by their addresses alone."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    libc = ctypes.CDLL(None, use_errno=True)
    original = ranks._be
    server = 0

    def be(rank: int, *arguments: Any) -> None:
        with open(f"/run/netns/{name_of(rank)}") as file:
            assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        os.environ["MASTER_ADDR"] = f"{NETWORK}.1"  # as torchrun sets it
        original(rank, *arguments)

    def meet(place: tuple[int, str]) -> PrefixStore:
        port, prefix = place
        return PrefixStore(prefix, TCPStore(BRIDGE, port, is_master=False, wait_for_workers=False))

    try:
        ip("link add pccheck-bridge type bridge")
        ip(f"addr add {BRIDGE}/24 dev pccheck-bridge")
        ip("link set pccheck-bridge up")
        for host in range(HOSTS):
            name, inside, outside = name_of(host), "eth0", f"pccheck-{host}"
            ip(f"netns add {name}")
            ip(f"link add {outside} type veth peer name {inside} netns {name}")
            ip(f"link set {outside} master pccheck-bridge up")
            ip(f"-n {name} addr add {NETWORK}.{host + 1}/24 dev {inside}")
            ip(f"-n {name} link set {inside} up")
            ip(f"-n {name} link set lo up")
        reader, writer = os.pipe()
        server = os.fork()
        if server == 0:
            store = TCPStore(BRIDGE, 0, is_master=True, wait_for_workers=False)
            os.write(writer, store.port.to_bytes(4, "little"))
            while True:
                time.sleep(60)
        port, used = int.from_bytes(os.read(reader, 4), "little"), iter(range(1 << 30))
        monkeypatch.setattr(ranks, "_be", be)
        monkeypatch.setattr(ranks, "meet", meet)
        monkeypatch.setattr(ranks, "meeting_place", lambda: (port, f"apart-{next(used)}"))
        yield
    finally:
        if server:
            os.kill(server, 9)
            os.waitpid(server, 0)
        for host in range(HOSTS):
            subprocess.run(["ip", "netns", "del", name_of(host)], check=False)
        subprocess.run(["ip", "link", "del", "pccheck-bridge"], check=False)


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_survives_on_hosts_that_are_apart(apart: None, tmp_path: Path, shared_memory: Path, replicas: int) -> None:
    what_survives(tmp_path, shared_memory, replicas, [*range(HOSTS)])
