"""GPU tests: each is skipped, with the reason, where it lacks what it needs."""

import os
import sys
from pathlib import Path

import pytest

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # inherited by the ranks; read when CUDA starts
os.environ.setdefault("TIDE_PLAN", "tide")  # what plan: auto chooses depends on the machine
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # the harness and the models


def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
