"""Training through an Accelerator: the same bits as Accelerate's own FSDP2, and resumed equals uninterrupted."""

from importlib.util import find_spec

import pytest
from harness import launch

pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="needs accelerate")


def equal_to_stock(rank, world, folder):
    import accelerate_jobs as jobs
    import torch
    from accelerate.tracking import GeneralTracker

    from tide_strategies import TideFSDPPlugin
    from tide_strategies.metrics import METRICS, StepMetrics

    class Kept(GeneralTracker):
        name, requires_logging_directory, tracker = "kept", False, None

        def __init__(self):
            super().__init__()
            self.seen = []

        def log(self, values, step=None, **kwargs):
            self.seen.append((step, values))

    jobs.environment(rank, world)
    results = {}
    for precision in ("no", "bf16"):
        options = {"mixed_precision": precision, "gradient_accumulation_steps": 2}
        kept = Kept()
        with_tide = jobs.Training(jobs.accelerator_with_tide(**options, log_with=[kept]))
        with_tide.accelerator.init_trackers("tide")
        initial = with_tide.result()[0]
        plugin = with_tide.accelerator.state.fsdp_plugin
        metrics = StepMetrics(plugin.tide_report)
        with_tide.run(1)
        metrics.collect(1)
        with_tide.run(3)
        with_tide.accelerator.log(metrics.collect(3), step=4)
        if rank == 0:  # trackers are the main process's
            ((step, logged),) = kept.seen
            assert (step, logged.keys()) == (4, METRICS.keys())
            assert (logged["tide/groups_tide"], logged["tide/reduce_scatters"]) == (4, 4), "of a step, not in all"
            assert logged["tide/exposed_ms"] == logged["tide/collectives_ms"] > 0
        else:
            assert kept.seen == []
        report = plugin.tide_report()
        jobs.finish(with_tide)
        recomputing = TideFSDPPlugin(activation_checkpointing=True)
        recomputed = jobs.Training(jobs.accelerator_with_tide(recomputing, **options)).run(4)
        jobs.finish(recomputed)
        stock = jobs.Training(jobs.accelerator_with_stock_fsdp2(precision, gradient_accumulation_steps=2)).run(4)
        reduce = plugin.mixed_precision_policy and plugin.mixed_precision_policy.reduce_dtype
        results[precision] = {
            "equal": with_tide.result() == stock.result(),
            "moved": all(v != initial[n] for n, v in with_tide.result()[0].items() if v and n != "scale"),
            "clipped": bool(torch.stack(with_tide.norms).max() > 0.5),
            "norms": len(with_tide.norms),
            "status": report.status,
            "calls": [g.reduce_scatter.calls for g in report.groups],
            "reduce": str(reduce),
            "recomputed": recomputing.tide_report().status,
            "recomputed alike": list(recomputed.result()[0].values()) == list(with_tide.result()[0].values()),
        }
    return results


def test_bits_of_stock_with_accumulation_and_clipping(tmp_path):
    for results in launch(2, equal_to_stock, tmp_path):
        for precision, reduce in (("no", "None"), ("bf16", "torch.float32")):
            assert results[precision] == {
                "equal": True,
                "moved": True,
                "clipped": True,
                "norms": 4,
                "status": "4 of 4 groups accelerated",
                "calls": [4] * 4,  # once a step, not once a micro-batch
                "reduce": reduce,
                "recomputed": "4 of 4 groups accelerated",  # the same units, found once
                "recomputed alike": True,
            }


def resumed(rank, world, folder):
    import accelerate_jobs as jobs
    import torch

    from tide_strategies import TideConfigError, TideFSDPPlugin

    jobs.environment(rank, world)
    results = {}
    for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):

        def training(seed, kind=kind):
            # Other ranks' values come from rank 0: what they were built with does not matter.
            plugin = TideFSDPPlugin(state_dict_type=kind, cpu_ram_efficient_loading=True, timeout_s=60)
            accelerator = jobs.accelerator_with_tide(plugin, gradient_accumulation_steps=2)
            return jobs.Training(accelerator, seed=seed + rank)

        through = training(seed=0)
        values = through.accelerator.get_state_dict(through.model)  # all of them on rank 0
        built = jobs.Model(seed=0).state_dict()
        from_rank_0 = rank > 0 or (
            values.keys() == built.keys() and all(torch.equal(values[n], built[n]) for n in built)
        )
        through.run(3)
        through.accelerator.save_state(str(folder / kind))
        saved = through.result()
        through.run(3)
        uninterrupted = through.result()
        # In the same session, then in one that never trained, from other initial values.
        through.accelerator.load_state(str(folder / kind))
        reloaded = through.result()
        jobs.finish(through)
        later = training(seed=77)
        (other,) = {"SHARDED_STATE_DICT", "FULL_STATE_DICT"} - {kind}
        refused = ""
        if (folder / other).exists():
            try:
                later.accelerator.load_state(str(folder / other))
            except TideConfigError as e:
                refused = str(e)
        later.accelerator.load_state(str(folder / kind))
        later.step = 3
        later.run(3)
        full = later.accelerator.get_state_dict(later.model)
        results[kind] = {
            "from rank 0": from_rank_0,
            "refused": refused,
            "reloaded": reloaded[:2] == saved[:2] and reloaded[3] == saved[3],
            "resumed": later.result()[:2] == uninterrupted[:2] and later.result()[3] == uninterrupted[3],
            "status": later.accelerator.state.fsdp_plugin.tide_report().status,
            "gathered": sorted(full) == sorted(jobs.Model().state_dict()) if rank == 0 else True,
        }
        jobs.finish(later)
    return results


def test_resumed_equals_uninterrupted_in_both_checkpoint_types(tmp_path):
    for results in launch(2, resumed, tmp_path):
        words = results["FULL_STATE_DICT"].pop("refused")
        assert "was written with SHARDED_STATE_DICT, and this run has FULL_STATE_DICT" in words
        assert "state_dict_type='SHARDED_STATE_DICT' in TideFSDPPlugin" in words
        assert results["SHARDED_STATE_DICT"].pop("refused") == "", "nothing there"
        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            assert results[kind] == {
                "from rank 0": True,
                "reloaded": True,
                "resumed": True,
                "status": "4 of 4 groups accelerated",
                "gathered": True,
            }
