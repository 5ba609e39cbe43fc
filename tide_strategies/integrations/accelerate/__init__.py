"""TIDE for Accelerate and transformers' ``Trainer``.

Two ways in: ``accelerate launch --config tide.yaml train.py`` with a ``tide_config:`` section in the file and an
unchanged script, or ``Accelerator(fsdp_plugin=TideFSDPPlugin(...))`` in the script, under any launcher.

In the launcher process, :mod:`.config_file` reads the section and :mod:`.launching` hands it to the workers in the
environment (:mod:`.environment`). In a worker, :mod:`.training` makes the Accelerator use :mod:`.plugin`'s plugin
and apply TIDE to the model that ``prepare`` has sharded. :mod:`.trainer` gives words to what transformers' ``Trainer``
passes over in silence, and :mod:`.checkpoint_kind` to checkpoints of the other kind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin as TideFSDPPlugin

__all__ = ["TideFSDPPlugin"]


def __getattr__(name: str) -> Any:
    if name != "TideFSDPPlugin":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tide_strategies.integrations.accelerate.plugin import TideFSDPPlugin

    return TideFSDPPlugin
