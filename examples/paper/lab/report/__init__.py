"""One page of what the experiments found: :func:`write_report` makes it of the folder that ``run`` wrote."""

from examples.paper.lab.report.page import write_report

__all__ = ["write_report"]
