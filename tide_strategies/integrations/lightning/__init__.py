"""TIDE for Lightning: ``Trainer(strategy="tide_fsdp")`` and ``Fabric(strategy="tide_fsdp")``.

``TideFSDPStrategy``, ``TideEMA``, ``TideMonitor`` and ``TideFSDPFabricStrategy`` resolve to the class of the namespace
that the program uses: the one already imported, ``lightning`` before the standalone packages if both are. A program
that mixes both imports the class that it means from ``trainer_unified``, ``trainer_standalone``, ``fabric_unified`` or
``fabric_standalone``.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tide_strategies.integrations.lightning.registration import FABRIC_MODULES, TRAINER_MODULES

if TYPE_CHECKING:
    from tide_strategies.integrations.lightning.fabric_ema import TideFabricEMA as TideFabricEMA
    from tide_strategies.integrations.lightning.fabric_unified import TideFSDPFabricStrategy as TideFSDPFabricStrategy
    from tide_strategies.integrations.lightning.trainer_unified import TideEMA as TideEMA
    from tide_strategies.integrations.lightning.trainer_unified import TideFSDPStrategy as TideFSDPStrategy
    from tide_strategies.integrations.lightning.trainer_unified import TideMonitor as TideMonitor

_LAZY = {
    "TideFSDPStrategy": TRAINER_MODULES,
    "TideEMA": TRAINER_MODULES,
    "TideMonitor": TRAINER_MODULES,
    "TideFSDPFabricStrategy": FABRIC_MODULES,
}

__all__ = ["TideEMA", "TideFSDPFabricStrategy", "TideFSDPStrategy", "TideFabricEMA", "TideMonitor"]


def __getattr__(name: str) -> Any:
    if name == "TideFabricEMA":  # has nothing of either copy of Lightning
        return importlib.import_module(f"{__name__}.fabric_ema").TideFabricEMA
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = _LAZY[name]
    return getattr(importlib.import_module(modules[_namespace_in_use(tuple(modules))]), name)


@functools.cache  # a choice once made stays: tools that read annotations (jsonargparse) import the other copy later
def _namespace_in_use(namespaces: tuple[str, ...]) -> str:
    for namespace in namespaces:
        if namespace in sys.modules:
            return namespace
    for namespace in namespaces:
        if find_spec(namespace.partition(".")[0]) is not None:
            return namespace
    raise ImportError(f"this needs one of {', '.join(namespaces)}; none is installed. Try: pip install lightning")
