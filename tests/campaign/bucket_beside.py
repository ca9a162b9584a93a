"""Checkpoints in object storage beside other writers of them: ``python -m tests.campaign.bucket_beside [--rounds 3]``.

On one server of this machine, in turns: this engine (saved to disk, then copied by its drain, keeping one), torch's DCP
with fsspec (s3fs), and with s3torchconnector's writer, both over the checkpoint before, as runs that keep one do. Told
are the seconds until the checkpoint is in the bucket, how long the caller waits, and the requests that the server
counts. Then a process of each is killed at some moments of its second save: what can be loaded afterwards, and what
lies there unused, unfinished uploads included.

Needs ``pip install s3fs "s3torchconnector[dcp]" boto3``.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

import torch

from examples.paper.lab.medians import summary
from pccheck_async import Drain, SyncCheckpointEngine, load_sync
from tests.campaign.bucket_speed import made
from tests.support.children import end, fork, in_child
from tests.support.object_server import BUCKET, environment_for, free_ports, options_for, served

State = dict[str, torch.Tensor]
KILLED_AT = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Parts of the time that a save takes."""


class Way(NamedTuple):
    """One kind of saving: makes a function that saves under a URL, and one that loads from there."""

    open: Callable[[Path, str, dict[str, Any]], Callable[[State, int], tuple[float, float]]]
    load: Callable[[str, dict[str, Any], State], State]


def _engine(folder: Path, url: str, options: dict[str, Any]) -> Callable[[State, int], tuple[float, float]]:
    engine = SyncCheckpointEngine(folder, drain=Drain(url, options=options), save_last=False).open()

    def save(state: State, step: int) -> tuple[float, float]:
        begun = time.perf_counter()
        pending = engine.checkpoint(state, step=step)
        waited = time.perf_counter() - begun
        pending.wait_reached("remote")
        return time.perf_counter() - begun, waited

    return save


def _load_engine(url: str, options: dict[str, Any], state: State) -> State:
    found: State = load_sync(url)
    return found


def _dcp(writer: Callable[[str, dict[str, Any]], Any]) -> Callable[..., Callable[[State, int], tuple[float, float]]]:
    def opened(folder: Path, url: str, options: dict[str, Any]) -> Callable[[State, int], tuple[float, float]]:
        from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

        def save(state: State, step: int) -> tuple[float, float]:
            begun = time.perf_counter()
            dcp_save(state, storage_writer=writer(url, options), no_dist=True)
            return (time.perf_counter() - begun,) * 2

        return save

    return opened


def _load_dcp(reader: Callable[[str, dict[str, Any]], Any]) -> Callable[[str, dict[str, Any], State], State]:
    def load(url: str, options: dict[str, Any], state: State) -> State:
        from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

        dcp_load(state, storage_reader=reader(url, options), no_dist=True)
        return state

    return load


def _s3fs(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "key": options["access_key_id"],
        "secret": options["secret_access_key"],
        "endpoint_url": options["endpoint"],
        "client_kwargs": {"region_name": options["region"]},
    }


def _fsspec(kind: str, url: str, options: dict[str, Any]) -> Any:
    from torch.distributed.checkpoint import _fsspec_filesystem as fsspec

    return getattr(fsspec, f"Fsspec{kind}")(url, **_s3fs(options))


def _connector(kind: str, url: str, options: dict[str, Any]) -> Any:
    from s3torchconnector import S3ClientConfig, dcp
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp.s3_file_system import S3FileSystem

    made = getattr(dcp, f"S3Storage{kind}")(options["region"], url)
    config = S3ClientConfig(force_path_style=True)
    client = S3Client(options["region"], endpoint=options["endpoint"], s3client_config=config)
    made.fs = S3FileSystem(options["region"], s3_client=client)
    return made


WAYS = {
    "engine": Way(_engine, _load_engine),
    "DCP, s3fs": Way(_dcp(partial(_fsspec, "Writer")), _load_dcp(partial(_fsspec, "Reader"))),
    "DCP, s3torchconnector": Way(_dcp(partial(_connector, "Writer")), _load_dcp(partial(_connector, "Reader"))),
}


def requests(metrics: str) -> dict[str, int]:
    """Return what the server counted, by kind."""
    with urlopen(metrics, timeout=10) as answer:
        text = answer.read().decode()
    found = dict[str, int]()
    for kind, count in re.findall(r'^SeaweedFS_s3_request_total\{.*type="(\w+)".*\} (\d+)', text, re.MULTILINE):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def times(folder: Path, options: dict[str, Any], metrics: str, nbytes: int, rounds: int) -> dict[str, Any]:
    state = made(nbytes)
    found: dict[str, dict[str, list[float]]] = {name: {"total": [], "waited": []} for name in WAYS}
    saves = {
        name: way.open(folder / str(number), f"s3://{BUCKET}/{number}/run", options)
        for number, (name, way) in enumerate(WAYS.items())
    }
    counted = dict[str, dict[str, int]]()
    for step in range(rounds + 1):
        for tensor in state.values():
            tensor.add_(1)
        for name in sorted(saves, reverse=bool(step % 2)):
            before = requests(metrics)
            total, waited = saves[name](state, step)
            time.sleep(1)  # the drain deletes what is superseded
            after = requests(metrics)
            counted[name] = {kind: more for kind in after if (more := after[kind] - before.get(kind, 0))}
            if step:
                found[name]["total"].append(total)
                found[name]["waited"].append(waited)
    return {"times": found, "requests": counted}


def two_saves(way: Way, folder: Path, url: str, options: dict[str, Any], nbytes: int, begun: int) -> None:
    state, save = made(nbytes), way.open(folder, url, options)
    for tensor in state.values():
        tensor.fill_(0)
    save(state, 0)
    for tensor in state.values():
        tensor.fill_(1)
    os.write(begun, b"b")
    save(state, 1)
    os.write(begun, b"e")


def loaded(way: Way, url: str, options: dict[str, Any], nbytes: int) -> str:
    state = {name: torch.full_like(tensor, -1) for name, tensor in made(nbytes).items()}
    try:
        found = way.load(url, options, state)
    except BaseException as error:  # noqa: BLE001 - it is what is asked for
        return f"nothing: {type(error).__name__}"
    values = sorted({float(value) for tensor in found.values() for value in (tensor.min(), tensor.max())})
    return {"[0.0]": "the first", "[1.0]": "the second"}.get(str(values), f"TORN: {values}")


def left(options: dict[str, Any], prefix: str, nbytes: int) -> str:
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=options["endpoint"],
        aws_access_key_id=options["access_key_id"],
        aws_secret_access_key=options["secret_access_key"],
        region_name=options["region"],
    )
    held = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    mine = [each for each in uploads if each["Key"].startswith(prefix)]
    return f"{sum(each['Size'] for each in held) / nbytes:.2f} of its bytes there, {len(mine)} unfinished uploads"


def killed(folder: Path, options: dict[str, Any], nbytes: int) -> None:
    for number, (name, way) in enumerate(WAYS.items()):
        taken = 0.0
        for at in (None, *KILLED_AT):
            place = f"killed/{number}/{at}"
            reader, writer = os.pipe()
            where = folder / place.replace("/", "-")
            child = fork(partial(two_saves, way, where, f"s3://{BUCKET}/{place}", options, nbytes, writer))
            os.close(writer)
            assert os.read(reader, 1)
            begun = time.perf_counter()
            if at is None:
                os.read(reader, 1)
                taken = time.perf_counter() - begun
                end(child)
            else:
                time.sleep(at * taken)
                end(child)
                time.sleep(1)
                what = in_child(partial(loaded, way, f"s3://{BUCKET}/{place}", options, nbytes))
                rest = in_child(partial(left, options, place, nbytes))
                print(f"{name}, killed at {at:.1f} of its second save: loads {what}; {rest}", flush=True)
            os.close(reader)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    nbytes = args.mib << 20
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "server").mkdir()
        (counts,) = free_ports(1)
        with served(folder / "server", metrics=counts) as port:
            options = options_for(port)
            os.environ |= environment_for(port)
            metrics = f"http://127.0.0.1:{counts}/metrics"
            found = in_child(partial(times, folder, options, metrics, nbytes, args.rounds))
            for way, values in found["times"].items():
                print(summary(f"{way}: s until it is in the bucket", values["total"]))
                print(summary(f"{way}: s that the caller waits", values["waited"]))
                print(f"{way}: requests {found['requests'][way]}", flush=True)
            killed(folder, options, nbytes // 2)


if __name__ == "__main__":
    main()
