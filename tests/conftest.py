from __future__ import annotations

import os

import pytest

RETURNING = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Settings of glibc by which the workers give freed memory back, and keep the rest in huge pages: each of their
thousands of forks copies the tables of all that they hold, which was a fifth of the time of the suite."""


def pytest_configure(config: pytest.Config) -> None:
    # The controller of pytest-xdist runs no test, and starts the others after this: importing torch takes seconds.
    controller = config.getoption("dist") != "no" and config.getoption("tx") and not config.option.collectonly
    if controller:
        os.environ.update(RETURNING)
    else:
        config.pluginmanager.import_plugin("tests.fixtures")


os.environ.pop("COLUMNS", None)  # of pytest-xdist's workers; what commands print into a pipe would be so narrow
