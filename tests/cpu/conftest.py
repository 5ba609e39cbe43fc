"""Tests here mean TIDE unless they say otherwise: what plan: auto chooses depends on the machine.

And what they calibrate is not kept among the user's calibrations.
"""

import os
from collections.abc import Iterator
from unittest import mock

import pytest


@pytest.fixture(scope="module", autouse=True)
def plan_tide() -> Iterator[None]:
    """For this process and all that it starts."""
    if "TIDE_PLAN" in os.environ:
        yield
        return
    with mock.patch.dict(os.environ, {"TIDE_PLAN": "tide"}):
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For this process and all that it starts."""
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}):
        yield
