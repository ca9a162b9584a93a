from __future__ import annotations

import importlib

import pytest


@pytest.fixture(scope="session")
def dynamo() -> None:
    """Import what every rank would import by itself as soon as it shards something, for two seconds each."""
    importlib.import_module("torch._dynamo")
