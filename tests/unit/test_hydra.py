"""TIDE's options in Hydra applications, and with OmegaConf alone: found, typed, mistakes refused, reloaded equal.

The likeliest mistakes: on the command line a misspelt option or section, a wrong choice, number or yes/no, an unknown
preset, a second preset, ``+`` before what is there; in the file the same, no group at all, a bare ``off``; in the
program the whole configuration or a name in place of the section, a missing interpolation, a value out of range.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import tide_strategies
from tide_strategies.config import TideConfig, TopologyConfig
from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.hydra import schema, structured_config

hydra = pytest.importorskip("hydra")
omegaconf = pytest.importorskip("omegaconf")
OmegaConf = omegaconf.OmegaConf

ROOT = Path(tide_strategies.__file__).parents[1]
FOLDER = files("tide_strategies.configs.tide")
PRESETS = sorted(p.name.removesuffix(".yaml") for p in FOLDER.iterdir() if p.name.endswith(".yaml"))


@pytest.fixture
def app(tmp_path: Path):
    """A user's application: its own configuration folder, which adds a preset to TIDE's group."""
    (tmp_path / "tide").mkdir()
    (tmp_path / "config.yaml").write_text("defaults: [{tide: h200}, _self_]\nlr: 0.1\n")
    (tmp_path / "tide/mine.yaml").write_text("defaults: [h200, _self_]\ntimeout_s: 30\nall_gather: {cache: 'off'}\n")

    def compose(*overrides: str, config: str = "config") -> Any:
        with hydra.initialize_config_dir(config_dir=str(tmp_path), version_base=None):
            return hydra.compose(config_name=config, overrides=list(overrides))

    return compose


def test_any_application_finds_the_group_and_overrides_it(app) -> None:
    config = TideConfig.from_any(app("tide.reduce_scatter.mode=slot_reuse", "tide.topology=2x4").tide)
    assert config.changed() == ["all_gather.slots", "reduce_scatter.mode"]
    assert config.topology == TopologyConfig(nodes=2, gpus_per_node=4)
    assert TideConfig.from_any(app("tide=mine").tide).to_dict()["all_gather"]["cache"] == "off"
    section = "tide.topology={nodes:1,gpus_per_node:2}"
    assert TideConfig.from_any(app(section).tide).topology == TopologyConfig(nodes=1, gpus_per_node=2)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_complete_and_reloads_equal(app, preset: str) -> None:
    node = app(f"tide={preset}").tide
    config = TideConfig.from_any(node)
    assert OmegaConf.to_container(node, enum_to_str=True) == config.to_dict()
    assert TideConfig.from_any(OmegaConf.create(OmegaConf.to_yaml(node))) == config
    assert TideConfig.from_any(OmegaConf.to_container(node)) == config
    assert TideConfig.from_any(OmegaConf.to_object(node)) == config
    assert OmegaConf.merge(structured_config(), config.to_dict()) == node
    # the file itself, without Hydra
    alone = OmegaConf.load(str(FOLDER / f"{preset}.yaml"))
    assert TideConfig.from_any(alone) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("+tide=debug", ["Multiple values for tide", "override tide: debug"]),
        ("+tide.timeout_s=3", ["Either remove + prefix: 'tide.timeout_s=3'"]),
        ("tide.reduce_scatter.mod=in_place", ["'mod' not in", "options are mode, sum_ctas"]),
        ("tide.timout_s=3", ["'timout_s' not in", "timeout_s"]),
        ("tide.reduce_scatter.mode=inplace", ["'inplace', expected one of [in_place, slot_reuse]"]),
        ("tide.all_gather.cache=false", ["'False', expected one of [off, turnaround, microbatch]"]),
        ("tide.timeout_s=soon", ["'soon'", "could not be converted to Float"]),
        ("tide.all_gather.slots=2.5", ["'2.5'", "could not be converted to Integer"]),
        ("tide.strict=perhaps", ["'perhaps' is not a valid bool"]),
        ("tide.all_gather.slots=[1]", ["all_gather.slots"]),
        ("tide=h100", ["Could not find 'tide/h100'", "h200"]),
    ],
)
def test_mistakes_are_refused_while_hydra_composes(app, override: str, words: list[str]) -> None:
    with pytest.raises((hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException)) as refused:
        app(override)
    for word in words:
        assert word in str(refused.value) + str(refused.value.__cause__)


@pytest.mark.parametrize(
    ("file", "override", "words"),
    [
        ("lr: 0.1", "tide=h200", ["To append to your default list use +tide=h200"]),
        ("lr: 0.1", "tide.timeout_s=3", ["To append to your config use +tide.timeout_s=3"]),
        ("defaults: [{tide: h100}, _self_]", "", ["'tide/h100'", "h200"]),
        ("defaults: [{tide: h200}, _self_]\ntide: {timout_s: 3}", "", ["'timout_s' not in", "timeout_s"]),
        (
            "defaults: [{tide: h200}, _self_]\ntide: {all_gather: {cache: off}}",
            "",
            ["'False', expected one of [off, turnaround, microbatch]"],
        ),
    ],
)
def test_mistakes_in_the_file_and_about_the_group(
    app, tmp_path: Path, file: str, override: str, words: list[str]
) -> None:
    (tmp_path / "wrong.yaml").write_text(file)
    with pytest.raises((hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException)) as refused:
        app(*filter(None, [override]), config="wrong")
    for word in words:
        assert word in str(refused.value) + str(refused.value.__cause__)


def test_mistakes_in_what_a_door_is_given(app) -> None:
    """The whole configuration, a preset's or a file's name, a value that another part of the program would set."""
    for given, words in (
        (app(), "give that section (config.tide)"),
        ("h200", "not str: 'h200'. Read a file first: yaml.safe_load, OmegaConf.load"),
    ):
        with pytest.raises(TideConfigError) as refused:
            TideConfig.from_any(given)
        assert words in str(refused.value)
    with pytest.raises(omegaconf.errors.OmegaConfBaseException, match="Interpolation key 'seconds' not found"):
        TideConfig.from_any(app("tide.timeout_s=${seconds}").tide)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tide.all_gather.multicast=on_request", "'all_gather.multicast' must be 'auto' or true or false"),
        ("+tide.reduce_scater={mode: in_place}", "did you mean 'reduce_scatter'"),
        ("tide.reduce_scatter.sum_ctas=many", "'reduce_scatter.sum_ctas' must be 'auto' or a whole number; got 'many'"),
        ("tide.topology={nodes: 2}", "gpus_per_node"),
        ("tide.plan=tied", "'plan' must be 'auto' or 'tide' or 'stock' or a section"),
        ("tide.plan=tied", "got 'tied' (str); did you mean 'tide'?"),
        ("tide.plan={tied: [a]}", "did you mean 'plan.tide'?"),
        ("tide.all_gather.slots=0", "at least 1"),
    ],
)
def test_what_hydra_lets_through_tide_refuses(app, override: str, words: str) -> None:
    node = app(override).tide
    with pytest.raises(TideConfigError) as refused:
        TideConfig.from_any(node)
    assert words in str(refused.value)


def test_omegaconf_alone(tmp_path: Path) -> None:
    """Where Hydra cannot be imported."""
    (tmp_path / "options.yaml").write_text("timeout_s: ${seconds}\nreduce_scatter: {mode: slot_reuse}\n")
    code = f"""
import sys
sys.modules["hydra"] = None
from omegaconf import OmegaConf
from tide_strategies import TideConfig, TideConfigError
from tide_strategies.integrations.hydra import structured_config
file = OmegaConf.load({str(tmp_path / "options.yaml")!r})
whole = OmegaConf.create({{"seconds": 5}})
whole.tide = OmegaConf.merge(structured_config(), file, OmegaConf.from_dotlist(["all_gather.slots=3"]))
config = TideConfig.from_any(whole.tide)
OmegaConf.save(whole.tide, {str(tmp_path / "used.yaml")!r}, resolve=True)
again = TideConfig.from_any(OmegaConf.load({str(tmp_path / "used.yaml")!r}))
print(config.timeout_s, *config.changed(), again == config)
try:
    TideConfig.from_any(OmegaConf.create({{"all_gather": {{"slot": 3}}}}))
except TideConfigError as e:
    print(e)
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "5.0 timeout_s all_gather.slots reduce_scatter.mode True"
    assert "did you mean 'all_gather.slots'" in second


def test_a_failure_of_ours_does_not_end_an_application(tmp_path: Path) -> None:
    """Hydra scans its plugins in every application on the machine; one that does not use TIDE must not notice."""
    (tmp_path / "config.yaml").write_text("lr: 0.1\n")
    code = f"""
import sys, warnings
warnings.simplefilter("error")
from tide_strategies.integrations import hydra as ours
def broken():
    raise LookupError("broken on purpose")
ours.register_configs = broken
from hydra import compose, initialize_config_dir
with initialize_config_dir(config_dir={str(tmp_path)!r}, version_base=None):
    print(compose(config_name="config", overrides=["lr=0.5"]).lr)
"""
    done = python(code)
    assert done.stdout.split() == ["0.5"], done.stderr
    assert done.stderr.count("TIDE could not register its config group with Hydra; 'tide' is not available") == 1
    assert "(LookupError: broken on purpose)" in done.stderr


def python(code: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that has imported nothing."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)


def test_the_schema_has_the_options_of_tide_and_no_others() -> None:
    def names(section: type) -> list[Any]:
        out: list[Any] = []
        for f in fields(section):
            kind = type(f.default_factory()) if callable(f.default_factory) else None
            out.append((f.name, names(kind) if kind is not None and is_dataclass(kind) else None))
        return out

    assert names(schema()) == names(TideConfig)
    assert TideConfig.from_any(structured_config()) == TideConfig()
