"""What copying to object storage and reading from there costs, beside obstore alone, on a server of this machine.

Run: ``python -m tests.campaign.bucket_speed copy|steps|read|compression [--folder DIR] [--gib 1] [--rounds 3]``; the
last one also takes ``--weights FILE ...``. ``--server DIR``: the server keeps its files there, on another disk say.

``copy``: a checkpoint from the moment it is durable until it is in the bucket, ``load`` of it, and ``restore`` into
live tensors from an empty folder, beside obstore alone putting and getting as many bytes in objects of 32 MiB,
at 1, 2, 4 and 8 requests at a time, in turns: ``load`` beside getting into new memory, ``restore`` into old; peak
memory of all three. And beside obstore with as many bytes in flight as the copy has memory: objects and number of ours.
``steps``: those of a training whose checkpoints are copied at a limited rate, beside the same one without copies, and
beside one while another process puts as many bytes with obstore: what the server alone takes of the processors.
``read``: requests and bytes for one tensor of 1 MiB; the throughput of 1 to 32 processes that each read one checkpoint.
``compression``: ratio and speed on one core, for the weights in a file, these in bfloat16, and the moments of a
training; the time until a checkpoint of these is in the bucket, at 50 and 200 MB/s and unlimited.
The server runs on the same processors as what is measured: an unlimited rate is that of a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from examples.paper.lab.medians import summary
from pccheck_async import Drain, SyncCheckpointEngine, load_sync, open_checkpoint
from pccheck_async.bucket import coding
from pccheck_async.bucket.compression import Compression
from pccheck_async.bucket.obstore_objects import ObstoreObjects
from pccheck_async.bucket.upload import OBJECT_BYTES
from tests.support.children import end, fork, in_child
from tests.support.object_server import BUCKET, environment_for, options_for, served

State = dict[str, torch.Tensor]
OBJECT = 32 << 20
AT_ONCE = (1, 2, 4, 8)
READERS = (1, 2, 4, 8, 16, 32)
HOW: tuple[Compression, ...] = (None, "auto", "zstd")
RATES = (50_000_000, 200_000_000, None)
STEPS_RATE = 20_000_000
AS_MUCH_MEMORY = "put 64 MiB at a time"
BESIDE = "beside obstore"


def made(nbytes: int, parts: int = 64) -> State:
    generator = torch.Generator().manual_seed(0)
    return {f"t{number:02}": torch.rand(nbytes // parts // 4, generator=generator) for number in range(parts)}


def change(state: State) -> None:
    for tensor in state.values():
        tensor.mul_(0.9999)


def peak_of(work: Callable[[], float]) -> tuple[float, int]:
    """Return the result, and by how many bytes the resident memory was larger meanwhile than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    result = work()
    return result, _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def until_remote(engine: SyncCheckpointEngine, state: State, step: int) -> float:
    pending = engine.checkpoint(state, step=step)
    pending.result()
    begun = time.perf_counter()
    pending.wait_reached("remote")
    return time.perf_counter() - begun


def timed(work: Callable[[], object]) -> float:
    gc.collect()
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# -- copy


async def _raw(store: Any, objects: list[memoryview], at_once: int, how: Literal["put", "get", "get new"]) -> None:
    import obstore

    places, found = asyncio.Semaphore(at_once), list[memoryview]()

    async def one(number: int, view: memoryview) -> None:
        async with places:
            if how == "put":
                await obstore.put_async(store, f"raw/{len(view)}/{number}", view, use_multipart=False)
                return
            key = f"raw/{len(view)}/{number}"
            data = memoryview(await obstore.get_range_async(store, key, start=0, length=len(view)))
            if how == "get new":
                view = memoryview(torch.empty(len(data), dtype=torch.uint8).numpy())  # type: ignore[arg-type]
                found.append(view)
            view[:] = data

    await asyncio.gather(*[one(number, view) for number, view in enumerate(objects)])


def copy(folder: Path, options: dict[str, Any], nbytes: int, rounds: int) -> dict[str, list[float]]:
    from obstore.store import from_url

    store = from_url(
        f"s3://{BUCKET}",
        config={name: value for name, value in options.items() if name != "allow_http"},
        client_options={"allow_http": True, "timeout": "1h"},
    )
    memory = torch.rand(nbytes // 4).view(torch.uint8).numpy()
    objects, small = (
        [memoryview(memory[at : at + size]) for at in range(0, nbytes, size)]  # type: ignore[arg-type]
        for size in (OBJECT, OBJECT_BYTES)
    )
    state, times = made(nbytes), dict[str, list[float]]()

    def add(name: str, value: float) -> None:
        times.setdefault(name, []).append(value)

    def raw(how: Literal["put", "get", "get new"]) -> None:
        for at_once in AT_ONCE:
            add(f"{how} by {at_once}", timed(lambda n=at_once: asyncio.run(_raw(store, objects, n, how))))  # type: ignore[misc]

    def ours(what: str, work: Callable[[], float], memory: int = 0) -> None:
        taken, peak = peak_of(work)
        add(what, taken)
        add(f"{what}, MiB beyond the state", (peak - memory) / (1 << 20))

    url = f"s3://{BUCKET}/run"
    drain = Drain(url, options=options)
    with SyncCheckpointEngine(folder / "store", drain=drain, save_last=False) as engine:
        for number in range(rounds + 1):
            change(state)
            ours("copy", partial(until_remote, engine, state, number))
            raw("put")
            add(AS_MUCH_MEMORY, timed(lambda: asyncio.run(_raw(store, small, 4, "put"))))
            ours("load", lambda: timed(lambda: load_sync(url)), nbytes)
            raw("get new")
            if not number:
                times.clear()  # warm
    for number in range(rounds):
        with SyncCheckpointEngine(folder / f"empty-{number}", drain=drain, save_last=False) as engine:
            ours("restore", partial(timed, partial(engine.restore, state)))
            raw("get")
    return times


# -- steps


def put_for_ever(options: dict[str, Any]) -> None:
    """Put objects of the drain's size with obstore, at its rate."""
    from obstore.store import from_url

    config = {name: value for name, value in options.items() if name != "allow_http"}
    store = from_url(f"s3://{BUCKET}", config=config, client_options={"allow_http": True})
    data = memoryview(torch.rand(OBJECT_BYTES // 4).view(torch.uint8).numpy())  # type: ignore[arg-type]
    while True:
        begun = time.monotonic()
        store.put("beside", data, use_multipart=False)
        time.sleep(max(0.0, begun + len(data) / STEPS_RATE - time.monotonic()))


def train(folder: Path, options: dict[str, Any], rounds: int) -> dict[str, list[float]]:
    """Time the same steps of three trainings, in turns."""
    torch.set_num_threads(1)
    times = dict[str, list[float]]()
    other = fork(lambda: put_for_ever(options))
    os.kill(other, signal.SIGSTOP)

    def trained(name: str, drain: Drain | None) -> Callable[[], float]:
        model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        engine = SyncCheckpointEngine(folder / name, interval=20, drain=drain, save_last=False).open()
        engine.attach(optimizer)
        batch, state, step = torch.rand(256, 1024), {"model": model, "optimizer": optimizer}, 0

        def steps() -> float:
            nonlocal step
            begun = time.perf_counter()
            for _ in range(60):
                step += 1
                with engine.step(state, step):
                    model(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            return time.perf_counter() - begun

        return steps

    limited = Drain(f"s3://{BUCKET}/limited", options=options, rate_limit=STEPS_RATE)
    ways = {name: trained(name, limited if name == "drained" else None) for name in ("drained", "not drained", BESIDE)}
    try:
        for number in range(rounds + 1):
            for name in sorted(ways, reverse=bool(number % 2)):
                if name == BESIDE:
                    os.kill(other, signal.SIGCONT)
                taken = ways[name]()
                os.kill(other, signal.SIGSTOP)
                if number:
                    times.setdefault(name, []).append(taken)
    finally:
        end(other)
    return times


# -- read


class Counted:
    """Counts requests and bytes of bodies, of this process, from the moment that it is made."""

    def __init__(self) -> None:
        self.requests, self.nbytes = dict[str, int](), 0
        for kind in ("get", "read", "list"):
            setattr(ObstoreObjects, kind, self._counting(kind, getattr(ObstoreObjects, kind)))

    def _counting(self, kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        async def request(objects: ObstoreObjects, *arguments: Any) -> Any:
            self.requests[kind] = self.requests.get(kind, 0) + 1
            result = await original(objects, *arguments)
            self.nbytes += 0 if kind == "list" else len(result or b"")
            return result

        return request


def one_tensor(url: str) -> dict[str, Any]:
    counted = Counted()
    with open_checkpoint(url) as opened:
        before = dict(counted.requests), counted.nbytes
        begun = time.perf_counter()
        tensor = opened["small"]
        assert torch.equal(tensor[:], torch.arange(1 << 17))
        seconds = time.perf_counter() - begun
    return {"opening": before, "and one tensor": (counted.requests, counted.nbytes), "seconds": seconds}


def save(folder: Path, url: str, options: dict[str, Any], nbytes: int) -> None:
    state = made(nbytes) | {"small": torch.arange(1 << 17)}
    with SyncCheckpointEngine(folder, drain=Drain(url, options=options), save_last=False) as engine:
        engine.checkpoint(state, step=0).wait_reached("remote")


def readers(url: str, count: int) -> float:
    """Return the seconds until ``count`` processes have each read the checkpoint; they begin together."""
    go, begin = os.pipe()
    end_of, done = os.pipe()

    def read() -> None:
        os.close(begin)
        os.read(go, 1)  # until the parent closes it
        load_sync(url)
        os.write(done, b"r")

    children = [fork(read) for _ in range(count)]
    time.sleep(1)
    started = time.perf_counter()
    os.close(begin)
    for _ in range(count):
        assert os.read(end_of, 1)
    taken = time.perf_counter() - started
    for child in children:
        end(child)
    for descriptor in (go, end_of, done):
        os.close(descriptor)
    return taken


# -- compression


def moments(steps: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both moments of AdamW, of a small language model after some steps on this file's text."""
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    model = nn.ModuleList([nn.Embedding(256, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 256)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 65, (8,))
        batch = torch.stack([text[start : start + 65] for start in starts])
        hidden = model[1](model[0](batch[:, :-1]), mask=nn.Transformer.generate_square_subsequent_mask(64))
        loss = nn.functional.cross_entropy(model[2](hidden).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = [optimizer.state[parameter] for parameter in model.parameters()]
    first, second = (torch.cat([each[name].flatten() for each in found]) for name in ("exp_avg", "exp_avg_sq"))
    return first, second


def tensors_in(path: Path) -> list[torch.Tensor]:
    found = torch.load(path, map_location="cpu", weights_only=True)
    found = found.get("model_state", found)
    return [value.flatten().float() for value in found.values() if value.is_floating_point()]


def kinds(weights: list[Path]) -> State:
    real = torch.cat([tensor for path in weights for tensor in tensors_in(path)])
    first, second = moments()
    return {"weights, fp32": real, "weights, bf16": real.bfloat16(), "moments, m": first, "moments, v": second}


def coded(tensor: torch.Tensor, rounds: int) -> str:
    data = memoryview(tensor.view(torch.uint8).numpy())[:OBJECT]  # type: ignore[arg-type]
    into = memoryview(bytearray(coding.BLOCK_BYTES))
    speeds, stored = [], 0
    for _ in range(rounds):
        begun = time.thread_time()
        stored = sum(coding.compress(block, into).nbytes for block in coding.blocks_in(data))
        speeds.append(len(data) / (time.thread_time() - begun) / 1e9)
    return f"ratio {stored / len(data):.3f}, {statistics.median(speeds):.2f} GB/s of one core"


def sooner(folder: Path, options: dict[str, Any], state: State, rounds: int) -> dict[str, list[float]]:
    """Time each rate and each way of compression, in turns."""
    times = dict[str, list[float]]()
    engines = dict[str, SyncCheckpointEngine]()
    for rate in RATES:
        for how in HOW:
            name = f"{rate // 1_000_000 if rate else 'unlimited'} MB/s, {how or 'plain'}"
            url = f"s3://{BUCKET}/{len(engines)}"
            drain = Drain(url, options=options, rate_limit=rate, compression=how)
            engines[name] = SyncCheckpointEngine(folder / str(len(engines)), drain=drain, save_last=False).open()
    for number in range(rounds + 1):
        change(state)
        for name in sorted(engines, reverse=bool(number % 2)):
            taken = until_remote(engines[name], state, number)
            if number:
                times.setdefault(name, []).append(taken)
    for engine in engines.values():
        engine.close()
    return times


def tell(times: dict[str, list[float]]) -> None:
    for name, values in times.items():
        print("  ", summary(name, values), flush=True)


def best_of(times: dict[str, list[float]], kind: str) -> list[float]:
    return min((values for name, values in times.items() if name.startswith(kind)), key=statistics.median)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("copy", "steps", "read", "compression"))
    parser.add_argument("--folder", default=None)
    parser.add_argument("--server", default=None)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights", type=Path, nargs="+", help="torch files of floating-point tensors")
    args = parser.parse_args()
    nbytes = int(args.gib * (1 << 30))
    with (
        tempfile.TemporaryDirectory(dir=args.folder) as own,
        tempfile.TemporaryDirectory(dir=args.server or args.folder) as server,
    ):
        folder = Path(own)
        with served(Path(server)) as port:
            options = options_for(port)
            os.environ |= environment_for(port)
            if args.what == "copy":
                times = in_child(partial(copy, folder, options, nbytes, args.rounds))
                tell(times)
                compared = (("copy", "put by"), ("copy", AS_MUCH_MEMORY), ("load", "get new by"), ("restore", "get by"))
                for ours, theirs in compared:
                    best = best_of(times, theirs)
                    ratios = [one / other for one, other in zip(best, times[ours], strict=True)]
                    print(summary(f"{ours}: throughput over obstore's best, {theirs}", ratios), flush=True)
            elif args.what == "steps":
                times = in_child(partial(train, folder, options, args.rounds))
                tell(times)
                for name in ("drained", BESIDE):
                    pairs = zip(times[name], times["not drained"], strict=True)
                    print(summary(f"steps {name} over not drained", [one / other for one, other in pairs]))
            elif args.what == "read":
                url = f"s3://{BUCKET}/large"
                in_child(partial(save, folder / "large", url, options, nbytes))
                print(in_child(partial(one_tensor, url)), flush=True)
                url = f"s3://{BUCKET}/read"
                in_child(partial(save, folder / "read", url, options, nbytes // 16))
                for count in READERS:
                    taken = [readers(url, count) for _ in range(args.rounds)]
                    rates = [count * (nbytes // 16 + (1 << 20)) / each / 1e6 for each in taken]
                    print(summary(f"{count} readers, MB/s in all", rates), flush=True)
            else:
                found = kinds(args.weights)
                for kind, tensor in found.items():
                    print(f"{kind}: {coded(tensor, 5)}", flush=True)
                tell(in_child(partial(sooner, folder, options, found, args.rounds)))


if __name__ == "__main__":
    main()
