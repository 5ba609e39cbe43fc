"""Hydra imports every module of this namespace package when it starts: TIDE's config group is registered here.

That happens in every Hydra application, whether it uses TIDE or not: whatever goes wrong here is none of its business.
"""

import warnings

try:
    from tide_strategies.integrations.hydra import register_configs

    register_configs()
except Exception as error:
    # Hydra shows what is warned here; a filter that makes warnings errors must not end the application either.
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(
            f"TIDE could not register its config group with Hydra; 'tide' is not available "
            f"({type(error).__name__}: {error})",
            RuntimeWarning,
            stacklevel=1,
        )
