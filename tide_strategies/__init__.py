"""TIDE strategies: zero-copy, layout-aware collectives for PyTorch FSDP2.

Importing this package is cheap: names resolve on first use, so ``import torch`` (which imports this package
through the ``torch.backends`` entry point) pays for nothing that the program does not use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    "TideConfig": "tide_strategies.config",
    "apply_tide": "tide_strategies.fsdp2",
    "TideHandle": "tide_strategies.fsdp2",
    "TideReport": "tide_strategies.report",
    "TideFSDPStrategy": "tide_strategies.integrations.lightning",
    "TideFSDPPlugin": "tide_strategies.integrations.accelerate",
    "TideError": "tide_strategies.errors",
    "TideConfigError": "tide_strategies.errors",
    "TideFallbackError": "tide_strategies.errors",
    "TideMismatchError": "tide_strategies.errors",
    "TideArenaError": "tide_strategies.errors",
    "TidePeerError": "tide_strategies.errors",
    "TideTimeoutError": "tide_strategies.errors",
}

__all__ = ["__version__", *_LAZY]

if TYPE_CHECKING:
    from tide_strategies.config import TideConfig as TideConfig
    from tide_strategies.errors import TideArenaError as TideArenaError
    from tide_strategies.errors import TideConfigError as TideConfigError
    from tide_strategies.errors import TideError as TideError
    from tide_strategies.errors import TideFallbackError as TideFallbackError
    from tide_strategies.errors import TideMismatchError as TideMismatchError
    from tide_strategies.errors import TidePeerError as TidePeerError
    from tide_strategies.errors import TideTimeoutError as TideTimeoutError
    from tide_strategies.fsdp2 import TideHandle as TideHandle
    from tide_strategies.fsdp2 import apply_tide as apply_tide
    from tide_strategies.integrations.accelerate import TideFSDPPlugin as TideFSDPPlugin
    from tide_strategies.integrations.lightning import TideFSDPStrategy as TideFSDPStrategy
    from tide_strategies.report import TideReport as TideReport


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


# For programs that switched torch's entry points off; otherwise ``import torch`` has done it already.
from tide_strategies import _autoload  # noqa: E402

_autoload.autoload()
