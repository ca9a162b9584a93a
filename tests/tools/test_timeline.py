"""Timelines of real runs: what was recorded covers the run, nests, and survives the way through the file."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.paper.lab.timeline import STAGES, TRAINING, Span, Timeline, recorded
from pccheck_async import CheckpointEngine, CheckpointError, SyncCheckpointEngine
from pccheck_async.testing import CrashDisk, CrashWriter
from tests.support.settings import engine_settings

CHUNK = 1 << 20
MODEL = 700 * 700  # float32: nearly two chunks; with Adam's state nearly six


class Run:
    """A few recorded training steps with an attached optimizer, and the engine's own numbers about them."""

    def __init__(self, path: Path, steps: int = 6, interval: int = 2, **options: Any) -> None:
        model = torch.nn.Linear(700, 700, bias=False)
        optimizer = torch.optim.Adam(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        self.interval, self.steps = interval, steps
        with SyncCheckpointEngine(path, interval=interval, **engine_settings(chunk_bytes=CHUNK, **options)) as engine:
            engine.attach(optimizer)
            with recorded(engine) as self.timeline:
                for step in range(steps):
                    with engine.step(state, step):
                        optimizer.zero_grad()
                        model(torch.ones(2, 700)).square().mean().backward()
                        optimizer.step()
                engine.drain()
            self.infos = engine.checkpoints()
            self.statistics = engine.statistics()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(tmp_path_factory.mktemp("timeline") / "store", keep_last=3, max_in_flight=2)


def named(spans: Sequence[Span], name: str) -> list[Span]:
    return [span for span in spans if span.name == name]


def test_every_step_and_checkpoint_is_there(run: Run) -> None:
    steps = named(run.timeline.training, "step")
    assert [span.step for span in steps] == list(range(run.steps))
    assert all(before.end <= after.start for before, after in itertools.pairwise(steps))
    checkpoints = run.timeline.checkpoints
    assert sorted((info.counter, info.step) for info in run.infos) == [(0, 1), (1, 3), (2, 5)]
    assert {counter: {span.step for span in spans} for counter, spans in checkpoints.items()} == {
        0: {1},
        1: {3},
        2: {5},
    }
    assert {span.name for span in run.timeline.spans} == {*TRAINING, *STAGES}


def test_chunks_cover_the_payload(run: Run) -> None:
    for info in run.infos:
        spans = run.timeline.checkpoints[info.counter]
        for stage in ("capture", "write"):
            chunks = {span.chunk: span.nbytes for span in named(spans, stage) if span.chunk is not None}
            assert sum(chunks.values()) == info.nbytes > 5 * CHUNK
            assert sorted(chunks) == list(range(len(chunks)))
            assert max(chunks.values()) == CHUNK
        written = [span for span in named(spans, "write") if span.chunk is None]
        assert len(written) == 3  # the manifest, and two copies of the record


def test_each_chunk_is_copied_then_written_then_flushed_then_committed(run: Run) -> None:
    for spans in run.timeline.checkpoints.values():
        assert all(span.start <= span.end for span in spans)
        captured = {span.chunk: span for span in named(spans, "capture")}
        (commit,) = named(spans, "commit")
        writes = named(spans, "write")
        payload = [span for span in writes if span.chunk is not None]
        assert all(captured[span.chunk].end <= span.start for span in payload)
        assert max(span.end for span in [*captured.values(), *payload]) <= commit.start
        slot, record = sorted(
            (span for span in named(spans, "flush") if span.start >= commit.start), key=lambda span: span.start
        )
        manifest, *records = sorted((span for span in writes if span.chunk is None), key=lambda span: span.start)
        assert commit.start <= manifest.start
        assert manifest.end <= slot.start
        assert len(records) == 2
        assert slot.end <= min(span.start for span in records)
        assert max(span.end for span in records) <= record.start
        assert record.end <= commit.end


def test_spans_add_up_to_the_statistics(run: Run) -> None:
    spans = run.timeline.spans
    for stage in ("capture", "commit"):
        counted = run.statistics.stages[stage]
        assert len(named(spans, stage)) == counted.count
        assert sum(span.end - span.start for span in named(spans, stage)) == pytest.approx(counted.seconds)
    waited = sum(span.end - span.start for span in named(spans, "stall"))
    assert waited == pytest.approx(run.statistics.stall_seconds)


def test_it_is_a_chrome_trace(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run.timeline.write(path)
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(run.timeline.spans)
    assert min(event["ts"] for event in complete) == 0
    tracks = defaultdict(list)
    for event in complete:
        assert event["dur"] >= 0
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():  # Perfetto stacks what nests, and what merely overlaps it drops
        track.sort(key=lambda event: event["ts"])
        for before, after in itertools.pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    names = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert names >= set(tracks)
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert processes[1] == "training"
    assert len(processes) <= 1 + 2  # max_in_flight


def test_through_a_writer_that_is_no_file(tmp_path: Path) -> None:
    """Spans of writes and flushes come from the clock that every writer has, also the doubles for tests."""
    run = Run(tmp_path, steps=2, io=CrashWriter(CrashDisk()))
    spans = run.timeline.checkpoints[0]
    assert {span.name for span in spans} == set(STAGES)
    assert sum(span.nbytes for span in spans if span.name == "write" and span.chunk is not None) == run.infos[0].nbytes


def test_only_what_begins_inside_is_recorded(tmp_path: Path) -> None:
    async def train() -> tuple[Timeline, int]:
        async with CheckpointEngine(tmp_path / "store") as engine:
            state = {"x": torch.zeros(10)}
            await (await engine.checkpoint(state, step=1)).durable()
            with recorded(engine) as timeline:
                pending = await engine.checkpoint(state, step=2)
            later = await engine.checkpoint(state, step=3)
            await pending.durable()
            await later.durable()
            with pytest.raises(CheckpointError):
                async with engine.step(state, 4):
                    raise CheckpointError("nothing was recorded of this step")
            return timeline, pending.counter

    timeline, counter = asyncio.run(train())
    assert set(timeline.checkpoints) == {counter}
    assert {span.name for span in timeline.checkpoints[counter]} == set(STAGES)
    assert [span.name for span in timeline.training] == ["stall"]
