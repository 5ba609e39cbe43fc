"""Write sharded checkpoints, at once or in the background, so that a folder with its index is always whole."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from tide_strategies.errors import TideTimeoutError
from tide_strategies.integrations.lightning.checkpoint import METADATA_FILE


class ShardedWriter:
    """Writes one checkpoint at a time; one in the background is waited for by the next.

    The index (``meta.pt``) comes when the parts of all ranks are on disk, and an old one goes before: a folder without
    it is no checkpoint.

    Args:
        timeout: of the process group for writes in the background, and of :meth:`wait`.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout
        self._group: dist.ProcessGroup | None = None
        self._pending: Future[None] | None = None
        self._path: Path | None = None
        self._afterwards: list[Callable[[], None]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._timeout,)  # threads and groups belong to this process

    def write(self, parts: dict[str, Any], rest: dict[str, Any], path: Path, *, background: bool) -> None:
        """Write ``parts``, of which each rank has its own, and rank 0's ``rest`` into a folder; a collective call.

        In the background, what is written are the values at the time of the call.

        Raises:
            Exception: whatever kept this write, or one in the background before it, from being done.
        """
        self.wait()
        if path.is_file():
            path.unlink(missing_ok=True)
        path.mkdir(parents=True, exist_ok=True)
        index = None
        if dist.get_rank() == 0:
            (path / METADATA_FILE).unlink(missing_ok=True)
            index = io.BytesIO()
            torch.save(rest, index)
        if not background:
            _write(parts, path, index, None)
            return
        if self._group is None:
            # Its own: collectives of the write must not mix with those of training, and are on CPU tensors.
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        parts = apply_to_collection(parts, Tensor, _copy)
        self._path, self._pending = path, Future()
        # No executor's: those are joined when the interpreter ends, however long a file system does not answer.
        arguments = (self._pending, parts, path, index, self._group)
        threading.Thread(target=_write_later, args=arguments, name="tide-checkpoint", daemon=True).start()

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do something now, or when the checkpoint that is being written is known to be whole; not if it fails."""
        if self._pending is None:
            action()
        else:
            self._afterwards.append(action)

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
            TideTimeoutError: if the write in the background does not end in time.
            Exception: if it failed; said once.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        actions, self._afterwards = self._afterwards, []
        try:
            pending.result(self._timeout.total_seconds())
        except FutureTimeoutError:
            if pending.done():  # the write's own error
                raise
            raise TideTimeoutError(
                f"the checkpoint {str(self._path)!r} is still being written after "
                f"{self._timeout.total_seconds():g} s; is its file system reachable? timeout= of the strategy sets "
                f"how long to wait"
            ) from None
        for action in actions:
            action()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)  # averages come from the device, the rest is on the CPU already


def _write(parts: dict[str, Any], path: Path, index: io.BytesIO | None, group: dist.ProcessGroup | None) -> None:
    save(parts, checkpoint_id=path, process_group=group)
    if index is not None:
        unfinished = path / f"{METADATA_FILE}.part"
        unfinished.write_bytes(index.getbuffer())
        os.replace(unfinished, path / METADATA_FILE)


def _write_later(done: Future[None], *arguments: Any) -> None:
    try:
        _write(*arguments)
    except BaseException as e:
        done.set_exception(e)
    else:
        done.set_result(None)
