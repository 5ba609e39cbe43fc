"""Put ``"tide_fsdp"`` into the strategy registries of Lightning's four namespaces.

``lightning.pytorch`` and ``pytorch_lightning`` are two copies of one library with distinct registries and base
classes, and so are ``lightning.fabric`` and ``lightning_fabric``: each gets a class built on its own bases.
The hooks run while the host is being imported, so they register factories; the class behind a factory is
imported when the name is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from tide_strategies._autoload import unsupported
from tide_strategies.errors import TideConfigError

_PACKAGE = "tide_strategies.integrations.lightning"

# Host namespace -> the module that holds the classes built on it.
TRAINER_MODULES = {
    "lightning.pytorch": f"{_PACKAGE}.trainer_unified",
    "pytorch_lightning": f"{_PACKAGE}.trainer_standalone",
}
FABRIC_MODULES = {
    "lightning.fabric": f"{_PACKAGE}.fabric_unified",
    "lightning_fabric": f"{_PACKAGE}.fabric_standalone",
}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tide_fsdp": ("FSDP2 with TIDE collectives", {}),
    "tide_fsdp_offload": ("FSDP2 with TIDE collectives, parameters in CPU memory", {"cpu_offload": True}),
    "tide_fsdp_sharded": ("FSDP2 with TIDE collectives, sharded checkpoints", {"state_dict_type": "sharded"}),
}


def register_trainer_strategy(strategies: ModuleType) -> None:
    """Hook of ``<namespace>.strategies`` of a Trainer namespace."""
    namespace = strategies.__name__.removesuffix(".strategies")
    _register(strategies.StrategyRegistry, namespace, TRAINER_MODULES[namespace], "TideFSDPStrategy")


def register_fabric_strategy(strategies: ModuleType) -> None:
    """Hook of ``<namespace>.strategies`` of a Fabric namespace."""
    namespace = strategies.__name__.removesuffix(".strategies")
    _register(strategies.STRATEGY_REGISTRY, namespace, FABRIC_MODULES[namespace], "TideFSDPFabricStrategy")


def _register(registry: Any, namespace: str, module: str, class_name: str) -> None:
    for name, (description, options) in _VARIANTS.items():
        if name not in registry:
            registry.register(name, _factory(namespace, module, class_name), description=description, **options)


def _factory(namespace: str, module: str, class_name: str) -> Callable[..., Any]:
    def make_strategy(**options: Any) -> Any:
        words = unsupported(namespace.partition(".")[0])
        if words is not None:
            raise TideConfigError(words)
        return getattr(importlib.import_module(module), class_name)(**options)

    return make_strategy
