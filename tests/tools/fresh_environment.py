"""The wheel, built from the source distribution, and environments that hold it and never saw the repository."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]


def outside(**more: str) -> dict[str, str]:
    """The variables of this process without those that could lead to the repository, or to TIDE's options."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("TIDE_")}
    return {**kept, **more}


def run(command: list[Any], cwd: Path, timeout: float = 200, **environment: str) -> str:
    """Run a command outside the repository; returns what it printed."""
    done = subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=outside(**environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def build_wheel(folder: Path) -> Path:
    """Build a wheel without leaving anything in the repository."""
    wheel = [*PIP, "wheel", "--no-deps", "-w", folder]
    if all(importlib.util.find_spec(m) for m in ("scikit_build_core", "nanobind")):
        code = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
        run([sys.executable, "-c", code, folder], ROOT)
        (source,) = folder.glob("*.tar.gz")
        run([*wheel, "--no-build-isolation", source], folder, timeout=600)
    else:
        run([*wheel, "-C", f"build-dir={folder / 'build'}", ROOT], folder, timeout=600)
    (built,) = folder.glob("*.whl")
    return built


def borrowing_environment(folder: Path, wheel: Path) -> None:
    """An environment with the wheel, which borrows everything else from this one: made in seconds, without network.

    What makes an editable install work (a ``.pth`` file in this environment) is not read in folders that a ``.pth``
    file adds. The borrowing begins after the installation, or pip would find this environment's package.
    """
    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    run([*PIP, "--python", folder / "bin/python", "install", "--no-deps", "--no-index", wheel], folder.parent)
    borrowed = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    assert borrowed
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "borrowed.pth").write_text("\n".join(borrowed))


def whole_environment(folder: Path, wheel: Path, *more: str) -> None:
    """An environment of its own, from the package index: the wheel with all doors, this one's torch, and ``more``."""
    import torch

    run([sys.executable, "-m", "venv", "--without-pip", folder], folder.parent)
    doors = f"tide-strategies[lightning,accelerate,transformers,hydra] @ {wheel.resolve().as_uri()}"
    release = f"torch=={torch.__version__.split('+')[0]}"
    install = [*PIP, "--python", folder / "bin/python", "install", "--quiet", "pip", doors, release, *more]
    run(install, folder.parent, timeout=1800)
