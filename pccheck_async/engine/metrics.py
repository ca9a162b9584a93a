"""Statistics of engines for monitoring: OpenMetrics text, a collector for prometheus_client, flat numbers for loggers.

Names and units follow OpenMetrics 1.0: base units (seconds, bytes) as the last part of the name, counters end in
``_total``, histograms in ``_bucket``, ``_count`` and ``_sum``. Every sample has the label ``store``.

================================  =========  =========================================================================
``pccheck_``...                   type       what, and labels
================================  =========  =========================================================================
``checkpoints``                   counter    that ended, or whose calls were skipped, by ``result``: durable,
                                             superseded, failed, skipped
``checkpoints_admitted``          counter    that were given a number
``checkpoints_abandoned``         counter    of the failed ones, because they held training up for ``max_stall``
``checkpoints_in_flight``         gauge      admitted and not ended
``durable_bytes``                 counter    of all that committed
``latest_step``                   gauge      of the newest durable checkpoint, where there is one
``latest_bytes``                  gauge      its size
``latest_timestamp_seconds``      gauge      when it was captured, in seconds since the epoch
``save_seconds``                  histogram  from admission to durable
``capture_seconds``               histogram  from admission until captured
``stall_seconds``                 histogram  that training was kept waiting, by ``where``: checkpoint, optimizer
``state_seconds``                 counter    that ``state_dict()`` and laying out the state took
``guard_fences``                  counter    captures that GPUs waited for instead of the training thread
``stage_operations``              counter    by ``stage``: capture, write, flush, commit, read, restore
``stage_bytes``                   counter    moved, by ``stage``
``stage_seconds``                 counter    summed over concurrent operations, by ``stage``
``pool_bytes``                    gauge      staging memory that was ever used
``pool_in_use_bytes``             gauge      that is in use
``pool_limit_bytes``              gauge      that may be used
``pool_waits``                    counter    chunks that waited for a staging buffer
``device_bytes``                  gauge      GPU memory that the engine holds
``device_peak_bytes``             gauge      the most it ever held
``device_snapshots``              counter    captures that copied the state on its GPU first
``slots``                         gauge      on storage
``slots_bytes``                   gauge      theirs
``plan_lookups``                  counter    saves by ``result``: hit (structure of the save before), miss
``interval_steps``                gauge      between checkpoints, where the policy has decided
``interval_seconds``              gauge      between checkpoints, where known
``events_dropped``                counter    that a slow hook did not get
``engine``                        info       ``io``, ``loop``
================================  =========  =========================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pccheck_async.engine.statistics import Distribution, EngineStatistics
from pccheck_async.errors import ClosedError

__all__ = ["CONTENT_TYPE", "EngineCollector", "Family", "Sample", "families", "openmetrics", "scalars"]

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
"""Of :func:`openmetrics`, for an HTTP response."""

_RESULTS = ("durable", "superseded", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Sample:
    """One number: what comes after its family's name, its labels, and the value."""

    suffix: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Family:
    """Samples of one metric."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    unit: Literal["seconds", "bytes", ""] = ""
    samples: list[Sample] = field(default_factory=list)


class _Source(Protocol):
    """An engine."""

    @property
    def path(self) -> str: ...

    def statistics(self) -> EngineStatistics: ...


def families(statistics: Mapping[str, EngineStatistics]) -> list[Family]:
    """Return all metrics of some engines, by the paths of their stores."""
    found: dict[str, Family] = {}
    for store, each in statistics.items():
        for family in _families(each, {"store": store}):
            found.setdefault(family.name, Family(family.name, family.kind, family.help, family.unit)).samples.extend(
                family.samples
            )
    return list(found.values())


def openmetrics(statistics: Mapping[str, EngineStatistics]) -> str:
    """Return an exposition of some engines, by the paths of their stores, in the text format of OpenMetrics."""
    return "".join(_lines(families(statistics)))


def scalars(statistics: EngineStatistics) -> dict[str, float]:
    """Return the numbers of one engine by name, for TensorBoard, Weights & Biases and the like.

    Counts and sums are of all the time so far. What is not known yet is left out.
    """
    values: dict[str, float | None] = {name: getattr(statistics, name) for name in _SCALARS}
    saves, captures = statistics.save_seconds, statistics.capture_seconds
    values |= {
        "mean_save_seconds": saves.seconds / saves.count if saves.count else None,
        "mean_capture_seconds": captures.seconds / captures.count if captures.count else None,
        "latest_step": statistics.latest.step if statistics.latest else None,
        "interval_steps": statistics.interval.interval,
        "interval_seconds": statistics.interval.seconds,
    }
    for name, stage in statistics.stages.items():
        values[f"{name}_count"] = stage.count
        values[f"{name}_bytes"] = stage.nbytes
        values[f"{name}_seconds"] = stage.seconds
    return {f"checkpoint/{name}": float(value) for name, value in values.items() if value is not None}


_SCALARS = (
    *("admitted", "durable", "superseded", "failed", "skipped", "abandoned", "in_flight", "durable_bytes"),
    *("stall_seconds", "guard_seconds", "guard_fences", "last_stall_seconds", "state_seconds"),
    *("pool_bytes", "pool_in_use_bytes", "pool_waits", "device_bytes", "device_peak_bytes", "snapshots"),
    *("slots", "slot_bytes", "plan_hits", "plan_misses", "events_dropped"),
)


class EngineCollector:
    """The metrics of engines for prometheus_client, which has to be installed: ``REGISTRY.register(...)`` takes this.

    An engine that was not opened yet has no metrics.

    Args:
        engines: Asynchronous or synchronous ones, of different stores.
    """

    def __init__(self, *engines: _Source) -> None:
        self._engines = engines

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of now; may be called from any thread."""
        from prometheus_client.metrics_core import Metric

        statistics = {}
        for engine in self._engines:
            try:
                statistics[engine.path] = engine.statistics()
            except ClosedError:
                continue
        for family in families(statistics):
            metric = Metric(family.name, family.help, family.kind, family.unit)
            for sample in family.samples:
                metric.add_sample(family.name + sample.suffix, dict(sample.labels), sample.value)
            yield metric

    def describe(self) -> list[Any]:
        """Name nothing: metrics depend on which engines are open."""
        return []


def _families(statistics: EngineStatistics, labels: dict[str, str]) -> Iterator[Family]:
    def counter(name: str, text: str, value: float | None, unit: Literal["seconds", "bytes", ""] = "") -> Family:
        return Family(name, "counter", text, unit, [] if value is None else [Sample("_total", labels, value)])

    def gauge(name: str, text: str, value: float | None, unit: Literal["seconds", "bytes", ""] = "") -> Family:
        return Family(name, "gauge", text, unit, [] if value is None else [Sample("", labels, value)])

    def histogram(name: str, text: str, by: Mapping[str, Distribution], label: str = "") -> Family:
        samples = [
            sample
            for value, each in by.items()
            for sample in _histogram(each, labels | ({label: value} if label else {}))
        ]
        return Family(name, "histogram", text, "seconds", samples)

    def by(name: str, text: str, label: str, values: Iterable[tuple[str, float]], unit: Any = "") -> Family:
        samples = [Sample("_total", labels | {label: value}, number) for value, number in values]
        return Family(name, "counter", text, unit, samples)

    s, latest, stages = statistics, statistics.latest, statistics.stages
    results = [(name, getattr(s, name)) for name in _RESULTS]
    yield by("pccheck_checkpoints", "Checkpoints that ended, or were skipped, by result.", "result", results)
    yield counter("pccheck_checkpoints_admitted", "Checkpoints that were given a number.", s.admitted)
    yield counter("pccheck_checkpoints_abandoned", "Failed ones that had held training up too long.", s.abandoned)
    yield gauge("pccheck_checkpoints_in_flight", "Checkpoints admitted and not ended.", s.in_flight)
    yield counter("pccheck_durable_bytes", "Bytes of all checkpoints that committed.", s.durable_bytes, "bytes")
    if latest is not None:
        yield gauge("pccheck_latest_step", "Step of the newest durable checkpoint.", latest.step)
        yield gauge("pccheck_latest_bytes", "Size of the newest durable checkpoint.", latest.nbytes, "bytes")
        yield gauge("pccheck_latest_timestamp_seconds", "When it was captured.", latest.time, "seconds")
    yield histogram("pccheck_save_seconds", "From admission to durable.", {"": s.save_seconds})
    yield histogram("pccheck_capture_seconds", "From admission until captured.", {"": s.capture_seconds})
    yield histogram("pccheck_stall_seconds", "What training was kept waiting, each time.", s.stalls, "where")
    yield counter("pccheck_state_seconds", "Time that laying out the state took.", s.state_seconds, "seconds")
    yield counter("pccheck_guard_fences", "Captures that GPUs waited for, not the training thread.", s.guard_fences)
    counts = [(name, float(stage.count)) for name, stage in stages.items()]
    nbytes = [(name, float(stage.nbytes)) for name, stage in stages.items()]
    seconds = [(name, stage.seconds) for name, stage in stages.items()]
    yield by("pccheck_stage_operations", "Operations of the stages.", "stage", counts)
    yield by("pccheck_stage_bytes", "Bytes that the stages moved.", "stage", nbytes, "bytes")
    yield by("pccheck_stage_seconds", "Time summed over concurrent operations.", "stage", seconds, "seconds")
    yield gauge("pccheck_pool_bytes", "Staging memory that was ever used.", s.pool_bytes, "bytes")
    yield gauge("pccheck_pool_in_use_bytes", "Staging memory in use.", s.pool_in_use_bytes, "bytes")
    yield gauge("pccheck_pool_limit_bytes", "Staging memory that may be used.", s.decisions.host_memory, "bytes")
    yield counter("pccheck_pool_waits", "Chunks that waited for a staging buffer.", s.pool_waits)
    yield gauge("pccheck_device_bytes", "GPU memory that the engine holds.", s.device_bytes, "bytes")
    yield gauge("pccheck_device_peak_bytes", "The most GPU memory it ever held.", s.device_peak_bytes, "bytes")
    yield counter("pccheck_device_snapshots", "Captures that copied the state on its GPU first.", s.snapshots)
    yield gauge("pccheck_slots", "Slots on storage.", s.slots)
    yield gauge("pccheck_slots_bytes", "Bytes of the slots.", s.slot_bytes, "bytes")
    lookups = [("hit", s.plan_hits), ("miss", s.plan_misses)]
    yield by("pccheck_plan_lookups", "Saves whose plan was known from the save before, or not.", "result", lookups)
    if s.interval.interval is not None:
        yield gauge("pccheck_interval_steps", "Steps between checkpoints.", s.interval.interval)
    if s.interval.seconds is not None:
        yield gauge("pccheck_interval_seconds", "Time between checkpoints.", s.interval.seconds, "seconds")
    yield counter("pccheck_events_dropped", "Events that a slow hook did not get.", s.events_dropped)
    about = labels | {"io": s.io, "loop": s.loop}
    yield Family("pccheck_engine", "info", "How the engine works.", "", [Sample("_info", about, 1)])


def _histogram(times: Distribution, labels: dict[str, str]) -> Iterator[Sample]:
    for bound, count in times.up_to.items():
        yield Sample("_bucket", labels | {"le": _number(bound)}, count)
    yield Sample("_bucket", labels | {"le": "+Inf"}, times.count)
    yield Sample("_count", labels, times.count)
    yield Sample("_sum", labels, times.seconds)


def _lines(metrics: Iterable[Family]) -> Iterator[str]:
    for family in metrics:
        yield f"# TYPE {family.name} {family.kind}\n"
        if family.unit:
            yield f"# UNIT {family.name} {family.unit}\n"
        yield f"# HELP {family.name} {_escaped(family.help)}\n"
        for sample in family.samples:
            labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sample.labels.items())
            yield f"{family.name}{sample.suffix}{{{labels}}} {_number(sample.value)}\n"
    yield "# EOF\n"


def _number(value: float) -> str:
    return repr(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
