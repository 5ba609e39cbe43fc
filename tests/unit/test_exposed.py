"""Exposed time on GPUs: read only when the device is through, sampled so that it costs next to nothing."""

from __future__ import annotations

from unittest import mock

import pytest

from tide_strategies.fsdp2 import capture
from tide_strategies.fsdp2.exposed import ExposedMeter, around


class Device:
    """A host clock, a stream clock, and events that have happened once the stream is past them."""

    def __init__(self, record_s: float = 0.0) -> None:
        self.host = self.stream = self.done = 0.0
        self.record_s, self.made, self.recorded = record_s, 0, 0

    def event(self) -> Event:
        self.made += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at = device, -1.0

    def record(self) -> None:
        self.device.recorded += 1
        self.device.host += self.device.record_s
        self.at = self.device.stream

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "nobody may read what has not happened"
        return (end.at - self.at) * 1e3


def backward(meter: ExposedMeter, device: Device, waits: list[float], step_s: float = 1.0) -> None:
    """One forward and backward: each wait holds the stream up, and takes the host no time."""
    for wait in waits:
        with meter.around():
            device.stream += wait
    device.host += step_s
    for _ in range(meter.groups):
        meter.finalized()


def test_nothing_is_recorded_or_asked_during_a_capture() -> None:
    device = Device()
    meter = ExposedMeter(1, device.event, lambda: device.host)
    backward(meter, device, [0.25])
    device.done = device.stream
    with mock.patch.object(capture, "capturing", return_value=True):
        recorded = device.recorded
        backward(meter, device, [0.5])
        assert device.recorded == recorded
        assert meter.stats().sampled == 0, "what has happened is read later"
    assert meter.stats().seconds == 0.25


def test_waits_are_added_up_once_they_are_over() -> None:
    device = Device()
    meter = ExposedMeter(2, device.event, lambda: device.host)
    backward(meter, device, [0.25, 0.5])
    assert (meter.stats().seconds, meter.stats().sampled, meter.stats().backwards) == (0.0, 0, 1)
    device.done = device.stream
    backward(meter, device, [1.0])
    assert meter.stats().seconds == 0.75
    assert meter.stats().sampled == 1
    device.done = device.stream
    assert (meter.stats().seconds, meter.stats().sampled, meter.stats().backwards) == (1.75, 2, 2)
    made = device.made
    backward(meter, device, [1.0])
    assert device.made == made, "events are used again"


def test_recording_stays_below_one_percent() -> None:
    """Ten waits of 20 events at 1 ms are 2% of a second: one backward in four is sampled."""
    device = Device(record_s=1e-3)
    meter = ExposedMeter(1, device.event, lambda: device.host)
    for _ in range(40):
        device.done = device.stream
        backward(meter, device, [0.01] * 10)
    assert device.recorded * 1e-3 / device.host < 0.01
    device.done = device.stream
    stats = meter.stats()
    assert 5 <= stats.sampled <= 10
    assert stats.seconds / stats.sampled == pytest.approx(0.1)
    assert stats.backwards == 40


def test_a_device_that_is_far_behind_is_left_alone() -> None:
    device = Device()
    meter = ExposedMeter(1, device.event, lambda: device.host)
    device.done = -1.0  # nothing happens
    for _ in range(10):
        backward(meter, device, [0.1])
    assert device.recorded == 2 * 4
    device.done = device.stream
    backward(meter, device, [])  # reads, and samples again from the next on
    backward(meter, device, [0.5])
    device.done = device.stream
    assert meter.stats().seconds == pytest.approx(0.1 * 4 + 0.5)


def test_a_wait_that_fails_leaves_no_half_sample() -> None:
    device = Device()
    meter = ExposedMeter(1, device.event, lambda: device.host)
    with pytest.raises(KeyError), meter.around():
        raise KeyError
    backward(meter, device, [0.5])
    device.done = device.stream
    assert meter.stats().seconds == 0.5


def test_cpu_ranks_have_no_meter() -> None:
    with around(None):
        pass
