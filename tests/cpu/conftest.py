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


@pytest.fixture(scope="module", autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For this process and all that it starts. A module that has calibrated into it fails here."""
    cache = tmp_path_factory.mktemp("cache")
    with mock.patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}):
        yield
    measured = [p for p in cache.glob("tide_strategies/**/*") if p.is_file()]
    if measured:
        pytest.fail(
            f"{request.module.__name__} calibrated ({measured[0].name}): its paths depend on this machine's speed. "
            "Keep TIDE_PLAN=tide in what it starts; or give it a calibration.cache, and assert nothing about paths"
        )
