"""Spin goes through all interleavings of small configurations: clean as they are, and every seeded bug found.

The models are made from the schedules that run. Needs ``spin`` and a C compiler; without them it is skipped, or, where
``TIDE_EXPECT_SPIN`` is set, fails.
"""

import os
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from tide_strategies.collectives.plan import BasePlan
from tide_strategies.layout import GroupLayout, ParamShape
from tide_strategies.topology import Topology
from tide_strategies.verify.promela import Recorder, model, waits
from tide_strategies.verify.workloads import Workload

COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
MISSING = not (shutil.which("spin") and COMPILER)
pytestmark = pytest.mark.skipif(
    MISSING and not os.environ.get("TIDE_EXPECT_SPIN"), reason="needs spin and a C compiler"
)


def test_spin_is_there() -> None:
    assert not MISSING, "TIDE_EXPECT_SPIN is set, and spin or a C compiler is not installed: the models go unchecked"


def workload(kind: str, nodes: int, local: int, interleave: bool, calls: int, **options) -> Workload:
    n = nodes * local
    plan = BasePlan(nodes, local, local, 1, **options) if kind == "reduce-scatter" else None
    layouts = (GroupLayout((ParamShape(2 * n, 4, 2),), n),)
    return Workload(
        kind,
        Topology(nodes, local),
        layouts,
        plan=plan,
        interleave=interleave,
        calls=calls,
        ahead=not options.get("slot_reuse"),
    )


def spin(text: str, folder) -> tuple[int, int]:
    """Errors and states that Spin reports."""
    (folder / "model.pml").write_text(text)
    subprocess.run(["spin", "-a", "model.pml"], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60)
    # Unoptimised: states are few, and the compiler would take longer than it saves.
    flags = ["-O0", "-w", "-DSAFETY", "-DCOLLAPSE", "-DVECTORSZ=8192", "-DMEMLIM=2000"]
    assert COMPILER is not None
    subprocess.run([COMPILER, *flags, "-o", "pan", "pan.c"], cwd=folder, check=True, timeout=120)
    out = subprocess.run(["./pan", "-m100000", "-n"], cwd=folder, capture_output=True, text=True, timeout=300).stdout
    assert "search depth too small" not in out
    assert "Search not completed" not in out or "errors: 0" not in out
    errors, states = re.search(r"errors: (\d+)", out), re.search(r"(\d+) states, stored", out)
    assert errors is not None, out
    assert states is not None, out
    return int(errors[1]), int(states[1])


CLEAN = {
    "reduce-scatter 2x1, streams": workload("reduce-scatter", 2, 1, False, 3),
    "reduce-scatter 3x1": workload("reduce-scatter", 3, 1, True, 4),
    "reduce-scatter 3x1, small outbox": workload("reduce-scatter", 3, 1, True, 3, slot_reuse=True),
    "reduce-scatter 2x1, passes": workload("reduce-scatter", 2, 1, True, 3, passes=2),
    "reduce-scatter 2x2": workload("reduce-scatter", 2, 2, True, 3),
    "all-gather 3x1": workload("all-gather", 3, 1, True, 3),
    "all-gather 2x2": workload("all-gather", 2, 2, True, 2),
    "all-gather 2x1, streams": workload("all-gather", 2, 1, False, 3),
    # Not ahead: a wait of the next call would do for the one that is left out below.
    "all-gather of a lane of 3": replace(workload("all-gather", 3, 1, True, 3), lane=True, ahead=False),
    "all-gather of a lane of 2, used again": replace(workload("all-gather", 2, 1, True, 3), lane=True, reuse=True),
    "reduce-scatter of a lane of 3": replace(workload("reduce-scatter", 3, 1, True, 3), lane=True, plan=None),
}


@pytest.mark.parametrize("name", CLEAN)
def test_all_interleavings_are_clean(name, tmp_path) -> None:
    errors, states = spin(model(CLEAN[name].story(machine=Recorder)), tmp_path)
    assert errors == 0
    assert states > 50


#: What each seeded bug leaves out: the first wait, in the second call, for a counter.
BUGS = [
    ("reduce-scatter 3x1", "arrived"),
    ("reduce-scatter 2x1, streams", "credit"),
    ("reduce-scatter 2x2", "consumed"),
    ("reduce-scatter 2x2", "pushed"),
    ("reduce-scatter 2x2", "filled"),
    ("reduce-scatter 2x1, streams", "summed"),
    ("all-gather 3x1", "gathered"),
    ("all-gather 3x1", "stage_free"),
    ("all-gather 2x2", "landed"),
    ("all-gather 2x1, streams", "placed"),
    ("all-gather 2x1, streams", "forwarded"),
    ("all-gather 2x1, streams", "released"),
    ("all-gather of a lane of 3", "gathered"),
    ("all-gather of a lane of 2, used again", "opened"),
    ("reduce-scatter of a lane of 3", "arrived"),
]


@pytest.mark.parametrize(("name", "counter"), BUGS)
def test_every_seeded_bug_is_found(name, counter, tmp_path) -> None:
    work = CLEAN[name]
    candidates = [w for w in waits(work.story(machine=Recorder)) if w.split("|")[1].split()[2] == counter]
    assert candidates, f"nothing waits for {counter}"
    second = [w for w in candidates if "|call 2 " in w] or candidates
    errors, _ = spin(model(work.story(machine=Recorder), second[0]), tmp_path)
    assert errors > 0


def test_a_bug_that_is_not_there_cannot_be_seeded() -> None:
    with pytest.raises(ValueError, match="no wait"):
        model(CLEAN["all-gather 2x2"].story(machine=Recorder), "rank 9|nothing|1")
