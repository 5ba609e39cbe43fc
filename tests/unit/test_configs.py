"""The shipped configuration files say what the code does."""

from importlib.resources import files

import pytest

from tide_strategies.config import TideConfig

omegaconf = pytest.importorskip("omegaconf")


def test_default_yaml_is_every_option_with_its_default() -> None:
    path = files("tide_strategies.configs.tide") / "default.yaml"
    loaded = omegaconf.OmegaConf.create(path.read_text())
    assert omegaconf.OmegaConf.to_container(loaded) == TideConfig().to_dict()
    assert TideConfig.from_any(loaded) == TideConfig()
