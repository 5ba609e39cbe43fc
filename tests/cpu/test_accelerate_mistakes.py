"""The likeliest mistakes of a user of Accelerate: each ends in words that say what to do.

In the Accelerate file: a misspelt option, value, type or section, options in the wrong place, no FSDP, FSDP1 or its
values, a launch without any GPU, a configuration that is no section. In the script: unknown options, FSDP1, a layer
class that the model does not have, a model prepared alone, TIDE applied twice, one process.
"""

import os
import types
from importlib.resources import files
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from harness import launch_raw

import tide_strategies._autoload
from tide_strategies.errors import TideConfigError

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")

FILE = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "use_cpu": True,
    "num_machines": 1,
    "num_processes": 2,
    "fsdp_config": {"fsdp_version": 2},
    "tide_config": {"timeout_s": 60},
}


def launcher(tmp_path, file, *arguments):
    """What ``accelerate launch`` makes of a file and a command line; returns the arguments and the environment."""
    import yaml

    tide_strategies._autoload.install_hooks()
    from accelerate.commands import launch

    path = tmp_path / "tide.yaml"
    path.write_text(yaml.safe_dump(file) if isinstance(file, dict) else file)
    with mock.patch.dict(os.environ):
        os.environ.pop("TIDE_CONFIG", None)
        args = launch.launch_command_parser().parse_args(["--config", str(path), *arguments, "train.py"])
        args, _, _ = launch._validate_launch_command(args)
        return args, dict(os.environ)


def changed(**changes):
    return {k: v for k, v in {**FILE, **changes}.items() if v is not ...}


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (changed(tide_config={"timout_s": 60}), ["tide_config: unknown TIDE option 'timout_s'", "'timeout_s'"]),
        (changed(tide_config={"all_gather": {"slot": 3}}), ["'all_gather.slot'", "'all_gather.slots'"]),
        (changed(tide_config={"reduce_scatter": {"mode": "inplace"}}), ["'reduce_scatter.mode'", "'in_place'"]),
        (changed(tide_config={"timeout_s": "60"}), ["'timeout_s' must be a number", "'60'"]),
        (changed(tide_config="auto"), ["tide_config must be a section"]),
        (changed(tide_confg={}, tide_config=...), ["'tide_confg'", "did you mean 'tide_config'"]),
        (changed(tide={}, tide_config=...), ["'tide'", "did you mean 'tide_config'"]),
        (changed(fsdp_config={"fsdp_tide_slots": 3}), ["fsdp_tide_slots", "section tide_config"]),
        (
            changed(fsdp_config={"fsdp_timout_s": 3}),
            ["fsdp_timout_s (did you mean 'timeout_s'?)", "section tide_config"],
        ),
        (changed(distributed_type="MULTI_GPU"), ["distributed_type: FSDP", "says MULTI_GPU"]),
        (changed(fsdp_config={"fsdp_version": 1}), ["fsdp_version: 2", "to-fsdp2"]),
        (
            changed(fsdp_config={"fsdp_reshard_after_forward": "FULL_SHARD"}),
            ["fsdp_reshard_after_forward must be true or false", "FULL_SHARD means true"],
        ),
    ],
)
def test_in_the_file(tmp_path, file, words):
    with pytest.raises(TideConfigError) as caught:
        launcher(tmp_path, file)
    for word in words:
        assert word in str(caught.value)


def test_no_gpu_and_no_use_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(TideConfigError, match=r"no GPU was found, so every process would train alone.*use_cpu: true"):
        launcher(tmp_path, changed(use_cpu=False))


def test_what_the_workers_are_given(tmp_path, monkeypatch):
    args, env = launcher(tmp_path, changed(fsdp_config={}))
    assert (str(args.fsdp_version), args.use_fsdp, args.cpu) == ("2", True, False)
    assert '"timeout_s": 60' in env["TIDE_CONFIG"]
    assert (env["ACCELERATE_USE_CPU"], env["CUDA_VISIBLE_DEVICES"]) == ("true", "")
    # --cpu means what use_cpu means, not one process
    args, env = launcher(tmp_path, changed(use_cpu=False), "--cpu")
    assert (args.cpu, args.use_cpu, env["ACCELERATE_USE_CPU"]) == (False, True, "true")
    # YAML reads a bare "off" as false, and an empty section as nothing
    file = "distributed_type: FSDP\nuse_cpu: true\nnum_processes: 2\ntide_config:\n"
    assert '"cache": "turnaround"' in launcher(tmp_path, file)[1]["TIDE_CONFIG"]
    assert '"cache": "off"' in launcher(tmp_path, f"{file}  all_gather: {{cache: off}}\n")[1]["TIDE_CONFIG"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    _, env = launcher(tmp_path, changed(use_cpu=False))
    assert env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert "ACCELERATE_USE_CPU" not in env


def test_files_without_the_section_are_left_alone(tmp_path):
    before = dict(os.environ)
    args, env = launcher(tmp_path, changed(tide_config=..., fsdp_config={}, use_cpu=True))
    assert (str(args.fsdp_version), args.use_cpu) == ("1", True)  # Accelerate's own default
    assert {k for k in env if env[k] != before.get(k)} == set()
    with pytest.raises(ValueError, match=r"unknown keys.*'nonsense'"):
        launcher(tmp_path, changed(nonsense=1))


def test_the_section_survives_reading_and_writing(tmp_path):
    import yaml

    launcher(tmp_path, FILE)
    from accelerate.commands.config.update import update_config

    update_config(mock.Mock(config_file=str(tmp_path / "tide.yaml")))
    assert yaml.safe_load((tmp_path / "tide.yaml").read_text())["tide_config"] == FILE["tide_config"]


def test_env_shows_the_section_and_config_writes_none(tmp_path):
    launcher(tmp_path, FILE)
    from accelerate.commands import env
    from accelerate.commands.config.default import write_basic_config

    shown = env.env_command(env.env_command_parser().parse_args(["--config_file", str(tmp_path / "tide.yaml")]))
    assert shown["`Accelerate` configs"]["tide_config"] == FILE["tide_config"]
    written = write_basic_config(save_location=str(tmp_path / "basic.json"))
    assert "tide" not in written.read_text()


def test_the_files_that_come_with_the_package_are_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    folder = files("tide_strategies.configs.accelerate")
    shipped = sorted(f.name for f in folder.iterdir() if f.name.endswith(".yaml"))
    assert shipped == ["tide.yaml", "tide_cpu.yaml"]
    for name in shipped:
        args, env = launcher(tmp_path, (folder / name).read_text())
        assert args.use_fsdp
        assert "TIDE_CONFIG" in env


def test_an_accelerate_that_is_too_different_is_refused_by_name():
    from accelerate import accelerator

    from tide_strategies.errors import TideError
    from tide_strategies.integrations.accelerate.training import extend

    other = types.ModuleType("accelerate.accelerator")
    other.Accelerator, other.AcceleratorState = accelerator.Accelerator, accelerator.AcceleratorState
    other.fsdp2_prepare_model = lambda model: model
    before = accelerator.Accelerator.__init__
    with pytest.raises(TideError, match=r"has another accelerate\.accelerator\.fsdp2_prepare_model than TIDE knows"):
        extend(other)
    assert accelerator.Accelerator.__init__ is before, "nothing is changed by halves"


@pytest.mark.parametrize(
    ("there", "wanted", "index", "refused"),
    [
        ("pytorch_model_fsdp.bin", "SHARDED_STATE_DICT", 0, "written with FULL_STATE_DICT, and this run has SHARDED"),
        ("pytorch_model_fsdp_0/", "FULL_STATE_DICT", 0, "written with SHARDED_STATE_DICT, and this run has FULL"),
        ("pytorch_model_fsdp_1.bin", "SHARDED_STATE_DICT", 1, "written with FULL_STATE_DICT, and this run has SHARDED"),
        ("pytorch_model_fsdp_1.bin", "SHARDED_STATE_DICT", 0, None),  # of another model
        ("pytorch_model_fsdp.bin", "FULL_STATE_DICT", 0, None),
        ("pytorch_model_fsdp_0/", "SHARDED_STATE_DICT", 0, None),
        ("nothing/", "SHARDED_STATE_DICT", 0, None),  # Accelerate says so
    ],
)
def test_a_checkpoint_of_the_other_type(tmp_path, there, wanted, index, refused):
    from tide_strategies.integrations.accelerate.checkpoint_kind import extend_loading

    (tmp_path / there).mkdir() if there.endswith("/") else (tmp_path / there).touch()
    host = types.ModuleType("host")
    host.load_fsdp_model = lambda fsdp_plugin, accelerator, model, input_dir, model_index=0, **more: "loaded"
    extend_loading(host)
    for given in (plugin(state_dict_type=wanted), types.SimpleNamespace()):  # one of TIDE's, and another
        arguments = (given, None, None, str(tmp_path), index)
        if refused is None or not hasattr(given, "tide_config"):
            assert host.load_fsdp_model(*arguments, use_dcp=True) == "loaded"
        else:
            with pytest.raises(TideConfigError, match=refused):
                host.load_fsdp_model(*arguments)


def plugin(**options):
    from tide_strategies import TideFSDPPlugin

    return TideFSDPPlugin(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"timout_s": 60}, "no option 'timout_s'; did you mean 'timeout_s'"),
        ({"state_dict": "full"}, "did you mean 'state_dict_type'"),
        ({"fsdp_version": 1}, "fsdp_version=2 in the plugin"),
        ({"all_gather": {"slots": 0}}, "'all_gather.slots' must be at least 1"),
        ({"tide": {"strict": True}, "strict": False}, "strict given both"),
        ({"tide": "auto"}, "must be a mapping or a TideConfig"),
    ],
)
def test_in_the_plugin(options, words):
    with pytest.raises(TideConfigError, match=words):
        plugin(**options)


def test_a_plugin_that_the_program_made_itself():
    from accelerate.utils import FullyShardedDataParallelPlugin

    from tide_strategies import TideConfig, TideFSDPPlugin
    from tide_strategies.integrations.accelerate.plugin import with_tide

    class Own(FullyShardedDataParallelPlugin):
        def extra(self):
            return "extra"

    given = Own(fsdp_version=2, auto_wrap_policy="no_wrap")
    made = with_tide(given, TideConfig(timeout_s=5))
    assert made is given
    assert isinstance(made, TideFSDPPlugin)
    assert (made.extra(), made.tide_config.timeout_s, made.auto_wrap_policy) == ("extra", 5, None)
    with pytest.raises(TideConfigError, match="fsdp_version=1"):
        with_tide(FullyShardedDataParallelPlugin(fsdp_version=1), TideConfig())


def test_options_of_the_plugin_and_of_the_launcher(monkeypatch):
    assert plugin(timeout_s=7).tide_config.timeout_s == 7
    assert plugin(tide={"timeout_s": 7}, strict=True).tide_config.strict is True
    monkeypatch.setenv("TIDE_CONFIG", '{"timeout_s": 9}')
    assert plugin().tide_config.timeout_s == 9
    assert plugin(timeout_s=7).tide_config.timeout_s == 7
    monkeypatch.setenv("TIDE_CONFIG", "timeout: 9")
    with pytest.raises(TideConfigError, match="TIDE_CONFIG must hold TIDE options as JSON"):
        plugin()


def in_the_script(rank, world, _):
    import accelerate_jobs as jobs

    from tide_strategies import TideFSDPPlugin, apply_tide

    jobs.environment(rank, world)
    said = {}

    def attempt(name, action):
        try:
            said[name] = repr(action())
        except Exception as e:
            said[name] = f"{type(e).__name__}: {e}"

    wrong = TideFSDPPlugin(transformer_cls_names_to_wrap="Blok")
    attempt("class", lambda: jobs.Training(jobs.accelerator_with_tide(wrong)))
    attempt("alone", lambda: jobs.accelerator_with_tide().prepare(jobs.Model()))
    training = jobs.Training(jobs.accelerator_with_tide())
    attempt("twice", lambda: apply_tide(training.model))
    attempt("again", lambda: training.accelerator.prepare(training.model, training.optimizer)[0] is training.model)
    jobs.finish(training)

    # the launcher's environment is missing on a machine without a GPU
    os.environ.update(WORLD_SIZE="2", ACCELERATE_USE_CPU="false")
    jobs.fresh_state()
    from accelerate import PartialState

    PartialState()  # too early: it decides for the whole process
    attempt("each alone", lambda: __import__("accelerate").Accelerator(fsdp_plugin=TideFSDPPlugin()))
    return said


def test_in_the_script():
    for result in launch_raw(2, in_the_script):
        assert result.error is None, result.error
        said = result.value
        assert "'Blok' (fsdp_transformer_layer_cls_to_wrap) does not occur" in said["class"]
        assert "did you mean 'Block'?" in said["class"]
        assert "accelerator.prepare(model, optimizer, ...)" in said["alone"]
        assert "TIDE is already applied" in said["twice"]
        assert said["again"] == "True"
        assert "TideConfigError: this job has 2 processes" in said["each alone"]
        assert "ACCELERATE_USE_CPU=true" in said["each alone"]


def one_process(rank, world, _):
    import warnings

    import accelerate_jobs as jobs
    import torch.distributed as dist

    dist.destroy_process_group()
    jobs.environment(rank, world)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = jobs.Training(jobs.accelerator_with_tide()).run(1)
    return [str(w.message) for w in caught if "TIDE" in str(w.message)], training.step


def test_a_single_process_trains_and_is_told():
    ((told, steps),) = (r.value for r in launch_raw(1, one_process))
    assert steps == 1
    assert len(told) == 1
    assert "one process" in told[0]
    assert "accelerate launch" in told[0]
