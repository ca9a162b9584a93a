"""One page of what the experiments found: :func:`write_report` makes it of what ``pccheck bench run`` left."""

from pccheck_async.bench.report.page import write_report

__all__ = ["write_report"]
