"""Two virtual nodes of two ranks through the Trainer; run by ``test_lightning_four_ranks``."""

import torch
from lightning_models import (
    Network,
    assert_close,
    full_state,
    module_class,
    part_loader,
    quiet_import,
    reference,
    sgd,
    strategy_of,
    trainer_of,
)

TWO_BY_TWO = {"plan": "tide", "topology": "2x2"}
#: Options of the strategy that change how things are done, and no bit of what comes of it.
OTHERWISE = {
    "rail": "p2p",
    "plan": {"passes": 2, "chunk_bytes": 4096},
    "all_gather": {"slots": 3, "cache": "microbatch"},
}


def with_four_ranks():
    """All groups run across nodes, and end where stock FSDP2 does; with other options, with the same bits."""
    pl = quiet_import("lightning.pytorch")
    expected = reference(Network(), sgd, epochs=2, accumulate=2, batch_size=16, clip_norm=0.5)
    states = []
    for options in ({"plan": "stock"}, TWO_BY_TWO, {**TWO_BY_TWO, **OTHERWISE}):
        module, strategy = module_class(pl)(), strategy_of(pl, **options, timeout_s=30)
        kw = {"devices": 4, "max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
        trainer = trainer_of(pl, strategy, **kw)
        trainer.fit(module, part_loader())
        groups = trainer.strategy.tide_report().groups
        rail = options.get("rail", "local")
        where = {("2x2", rail, "two-level")} if "topology" in options else {("", "", "")}
        assert {(g.topology, g.rail, g.schedule) for g in groups} == where, groups
        # One step an epoch, of two batches of 16 rows; block 0 is gathered ahead of block 2's reduction.
        assert {g.reduce_scatter.calls for g in groups} == {2}, groups
        assert sum(g.all_gather.ahead for g in groups) == (2 if "topology" in options else 0), groups
        states.append(full_state(module.network))
        # As on two ranks: four addends in fp32, in another order.
        assert_close(states[-1], expected)
    stock, tide, otherwise = states
    assert_close(tide, stock)
    assert all(torch.equal(otherwise[n], tide[n]) for n in tide)
    assert not torch.equal(tide["head.weight"], Network().state_dict()["head.weight"])
