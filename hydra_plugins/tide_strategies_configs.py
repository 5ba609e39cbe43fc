"""Hydra imports every module of this namespace package when it starts: TIDE's config group is registered here."""

from tide_strategies.integrations.hydra import register_configs

register_configs()
