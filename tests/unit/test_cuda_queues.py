"""CUDA_DEVICE_MAX_CONNECTIONS: asked for in time, never overruled, and missed in words."""

from __future__ import annotations

import os

import pytest
import torch

from tide_strategies.runtime.cuda import queues


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(queues.VARIABLE, "")
    monkeypatch.delenv(queues.VARIABLE)


def test_queues_are_requested_before_cuda_starts() -> None:
    queues.request_queues()
    assert os.environ[queues.VARIABLE] == "32"
    assert queues.missing_queues() is None


def test_what_the_user_said_stands_and_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(queues.VARIABLE, "1")
    queues.request_queues()
    assert queues.missing_queues() == "CUDA_DEVICE_MAX_CONNECTIONS is 1; it must be 32 before CUDA starts"


def test_once_cuda_has_started_it_is_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    queues.request_queues()
    assert "is not set" in str(queues.missing_queues())


def test_making_a_lightning_strategy_requests_them() -> None:
    from tide_strategies.integrations.lightning import TideFSDPStrategy

    TideFSDPStrategy()
    assert os.environ[queues.VARIABLE] == "32"
