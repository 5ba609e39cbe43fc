"""How the launcher tells the workers that TIDE is wanted, and with which options."""

from __future__ import annotations

import json
import os

from tide_strategies._autoload import CONFIG_ENV
from tide_strategies.config import TideConfig
from tide_strategies.errors import TideConfigError


def request(config: TideConfig) -> None:
    """Ask for TIDE in all processes that this one starts."""
    os.environ[CONFIG_ENV] = json.dumps(config.to_dict())


def requested_config() -> TideConfig | None:
    """The options that the launcher handed over, or None if it did not ask for TIDE.

    Raises:
        TideConfigError: if the environment variable holds something else.
    """
    given = os.environ.get(CONFIG_ENV)
    if not given:
        return None
    try:
        return TideConfig.from_any(json.loads(given))
    except (TideConfigError, json.JSONDecodeError) as e:
        raise TideConfigError(f"environment variable {CONFIG_ENV} must hold TIDE options as JSON: {e}") from None
