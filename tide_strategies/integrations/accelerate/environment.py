"""How the launcher tells the workers that TIDE is wanted, and with which options.

The module is imported together with Accelerate in every program on the machine, so it imports nothing of weight.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tide_strategies.config import TideConfig

#: The options as JSON. Set by the launcher from the ``tide_config:`` section; its presence asks for TIDE.
CONFIG_ENV = "TIDE_CONFIG"


def is_requested() -> bool:
    """Whether the launcher of this process asked for TIDE."""
    return bool(os.environ.get(CONFIG_ENV))


def extend_if_requested(accelerator: ModuleType) -> None:
    """Hook of ``accelerate.accelerator``: nothing happens unless the launcher asked for TIDE."""
    if is_requested():
        from tide_strategies.integrations.accelerate.training import extend

        extend(accelerator)


def request(config: TideConfig) -> None:
    """Ask for TIDE in all processes that this one starts."""
    import json

    os.environ[CONFIG_ENV] = json.dumps(config.to_dict())


def requested_config() -> TideConfig | None:
    """The options that the launcher handed over, or None if it did not ask for TIDE.

    Raises:
        TideConfigError: if the environment variable holds something else.
    """
    if not is_requested():
        return None
    import json

    from tide_strategies.config import TideConfig
    from tide_strategies.errors import TideConfigError

    try:
        return TideConfig.from_any(json.loads(os.environ[CONFIG_ENV]))
    except (TideConfigError, json.JSONDecodeError) as e:
        raise TideConfigError(f"environment variable {CONFIG_ENV} must hold TIDE options as JSON: {e}") from None
