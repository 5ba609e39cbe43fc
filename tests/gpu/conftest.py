"""GPU tests: each is skipped, with the reason, where it lacks what it needs."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))  # the harness and the models


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """For this process and the ranks that it starts, and not for the tests of other folders."""
    needed = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # read when CUDA starts
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # says nothing to an NCCL that cannot, nor where each rank has a card
    }
    if "TIDE_PLAN" not in os.environ:
        needed["TIDE_PLAN"] = "tide"  # what plan: auto chooses depends on the machine
    with mock.patch.dict(os.environ, needed):
        yield


def pytest_collection_modifyitems(items):
    import torch

    for item in items:
        if Path(__file__).parent in Path(item.fspath).parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
