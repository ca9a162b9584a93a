from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # The controller of pytest-xdist runs no test, and starts the others after this: importing torch takes seconds.
    controller = config.getoption("dist") != "no" and config.getoption("tx") and not config.option.collectonly
    if not controller:
        config.pluginmanager.import_plugin("tests.fixtures")


os.environ.pop("COLUMNS", None)  # of pytest-xdist's workers; what commands print into a pipe would be so narrow
