"""In which order files run, and which tests run only when all are asked for."""

import pytest

#: The slowest files, which begin first: side by side, nothing long is left to wait for at the end.
SLOWEST = [
    "test_virtual_nodes.py",
    "test_wheel.py",
    "test_demo.py",
    "test_verify_faults.py",
    "test_accelerate_examples.py",
    "test_lightning_scripts.py",
    "test_fsdp2_parity.py",
    "test_native_cuda.py",
    "test_lightning_checkpoints.py",
    "test_rails.py",
    "test_transformers_trainer.py",
    "test_spin.py",
    "test_examples.py",
    "test_accelerate_scripts.py",
    "test_fallbacks.py",
    "test_lightning_training.py",
    "test_autoload.py",
    "test_calibration.py",
    "test_fabric_training.py",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also run what shows for every case what the other tests show for a part"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    place = {name: i for i, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("exhaustive")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
