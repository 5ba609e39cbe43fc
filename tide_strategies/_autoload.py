"""Make TIDE known to the frameworks of an unchanged script: the ``torch.backends`` entry point.

``import torch`` calls :func:`autoload` at its very end, in every process of a job. Two rules follow: it never
raises (torch would turn that into a failed ``import torch``), and it costs next to nothing (it installs one
finder; no framework and no other part of TIDE is imported). When the program later imports one of the modules
of ``_HOOKS``, the finder lets the ordinary import run and then calls that module's hook, which adds TIDE to the
framework's own registry.

Accelerate's command line learns to read a ``tide_config:`` section; in any other process Accelerate and transformers
are left alone, unless it was started for such a file. A host of a version that TIDE does not support is left as it is.

Switched off by ``TIDE_AUTOLOAD=0``. With ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` torch calls no entry point at all;
``import tide_strategies`` then does the same work by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

SWITCH = "TIDE_AUTOLOAD"

_LIGHTNING = "tide_strategies.integrations.lightning.registration"
_ACCELERATE = "tide_strategies.integrations.accelerate"

#: Set by the launcher for its workers from the ``tide_config:`` section, as JSON: its presence asks for TIDE.
CONFIG_ENV = "TIDE_CONFIG"

# Host module -> hook, as "module:function"; the function gets the host module once its import is complete.
# A hook may run more than once for a module (after a reload), so it must be idempotent.
_HOOKS = {
    "lightning.pytorch.strategies": f"{_LIGHTNING}:register_trainer_strategy",
    "pytorch_lightning.strategies": f"{_LIGHTNING}:register_trainer_strategy",
    "lightning.fabric.strategies": f"{_LIGHTNING}:register_fabric_strategy",
    "lightning_fabric.strategies": f"{_LIGHTNING}:register_fabric_strategy",
    "accelerate.commands.launch": f"{_ACCELERATE}.launching:extend_launcher",
    "accelerate.accelerator": f"{_ACCELERATE}.training:extend",
    "transformers.trainer": f"{_ACCELERATE}.trainer:extend",
    "transformers.training_args": f"{_ACCELERATE}.trainer:extend_arguments",
}

# Hosts of programs that need not know of TIDE: their hooks run where the launcher asked for it, and nowhere else.
_ON_REQUEST = {"accelerate.accelerator", "transformers.trainer", "transformers.training_args"}

# Versions that TIDE supports, as in pyproject.toml.
_LIGHTNING_VERSIONS = ">=2.5,!=2.6.2,!=2.6.3"
_SUPPORTED = {
    "lightning": _LIGHTNING_VERSIONS,
    "pytorch_lightning": _LIGHTNING_VERSIONS,
    "lightning_fabric": _LIGHTNING_VERSIONS,
    "accelerate": ">=1.13",
    "transformers": ">=4.57",
}

# Programs import these without a thought of TIDE, and must not hear of it: the names that are registered there tell.
_TELL_WHEN_USED = {"lightning", "pytorch_lightning", "lightning_fabric"}

# Host modules that are programs too, run as ``python -m``, and what such a program calls. The hook works on the module
# that an import gives, so that one is imported then, and its function called.
_PROGRAMS = {"accelerate.commands.launch": "main"}

_failed: set[str] = set()

# Hosts whose own import has led to ours (``accelerate.accelerator`` may be what imports torch): their hooks run at
# the first import after theirs is complete.
_pending: set[str] = set()


class _PostImportFinder(MetaPathFinder):
    """Finds nothing itself: asks the other finders for a host module and has its hook run after its import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if _pending:
            _run_pending()
        if name not in _HOOKS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _PostImportFinder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                _run_hook_after_exec(spec)
                return spec
        return None


def autoload() -> None:
    """Install the post-import hooks, once; run those of modules that are imported already. Never raises."""
    try:
        if os.environ.get(SWITCH, "1").strip().lower() not in ("0", "false", "off", "no"):
            install_hooks()
    except Exception as error:
        _warn_once("autoload", f"TIDE could not install its import hooks ({type(error).__name__}: {error})")


def install_hooks() -> None:
    """The same whatever the switch says, for programs that ask for TIDE by name (``tide_strategies.launch``)."""
    if not any(isinstance(finder, _PostImportFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImportFinder())
    _pending.update(name for name in _HOOKS if name in sys.modules)
    _run_pending()


def _run_pending() -> None:
    for name in sorted(_pending):
        module = sys.modules.get(name)
        if module is None:
            _pending.discard(name)  # its import failed
        elif not _is_initializing(module):
            _pending.discard(name)
            _run_hook(name, module)


def _run_hook_after_exec(spec: ModuleSpec) -> None:
    """Extend this one loader object rather than wrap it: tools that look at a module's loader see the real one."""
    loader = spec.loader
    if loader is None:
        return
    exec_module = loader.exec_module
    own_code = getattr(loader, "get_code", None) if spec.name in _PROGRAMS else None

    def exec_then_hook(module: ModuleType) -> None:
        if own_code is not None:
            loader.get_code = own_code  # type: ignore[attr-defined]  # this is an import
        exec_module(module)
        _run_hook(spec.name, module)

    def code_of_program(name: str) -> CodeType:
        function = _PROGRAMS[name]
        return compile(f"from {name} import {function}\n{function}()\n", f"<python -m {name}, with TIDE>", "exec")

    try:
        loader.exec_module = exec_then_hook  # type: ignore[method-assign]
        if own_code is not None:
            loader.get_code = code_of_program  # type: ignore[attr-defined]  # what ``runpy`` asks for
    except AttributeError as error:
        _warn_once(spec.name, f"TIDE cannot hook the import of {spec.name} ({error}); it is not available there")


def _run_hook(name: str, module: ModuleType) -> None:
    """Call the hook of a host module; a hook that fails leaves the host as it was, with one warning."""
    if name in _ON_REQUEST and not os.environ.get(CONFIG_ENV):
        return
    try:
        host = name.partition(".")[0]
        words = None if host in _TELL_WHEN_USED else unsupported(host)
        if words is not None:
            if name in _ON_REQUEST or _ask_for_tide(sys.argv[1:]):
                _warn_once(host, words)
            return
        from importlib import import_module

        where, _, function = _HOOKS[name].partition(":")
        getattr(import_module(where), function)(module)
    except Exception as error:
        _warn_once(
            name, f"TIDE could not register with {name} and is not available there ({type(error).__name__}: {error})"
        )


def unsupported(host: str) -> str | None:
    """Words for a host which says that it has a version that TIDE does not support; else None."""
    version = getattr(sys.modules.get(host), "__version__", None)  # every host sets it before it imports its parts
    if host not in _SUPPORTED or not isinstance(version, str):
        return None  # what the hooks rely on they look for themselves
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    # The base: a development version of what is supported is near enough.
    if SpecifierSet(_SUPPORTED[host]).contains(Version(version).base_version):
        return None
    return (
        f"TIDE supports {host}{_SUPPORTED[host]}; this is {version}, to which it adds nothing. Install one of those, "
        f"or set {SWITCH}=0 if this program does not use TIDE."
    )


def _ask_for_tide(arguments: Sequence[str]) -> bool:
    """Whether a launcher's command line names a file with a section for TIDE."""
    for argument in arguments:
        path = argument.rpartition("=")[2]
        if path.endswith((".yaml", ".yml", ".json")) and os.path.isfile(path):
            with open(path, errors="replace") as file:
                if "tide_config" in file.read():
                    return True
    return False


def _is_initializing(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _warn_once(key: str, message: str) -> None:
    if key in _failed:
        return
    _failed.add(key)
    import warnings

    # A filter that turns warnings into errors must not turn this one into a failed import of the host.
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(message, RuntimeWarning, stacklevel=2)
