# SPDX-License-Identifier: Apache-2.0
"""Checks that the framework of an adapter is installed, in a version that the adapter was tested with."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

__all__ = ["require"]


def require(framework: str, tested: str) -> None:
    """Check the version of a framework before it is imported; warn if that was not tested.

    Args:
        framework: Name of the framework's package, and of the extra that installs it.
        tested: Beginning of the tested versions, such as ``"0.19"``.

    Raises ImportError: the framework is not installed; the text names the command that installs it.
    """
    try:
        found = version(framework)
    except PackageNotFoundError:
        raise ImportError(
            f'{framework} is not installed: pip install "pccheck-async[{framework}]"', name=framework
        ) from None
    if not found.startswith(f"{tested}."):
        warnings.warn(
            f"{framework} {found} is installed; pccheck_async.integrations.{framework} was tested with {tested}.x",
            stacklevel=3,
        )
