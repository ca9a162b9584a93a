"""The goodput model, on small tables, and where they are there on what PCcheck's artifact recorded."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from examples.paper.__main__ import app
from examples.paper.lab.goodput import (
    COUNTINGS,
    Case,
    Run,
    Trace,
    count_failures,
    goodput,
    poisson_failures,
    predict,
    read_trace,
    redo_seconds,
)
from examples.paper.lab.table import COLUMNS, Row, TableError, read_rows, write_rows

CASES: tuple[Case, ...] = ("average", "worst")
METHODS = ("ideal", "gpm", "torch_save", "checkfreq", "gemini", "pccheck")
runner = CliRunner()


def row(method: str, x: float, value: float, **others: object) -> Row:
    fields: dict[str, object] = {"figure": "8", "method": method, "x": x, "value": value, "unit": "steps/s"} | others
    return Row(**fields)  # type: ignore[arg-type]


# -- the table


def test_a_table_comes_back_bit_for_bit(tmp_path: Path) -> None:
    rows = [
        row("none", 0, 0.1 + 0.2),
        row("pccheck", 10, 1 / 3, workload='a "quoted", name', series="N=2", repetition=4, floor=math.pi),
        row("pccheck", 10, 5e-324, workload='a "quoted", name', series="N=2", repetition=5),
    ]
    write_rows(tmp_path / "table.csv", rows)
    assert read_rows(tmp_path / "table.csv") == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the columns are"),
        ("figure,method\n", "the columns are"),
        ("8,,pccheck,,10,0,1.0\n", "7 cells"),
        ("8,,pccheck,,ten,0,1.0,steps/s,\n", "line 2: x is a number, not 'ten'"),
        ("8,,pccheck,,nan,0,1.0,steps/s,\n", "line 2: x is a finite number"),
        ("8,,pccheck,,10,0.5,1.0,steps/s,\n", "repetition is a whole number"),
        ("8,,pccheck,,10,-1,1.0,steps/s,\n", "repetition counts from 0"),
        ("8,,pccheck,,10,0,-1.0,steps/s,\n", "value is a finite number that is not negative"),
        ("8,,pccheck,,10,0,inf,steps/s,\n", "value is a finite number"),
        ("8,,pccheck,,10,0,1.0,steps/s,nan\n", "floor is a finite number"),
        ("8,,,,10,0,1.0,steps/s,\n", "method is empty"),
        ("8,,pc\x1b[31mcheck,,10,0,1.0,steps/s,\n", "control character"),
        ("8,,pccheck,,10,0,1.0,steps/s,\n8,,gpm,,10,0,1.0,ms,\n", "line 3: figure 8 is in 'steps/s', this row in 'ms'"),
        ("8,,pccheck,,10,0,1.0,s,\n8,,pccheck,,10.0,0,2.0,s,\n", "line 3: the same measurement and repetition as in"),
    ],
)
def test_what_is_no_table(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    heading = "" if not text or text.startswith("figure") else ",".join(COLUMNS) + "\n"
    path.write_text(heading + text)
    with pytest.raises(TableError, match=r"table\.csv") as caught:
        read_rows(path)
    assert message in str(caught.value)


def test_contradicting_rows_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="row 2"):
        write_rows(tmp_path / "table.csv", [row("none", 0, 1.0), row("none", 0, 2.0)])
    assert not (tmp_path / "table.csv").exists()


# -- traces and failures


def test_failures_are_counted_in_whole_machines() -> None:
    trace = Trace([0, 60, 120, 180, 240, 300, 360], [9, 8, 8, 0, 3, 7, 6])
    assert count_failures(trace, "changes") == 2 + 0 + 0 + 2 + 0 + 1 + 0
    assert count_failures(trace, "drops") == 2
    assert count_failures(trace, "events") == 1
    assert count_failures(trace, "drops", per_machine=1) == 1 + 8 + 1
    assert count_failures(trace, "events", per_machine=1) == 3
    assert count_failures(trace, "changes", per_machine=1) == 9 + 1 + 8 + 3 + 4 + 1
    assert trace.seconds == 360


@pytest.mark.slow
@given(st.lists(st.integers(0, 60), min_size=2, max_size=50), st.integers(1, 8))
def test_countings_are_ordered(available: list[int], per_machine: int) -> None:
    trace = Trace(list(range(len(available))), available)
    changes, drops, events = (count_failures(trace, counting, per_machine=per_machine) for counting in COUNTINGS)
    assert 0 <= events <= drops <= changes
    assert (events == 0) == (drops == 0)


def test_a_trace_is_read_by_its_heading(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("Zone,Time,Machines\na,1.5,4\nb,2.5,0\n")
    assert read_trace(path) == Trace([1.5, 2.5], [4, 0])
    for bad, where in (
        ("Time\n1\n2\n", "no column 'Time'"),
        ("Time,GPUs\n1,2\n", "at least two"),
        ("Time,GPUs\n1,2\n1,3\n", "line 3"),
        ("Time,GPUs\n1,2\n2,-3\n", "line 3"),
        ("Time,GPUs\n1,2\n2,many\n", "line 3"),
        ("Time,GPUs\n1,2\nnan,2\n", "line 3"),
        ("", "no column 'Time'"),
    ):
        path.write_text(bad)
        with pytest.raises(TableError, match=where):
            read_trace(path)


def test_poisson_failures() -> None:
    times = poisson_failures(100.0, 1_000_000.0, seed=7)
    assert times == poisson_failures(100.0, 1_000_000.0, seed=7)
    assert times != poisson_failures(100.0, 1_000_000.0, seed=8)
    assert list(times) == sorted(times)
    assert 0 < times[0] < times[-1] < 1_000_000
    # 10,000 expected, their standard deviation 100; the waiting times are exponential: deviation equal to the mean.
    assert abs(len(times) - 10_000) < 400
    waits = [after - before for before, after in zip((0.0, *times), times, strict=False)]
    mean = sum(waits) / len(waits)
    assert math.sqrt(sum((wait - mean) ** 2 for wait in waits) / len(waits)) == pytest.approx(mean, rel=0.05)
    assert poisson_failures(1e12, 1.0, seed=0) == ()


# -- the model

seconds = st.floats(1e-3, 1e4)
counts = st.integers(0, 1000)


def test_what_a_failure_costs() -> None:
    def costs(method: str, case: Case, durable: float = math.inf) -> float:
        return redo_seconds(
            method,
            case,
            interval=10,
            step_seconds=0.5,
            load_seconds=3.0,
            durable_seconds=durable,
            max_in_flight=4,
        )

    assert [costs(method, "average") for method in METHODS] == [5.5, 5.5, 5.5, 8.0, 8.0, 15.5]
    assert [costs(method, "worst") for method in METHODS] == [8.0, 8.0, 8.0, 13.0, 13.0, 28.0]
    assert costs("pccheck", "worst", 7.0) == 3 + 5 + 7
    assert costs("pccheck", "average", 7.0) == 3 + 2.5 + 3.5
    with pytest.raises(ValueError, match=r"'savez'.*it knows"):
        costs("savez", "average")


@given(st.sampled_from(METHODS), st.integers(0, 1000), seconds, seconds, seconds, st.integers(1, 8))
def test_what_a_failure_costs_at_least_and_at_most(
    method: str, interval: int, step: float, load: float, durable: float, in_flight: int
) -> None:
    def costs(method: str, case: Case, durable: float = durable) -> float:
        return redo_seconds(
            method,
            case,
            interval=interval,
            step_seconds=step,
            load_seconds=load,
            durable_seconds=durable,
            max_in_flight=in_flight,
        )

    average, worst = costs(method, "average"), costs(method, "worst")
    assert load <= average <= worst
    assert worst - load == pytest.approx(2 * (average - load), abs=1e-9 * (load + worst))
    assert costs("ideal", "average") <= average
    assert worst <= costs("pccheck", "worst", math.inf) or method != "pccheck"
    assert worst <= load + (1 + in_flight) * interval * step * (1 + 1e-12) or method != "pccheck"


@pytest.mark.slow
@given(seconds, counts, seconds, seconds, counts, seconds)
def test_goodput_falls_with_failures_and_redo(
    total: float, failures: int, redo: float, step: float, more: int, longer: float
) -> None:
    def of(failures: int, redo: float, step: float = step) -> float:
        return goodput(seconds=total, failures=failures, redo_seconds=redo, step_seconds=step)

    value = of(failures, redo)
    assert 0 <= value <= 1 / step * (1 + 1e-12)
    assert of(0, redo) == pytest.approx(1 / step)
    assert of(failures + more, redo) <= value
    assert of(failures, redo + longer) <= value
    assert of(failures, redo, step + longer) <= value
    assert (value == 0) == (redo * failures >= total)


def test_goodput_of_nothing() -> None:
    for bad in ({"seconds": 0.0}, {"step_seconds": 0.0}):
        with pytest.raises(ValueError, match="positive"):
            goodput(**{"seconds": 1.0, "failures": 0, "redo_seconds": 1.0, "step_seconds": 1.0} | bad)  # type: ignore[arg-type]


def test_prediction_of_a_small_table() -> None:
    rows = [
        row("none", 0, 9.0, repetition=0),
        row("none", 0, 10.0, repetition=1),
        row("none", 0, 30.0, repetition=2),
        row("checkfreq", 10, 5.0),
        row("savez", 10, 5.0),  # no rule: left out
        row("checkfreq", 10, 99.0, figure="11"),  # of another figure
    ]
    run = Run("drops", 1000.0, (10, 20))
    found = {(r.method, r.x, r.repetition): r for r in predict(rows, run, "average", load_seconds=4.0)}
    assert set(found) == {(m, x, n) for m, x in (("checkfreq", 10), ("ideal", 0), ("ideal", 10)) for n in (0, 1)}
    assert found["checkfreq", 10, 0].value == pytest.approx((1000 - 10 * (4 + 10 * 0.1)) / 1000 * 5)
    assert found["checkfreq", 10, 1].value == pytest.approx((1000 - 20 * (4 + 10 * 0.1)) / 1000 * 5)
    assert found["ideal", 10, 0].value == pytest.approx((1000 - 10 * (4 + 0.5)) / 1000 * 10)
    assert {(r.figure, r.series, r.unit) for r in found.values()} == {("9", "drops, average", "steps/s")}


def test_prediction_needs_a_step_time() -> None:
    with pytest.raises(TableError, match="no rows of figure 8"):
        predict([row("none", 0, 1.0, figure="11")], Run("drops", 1.0, (1,)), "average", load_seconds=1.0)
    with pytest.raises(TableError, match="step time"):
        predict([row("gpm", 10, 1.0)], Run("drops", 1.0, (1,)), "average", load_seconds=1.0)


@pytest.mark.slow
@given(st.floats(0.1, 100), st.lists(st.floats(0.01, 1), min_size=3, max_size=3), counts, st.sampled_from(CASES))
def test_nothing_is_better_than_the_ideal(plain: float, shares: list[float], failures: int, case: Case) -> None:
    assume(failures > 0)
    rows = [row("none", 0, plain)]
    rows += [row(m, 10, plain * share) for m, share in zip(("gpm", "checkfreq", "pccheck"), shares, strict=True)]
    predicted = predict(rows, Run("drops", 3600.0, (failures,)), case, load_seconds=1.0, max_in_flight=2)
    ideal = next(r.value for r in predicted if r.method == "ideal" and r.x == 10)
    assert all(r.value <= ideal * (1 + 1e-12) for r in predicted if r.x == 10)


# -- what the artifact recorded

FIGURE_8, FIGURE_9, TRACE = "pccheck_fig8_vgg16.csv", "pccheck_fig9_vgg16.csv", "spot_gpus_trace.csv"
NAMES = {"CheckFreq": "checkfreq", "GPM": "gpm", "PCcheck": "pccheck_published", "Ideal": "ideal"}
IN_FLIGHT = 4
DURABLE = {25.0: 3.4304383993148804, 50.0: 2.0806734561920166}
"""The last average that the artifact's logs of these two runs print (vgg16/log_vgg16_pccheck_{25,50}.txt)."""


@pytest.fixture
def recorded() -> Path:
    folder = os.environ.get("PCCHECK_RECORDED_DATA")
    if not folder:
        pytest.skip("PCCHECK_RECORDED_DATA does not say where PCcheck's recorded data is")
    return Path(folder)


def published(path: Path) -> dict[tuple[str, float], float]:
    with path.open(newline="") as file:
        heading, *lines = csv.reader(file)
    return {
        (NAMES[name], float(interval)): float(cell)
        for name, *cells in lines
        for interval, cell in zip(heading[1:], cells, strict=True)
    }


def load_seconds(seconds: float, failures: int, throughput: float, goodput: float) -> float:
    """Solve the model for the load time at interval 0, where it is all that a failure costs. Nobody recorded it."""
    return (1 - goodput / throughput) * seconds / failures


def test_the_artifact_counts_51_failures_and_half_are_none(recorded: Path) -> None:
    trace = read_trace(recorded / TRACE)
    assert len(trace.times) == 215
    assert trace.seconds == 13482.0
    assert {counting: count_failures(trace, counting) for counting in COUNTINGS} == {
        "changes": 51,
        "drops": 25,
        "events": 10,
    }


def test_figure_9_follows_from_figure_8(recorded: Path) -> None:
    """All 16 values to 1e-9: one of them fixes the load time, two need Tw, and 13 are determined by figure 8 alone."""
    trace = read_trace(recorded / TRACE)
    failures = count_failures(trace, "changes")
    throughput, expected = published(recorded / FIGURE_8), published(recorded / FIGURE_9)
    rows = [row(method, interval, value) for (method, interval), value in throughput.items()]
    load = load_seconds(trace.seconds, failures, throughput["gpm", 0.0], expected["gpm", 0.0])
    assert load == pytest.approx(0.8778, abs=5e-5)
    run = Run("changes", trace.seconds, (failures,))

    def predicted(durable: float | dict[float, float]) -> dict[tuple[str, float], float]:
        return {
            (r.method, r.x): r.value
            for r in predict(rows, run, "average", load_seconds=load, durable_seconds=durable, max_in_flight=IN_FLIGHT)
        }

    assert predicted(DURABLE) == pytest.approx(expected, rel=1e-9)
    # Without Tw the model says these two lie between nothing unfinished and N f t of it; all others stay the same.
    slow, quick = predicted(math.inf), predicted(0.0)
    for key, value in expected.items():
        if key in (("pccheck_published", 25.0), ("pccheck_published", 50.0)):
            assert slow[key] < value < quick[key]
        else:
            assert slow[key] == pytest.approx(value, rel=1e-9)


# -- the command


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    table, trace = tmp_path / "figure8.csv", tmp_path / "trace.csv"
    write_rows(table, [row("none", 0, 10.0), row("checkfreq", 10, 5.0), row("pccheck", 10, 9.0)])
    trace.write_text("index,Time,GPUs\n0,0,8\n1,500,4\n2,1000,0\n")
    return table, trace


def test_goodput_of_a_trace_on_the_command_line(small: tuple[Path, Path], tmp_path: Path) -> None:
    table, trace = small
    out = tmp_path / "figure9.csv"
    result = runner.invoke(app, ["goodput", str(table), f"--trace={trace}", "--load-seconds=4", f"--out={out}"])
    assert result.exit_code == 0, result.output
    rows = read_rows(out)
    value = {(r.method, r.series): r.value for r in rows if r.x == 10}
    assert set(value) == {
        (method, f"{counting}, {case}")
        for method in ("checkfreq", "pccheck", "ideal")
        for counting in COUNTINGS
        for case in CASES
    }
    assert value["checkfreq", "drops, average"] == pytest.approx((1000 - 2 * 5) / 1000 * 5)
    assert value["checkfreq", "changes, worst"] == pytest.approx((1000 - 4 * 6) / 1000 * 5)
    assert "4.95" in result.stdout


def test_goodput_with_drawn_failures(small: tuple[Path, Path], tmp_path: Path) -> None:
    table, _ = small
    out = tmp_path / "figure9.csv"
    arguments = ["goodput", str(table), "--mtbf=600", "--hours=10", "--seeds=20", "--load-seconds=4"]
    result = runner.invoke(app, [*arguments, f"--out={out}"])
    assert result.exit_code == 0, result.output
    values = [r.value for r in read_rows(out) if r.method == "checkfreq" and r.series.endswith("average")]
    assert len(values) == 20
    assert len(set(values)) > 3
    # 60 failures expected, their standard deviation 7.7; in the mean of 20 it is 1.7.
    assert sum(values) / 20 == pytest.approx((36000 - 60 * 5) / 36000 * 5, abs=5 * 4 * 1.8 / 36000 * 5)
    again = runner.invoke(app, arguments).stdout
    assert result.stdout.startswith(again)
    assert "MTBF 600 s, worst" in again


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ([], 2),
        (["--load-seconds=1"], 2),
        (["--trace=TRACE"], 2),
        (["--trace=TRACE", "--mtbf=5", "--load-seconds=1"], 2),
        (["--trace=TRACE", "--load-seconds=1", "--durable-seconds=soon"], 2),
        (["--trace=TRACE", "--load-seconds=1", "--durable-seconds=10=soon"], 2),
        (["--trace=TABLE", "--load-seconds=1"], 1),
        (["--trace=missing", "--load-seconds=1"], 1),
        (["--trace=TRACE", "--load-seconds=1", "--durable-seconds=1", "--durable-seconds=10=2"], 0),
    ],
)
def test_goodput_exit_status(small: tuple[Path, Path], arguments: list[str], status: int) -> None:
    table, trace = small
    given = [each.replace("TRACE", str(trace)).replace("TABLE", str(table)) for each in arguments]
    result = runner.invoke(app, ["goodput", str(table), *given])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
