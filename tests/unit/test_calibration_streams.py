"""Calibration on a GPU runs collectives on a stream of its own: the program's stream is often the default one."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import torch

from tide_strategies.fsdp2 import calibration


def test_collectives_are_timed_on_a_stream_of_their_own(monkeypatch) -> None:
    default, current, seen = SimpleNamespace(cuda_stream=0), [], []
    current.append(default)

    @contextlib.contextmanager
    def stream(one):
        current.append(one)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    call = lambda: seen.append(current[-1].cuda_stream)  # noqa: E731
    monkeypatch.setattr(calibration, "_calls", lambda *_: [call] * 4)
    layout = SimpleNamespace(params=[0], shard_items=lambda p: 1, shard_bytes=lambda p: 2)
    member = SimpleNamespace(group=SimpleNamespace(device=torch.device("cuda")), layout=layout)
    assert calibration._measure(lambda payload: [payload], None, member, 0.1) is not None
    assert len(seen) >= 8
    assert set(seen) == {7}
    assert current == [default]
