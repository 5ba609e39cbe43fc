"""The board on which hosts compare their calls (``runtime/cuda/host_order.py``): the process group's store."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import torch.distributed as dist

from tide_strategies.runtime.cuda.host_order import Board
from tide_strategies.runtime.exchange import Exchange, exchange_json
from tide_strategies.runtime.hosts import Placement

_log = logging.getLogger("tide_strategies")

#: Hosts publish and read once a second, or so seldom that the store has no more than so many of them a second.
_INTERVAL_S, _HOSTS_PER_S = 1.0, 256
#: A store in a file grows with every word.
_FILE_INTERVAL_S = 60.0


class StoreBoard:
    """Words in a store of torch's, under keys that are this board's alone.

    Args:
        store: of the process group. It is cloned, so that no wait of the program's holds up a word, nor the reverse;
            by the thread that uses the board, since that may take as long as the store's timeout.
        name: of this board, alike on all hosts and never used before.
        hosts: upper bound on how many there are.
    """

    def __init__(self, store: dist.Store, name: str, hosts: int) -> None:
        self._shared: Any = dist.PrefixStore(f"tide/{name}/calls", store)
        self._own: Any = None
        grows = not isinstance(_innermost(store), dist.TCPStore)
        self.interval_s = _FILE_INTERVAL_S if grows else max(_INTERVAL_S, hosts / _HOSTS_PER_S)

    def publish(self, key: str, value: bytes) -> None:
        """See ``Board``. Raises what the store raises."""
        self._connected().set(key, value)

    def read(self, key: str) -> bytes | None:
        """See ``Board``. Raises what the store raises."""
        store = self._connected()
        return bytes(store.get(key)) if store.check([key]) else None

    def _connected(self) -> Any:
        if self._own is None:
            self._own = self._shared.clone()
        return self._own


def open_board(exchange: Exchange, ranks: dist.ProcessGroup, placement: Placement) -> Board | None:
    """A board for ranks that are on several hosts; None for one host. Collective."""
    if not placement.host_ranks:
        return None
    name = str(exchange_json(exchange, secrets.token_hex(16))[0])
    try:
        # All ranks of the job: where groups have one rank on each host, every rank publishes.
        return StoreBoard(ranks.get_group_store(), name, dist.get_world_size())
    except (AttributeError, RuntimeError) as e:  # the first: a torch that keeps its store to itself
        _log.warning("TIDE: calls are not compared between hosts (%s: %s)", type(e).__name__, e)
        return None


def _innermost(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store
