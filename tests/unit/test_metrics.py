"""Metrics, read by prometheus_client's own parser."""

from __future__ import annotations

import math
import re
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.openmetrics import parser
from prometheus_client.parser import text_string_to_metric_families as parse_text

from pccheck_async import SyncCheckpointEngine
from pccheck_async.engine import Distribution, openmetrics, scalars
from pccheck_async.engine.metrics import METRICS, EngineCollector, families
from pccheck_async.telemetry.totals import Spread


def parse_openmetrics(text: str) -> list[Metric]:
    return list(parser.text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def trained(folder: Path, saves: int) -> SyncCheckpointEngine:
    engine = SyncCheckpointEngine(folder, interval=2)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with engine:
        engine.attach(optimizer)
        for step in range(2 * saves):
            with engine.step({"model": model}, step):
                optimizer.zero_grad()
                model(torch.ones(1, 64)).sum().backward()
                optimizer.step()
        engine.drain()
    return engine


def values(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset((key, value) for key, value in sample.labels.items() if key != "store")): sample.value
        for family in parse_openmetrics(text)
        for sample in family.samples
    }


def test_the_text_is_openmetrics_and_says_what_the_statistics_say(tmp_path: Path) -> None:
    engine = trained(tmp_path, 3)
    text = engine.metrics()
    assert text.endswith("# EOF\n")
    found, statistics = values(text), engine.statistics()

    def value(name: str, **labels: str) -> float:
        return found[name, frozenset(labels.items())]

    assert value("pccheck_checkpoints_total", result="durable") == statistics.durable > 0
    assert value("pccheck_checkpoints_admitted_total") == 3
    assert value("pccheck_checkpoints_in_flight") == 0
    assert value("pccheck_durable_bytes_total") == statistics.durable_bytes > 64 * 64 * 4
    assert value("pccheck_latest_step") == 5
    assert value("pccheck_latest_timestamp_seconds") == statistics.latest.time if statistics.latest else math.nan
    assert value("pccheck_save_seconds_count") == value("pccheck_save_seconds_bucket", le="+Inf") == statistics.durable
    stalls = [value("pccheck_stall_seconds_sum", where=where) for where in ("checkpoint", "optimizer")]
    assert sum(stalls) == pytest.approx(statistics.stall_seconds)
    assert value("pccheck_stage_bytes_total", stage="write") == statistics.stages["write"].nbytes
    assert value("pccheck_interval_steps") == 2
    assert value("pccheck_engine_info", io=statistics.io, loop=statistics.loop) == 1
    stores = {sample.labels["store"] for family in parse_openmetrics(text) for sample in family.samples}
    assert stores == {str(tmp_path)}


def test_units_types_and_the_table_agree(tmp_path: Path) -> None:
    engine = trained(tmp_path, 1)
    found = {f"pccheck_{metric.name}": metric for metric, _ in families({"x": engine.statistics()})}
    for family in parse_openmetrics(engine.metrics()):
        assert (family.type, family.unit) == (found[family.name].kind, found[family.name].unit)
        assert family.documentation == found[family.name].help
        unit = next((unit for unit in ("seconds", "bytes") if family.name.endswith(unit)), "")
        assert family.unit == unit
    # Of policies that go by time, and of engines with a tier in memory.
    optional = {"pccheck_interval_seconds", "pccheck_memory_interval_steps"}
    assert set(found) == {f"pccheck_{metric.name}" for metric in METRICS} - optional


def test_statistics_are_a_few_lines_in_print_and_in_notebooks(tmp_path: Path) -> None:
    found = trained(tmp_path, 1).statistics()
    assert re.fullmatch(
        r"1 checkpoints: 1 durable, 0 superseded, 0 failed, 0 skipped, 0 in flight; newest durable: step 1\n"
        r"training waited \S+ s; a checkpoint took \S+ s to be durable\n"
        r"interval: .+",
        str(found),
    )
    lines: list[str] = []
    found._repr_pretty_(SimpleNamespace(text=lines.append), False)
    assert lines == [str(found)]


def test_label_values_are_escaped(tmp_path: Path) -> None:
    odd = 'a"b\\c\nd é'
    text = openmetrics({odd: trained(tmp_path, 1).statistics()})
    assert {s.labels["store"] for family in parse_openmetrics(text) for s in family.samples} == {odd}


def test_two_stores_are_one_family_each(tmp_path: Path) -> None:
    first, second = trained(tmp_path / "a", 1), trained(tmp_path / "b", 2)
    text = openmetrics({engine.path: engine.statistics() for engine in (first, second)})
    admitted = {
        sample.labels["store"]: sample.value
        for family in parse_openmetrics(text)
        for sample in family.samples
        if sample.name == "pccheck_checkpoints_admitted_total"
    }
    assert admitted == {str(tmp_path / "a"): 1, str(tmp_path / "b"): 2}


@pytest.mark.slow
def test_a_server_of_prometheus_client_serves_a_running_engine(tmp_path: Path) -> None:
    registry = CollectorRegistry()
    server: Any
    with SyncCheckpointEngine(tmp_path) as engine:
        registry.register(EngineCollector(engine, SyncCheckpointEngine(tmp_path / "never opened")))
        server, thread = start_http_server(0, "127.0.0.1", registry)
        try:
            engine.checkpoint({"weights": torch.zeros(100)}, step=3).result()
            address = f"http://127.0.0.1:{server.server_port}/metrics"
            ask = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
            with ask(address) as response:
                plain = response.read().decode()
            asked = urllib.request.Request(address, headers={"Accept": "application/openmetrics-text; version=1.0.0"})
            with ask(asked) as response:
                assert "openmetrics-text" in response.headers["Content-Type"]
                text = response.read().decode()
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        assert values(text)["pccheck_latest_step", frozenset()] == 3
        names = {sample.name for family in parse_text(plain) for sample in family.samples}
        assert {"pccheck_checkpoints_total", "pccheck_save_seconds_bucket", "pccheck_engine_info"} <= names
        own = {s.name for family in parse_openmetrics(engine.metrics()) for s in family.samples}
        assert {name for name, _ in values(text)} == own


def test_scalars_are_flat_finite_numbers(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        before = engine.scalars()
        assert "checkpoint/latest_step" not in before
        assert "checkpoint/mean_save_seconds" not in before
        engine.checkpoint({"weights": torch.zeros(100)}, step=3).result()
        after = engine.scalars()
    assert after == pytest.approx(scalars(engine.statistics()) | {"checkpoint/in_flight": 0.0})
    assert (after["checkpoint/latest_step"], after["checkpoint/durable"], after["checkpoint/write_bytes"] > 0) == (
        3.0, 1.0, True,
    )  # fmt: skip
    assert all(type(value) is float and math.isfinite(value) for value in after.values())


def test_a_spread_counts_what_is_at_most_a_bound() -> None:
    spread = Spread()
    assert spread.distribution() == Distribution()
    for seconds in (0.0, 0.001, 0.0011, 0.3, 500.0, 501.0):
        spread.add(seconds)
    found = spread.distribution()
    assert found.count == 6
    assert found.seconds == pytest.approx(1001.3021)
    assert found.up_to[0.001] == 2
    assert found.up_to[0.0025] == 3
    assert found.up_to[0.25] == 3
    assert found.up_to[0.5] == 4
    assert found.up_to[500.0] == 5
    assert list(found.up_to) == sorted(found.up_to)
