# SPDX-License-Identifier: Apache-2.0
"""Statistics of engines for monitoring: OpenMetrics text, a collector for prometheus_client, flat numbers for loggers.

Names and units follow OpenMetrics 1.0: base units (seconds, bytes) as the last part of the name, counters end in
``_total``, histograms in ``_bucket``, ``_count`` and ``_sum``. Names begin with ``pccheck_``, every sample has the
label ``store``. :data:`METRICS` lists all of them; the ``# HELP`` lines of the text are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import chain
from math import inf
from typing import Any, Literal, NamedTuple, Protocol

from pccheck_async.engine.statistics import EngineStatistics
from pccheck_async.errors import ClosedError

__all__ = ["CONTENT_TYPE", "METRICS", "EngineCollector", "Metric", "MetricSample", "families", "openmetrics"]
__all__ += ["scalars"]

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Content type of the text of :func:`openmetrics`, for an HTTP response."""

_PREFIX = "pccheck_"
Kind = Literal["counter", "gauge", "histogram", "info"]


class Metric(NamedTuple):
    """One metric: the origin of its value, and its description.

    Attributes:
        name: Name without the prefix ``pccheck_``.
        kind: Type in OpenMetrics.
        help: Its description.
        read: Returns the value: a number, for a histogram a :class:`Distribution`, for ``info`` a dict of labels; with
            ``label`` a dict of such values by label value; None if it is not known yet.
        label: Name of the label that the metric has beside ``store``; empty if it has none.
    """

    name: str
    kind: Kind
    help: str
    read: Callable[[EngineStatistics], Any]
    label: str = ""

    @property
    def unit(self) -> str:
        """The last part of the name if it is a base unit, else empty."""
        last = self.name.rpartition("_")[2]
        return last if last in ("seconds", "bytes") else ""


def _results(statistics: EngineStatistics) -> dict[str, int]:
    return {name: getattr(statistics, name) for name in ("durable", "superseded", "failed", "skipped")}


def _lookups(statistics: EngineStatistics) -> dict[str, int]:
    return {"hit": statistics.plan_hits, "miss": statistics.plan_misses}


def _memory_interval(statistics: EngineStatistics) -> int | None:
    return None if statistics.memory_interval is None else statistics.memory_interval.interval


def _by_stage(statistics: EngineStatistics, what: str) -> dict[str, float]:
    return {name: getattr(stage, what) for name, stage in statistics.stages.items()}


METRICS = (
    Metric("checkpoints", "counter", "Ended checkpoints and skipped calls, by result.", _results, "result"),
    Metric("checkpoints_admitted", "counter", "Checkpoints that were given a counter.", lambda s: s.admitted),
    Metric("checkpoints_abandoned", "counter", "Failed ones that held training up too long.", lambda s: s.abandoned),
    Metric("checkpoints_in_memory", "counter", "Checkpoints committed in memory.", lambda s: s.in_memory),
    Metric("checkpoints_in_replicas", "counter", "Checkpoints in the memory of other hosts.", lambda s: s.in_replicas),
    Metric("restores_fell_back", "counter", "Restores that passed over damaged ones.", lambda s: s.fell_back),
    Metric("checkpoints_in_flight", "gauge", "Checkpoints admitted and not ended.", lambda s: s.in_flight),
    Metric("durable_bytes", "counter", "Bytes of all checkpoints that committed.", lambda s: s.durable_bytes),
    Metric("latest_step", "gauge", "Step of the newest durable checkpoint.", lambda s: s.latest and s.latest.step),
    Metric("latest_bytes", "gauge", "Size of the newest durable checkpoint.", lambda s: s.latest and s.latest.nbytes),
    Metric("latest_timestamp_seconds", "gauge", "When it was captured.", lambda s: s.latest and s.latest.time),
    Metric("save_seconds", "histogram", "From admission to durable.", lambda s: s.save_seconds),
    Metric("capture_seconds", "histogram", "From admission until captured.", lambda s: s.capture_seconds),
    Metric("stall_seconds", "histogram", "Duration of each wait of training.", lambda s: s.stalls, "where"),
    Metric("state_seconds", "counter", "Time in state_dict() and laying out the state.", lambda s: s.state_seconds),
    Metric("guard_fences", "counter", "Captures that GPUs waited for, not training.", lambda s: s.guard_fences),
    Metric("stage_operations", "counter", "Operations of the stages.", lambda s: _by_stage(s, "count"), "stage"),
    Metric("stage_bytes", "counter", "Bytes that the stages moved.", lambda s: _by_stage(s, "nbytes"), "stage"),
    Metric("stage_seconds", "counter", "Summed over concurrent ones.", lambda s: _by_stage(s, "seconds"), "stage"),
    Metric("pool_bytes", "gauge", "Staging memory that was ever used.", lambda s: s.pool_bytes),
    Metric("pool_in_use_bytes", "gauge", "Staging memory in use.", lambda s: s.pool_in_use_bytes),
    Metric("pool_limit_bytes", "gauge", "Staging memory that may be used.", lambda s: s.decisions.host_memory),
    Metric("pool_waits", "counter", "Chunks that waited for a staging buffer.", lambda s: s.pool_waits),
    Metric("device_bytes", "gauge", "GPU memory that the engine holds.", lambda s: s.device_bytes),
    Metric("device_peak_bytes", "gauge", "The most GPU memory it ever held.", lambda s: s.device_peak_bytes),
    Metric("device_snapshots", "counter", "Captures that copied the state on its GPU first.", lambda s: s.snapshots),
    Metric("slots", "gauge", "Slots on storage.", lambda s: s.slots),
    Metric("slots_bytes", "gauge", "Bytes of the slots.", lambda s: s.slot_bytes),
    Metric("memory_bytes", "gauge", "Bytes of the slots in memory.", lambda s: s.memory_bytes),
    Metric("checkpoints_drained", "counter", "Checkpoints copied to the bucket.", lambda s: s.drained),
    Metric("drained_bytes", "counter", "Bytes sent to the bucket.", lambda s: s.drained_bytes),
    Metric("drain_lag_seconds", "gauge", "How far the bucket is behind.", lambda s: s.drain_lag_seconds),
    Metric("unchanged_bytes", "counter", "Bytes a slot still held, not written.", lambda s: s.unchanged_bytes),
    Metric("plan_lookups", "counter", "Saves by whether the last plan served.", _lookups, "result"),
    Metric("interval_steps", "gauge", "Steps between checkpoints.", lambda s: s.interval.interval),
    Metric("interval_seconds", "gauge", "Time between checkpoints.", lambda s: s.interval.seconds),
    Metric("memory_interval_steps", "gauge", "Steps between checkpoints in memory.", _memory_interval),
    Metric("events_dropped", "counter", "Events that a slow hook did not get.", lambda s: s.events_dropped),
    Metric("engine", "info", "How the engine works.", lambda s: {"io": s.io, "loop": s.loop}),
)
"""All metrics. A metric whose value is not known yet has no sample."""


class MetricSample(NamedTuple):
    """One number: its name, its labels, and the value."""

    name: str
    labels: Mapping[str, str]
    value: float


class _Source(Protocol):
    """An engine."""

    @property
    def path(self) -> str: ...

    def statistics(self) -> EngineStatistics: ...


def families(statistics: Mapping[str, EngineStatistics]) -> Iterator[tuple[Metric, list[MetricSample]]]:
    """Yield each metric that has samples, with them. ``statistics``: those of engines, by paths of their stores."""
    for metric in METRICS:
        found = [_samples(metric, metric.read(each), {"store": store}) for store, each in statistics.items()]
        if samples := [*chain.from_iterable(found)]:
            yield metric, samples


def openmetrics(statistics: Mapping[str, EngineStatistics]) -> str:
    """Return the metrics of engines in OpenMetrics' text format. ``statistics``: by the paths of their stores."""
    return "".join(_lines(families(statistics)))


def scalars(statistics: EngineStatistics) -> dict[str, float]:
    """Return the numbers of one engine by name, for TensorBoard, Weights & Biases and the like.

    Counts and sums cover the time since the engine was opened. Numbers not known yet are left out.
    """
    values: dict[str, Any] = {field.name: getattr(statistics, field.name) for field in fields(statistics)}
    values = {name: value for name, value in values.items() if isinstance(value, int | float)}
    values |= {
        "mean_save_seconds": statistics.save_seconds.mean,
        "mean_capture_seconds": statistics.capture_seconds.mean,
        "latest_step": statistics.latest.step if statistics.latest else None,
        "interval_steps": statistics.interval.interval,
        "interval_seconds": statistics.interval.seconds,
    }
    for name, stage in statistics.stages.items():
        values |= {f"{name}_count": stage.count, f"{name}_bytes": stage.nbytes, f"{name}_seconds": stage.seconds}
    return {f"checkpoint/{name}": float(value) for name, value in values.items() if value is not None}


class EngineCollector:
    """The metrics of engines for prometheus_client, which has to be installed: ``REGISTRY.register(...)`` takes this.

    An engine that was not opened yet has no metrics.

    Args:
        engines: Asynchronous or synchronous engines, of different stores.
    """

    def __init__(self, *engines: _Source) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Any]:
        """Yield the metrics with their present values; may be called from any thread."""
        from prometheus_client import metrics_core

        statistics = {}
        for engine in self._engines:
            try:
                statistics[engine.path] = engine.statistics()
            except ClosedError:
                continue
        for metric, samples in families(statistics):
            family = metrics_core.Metric(_PREFIX + metric.name, metric.help, metric.kind, metric.unit)
            for sample in samples:
                family.add_sample(sample.name, dict(sample.labels), sample.value)
            yield family

    def describe(self) -> list[Any]:
        """Return no metrics: which ones exist depends on the engines that are open."""
        return []


def _samples(metric: Metric, value: Any, labels: dict[str, str]) -> Iterator[MetricSample]:
    name = _PREFIX + metric.name
    if metric.kind == "info":
        yield MetricSample(f"{name}_info", labels | value, 1)
    elif value is not None:
        for label, each in value.items() if metric.label else [("", value)]:
            own = labels | {metric.label: label} if metric.label else labels
            if metric.kind != "histogram":
                yield MetricSample(f"{name}_total" if metric.kind == "counter" else name, own, each)
                continue
            for bound, count in [*each.up_to.items(), (inf, each.count)]:
                yield MetricSample(f"{name}_bucket", own | {"le": _number(bound)}, count)
            yield MetricSample(f"{name}_count", own, each.count)
            yield MetricSample(f"{name}_sum", own, each.seconds)


def _lines(metrics: Iterable[tuple[Metric, list[MetricSample]]]) -> Iterator[str]:
    for metric, samples in metrics:
        name = _PREFIX + metric.name
        yield f"# TYPE {name} {metric.kind}\n"
        if metric.unit:
            yield f"# UNIT {name} {metric.unit}\n"
        yield f"# HELP {name} {_escaped(metric.help)}\n"
        for sample in samples:
            labels = ",".join(f'{label}="{_escaped(value)}"' for label, value in sample.labels.items())
            yield f"{sample.name}{{{labels}}} {_number(sample.value)}\n"
    yield "# EOF\n"


def _number(value: float) -> str:
    return "+Inf" if value == inf else repr(value if isinstance(value, int) else float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
