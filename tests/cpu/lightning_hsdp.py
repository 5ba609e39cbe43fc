"""HSDP through the Trainer: two replicas, each sharded over two ranks; run by ``test_lightning_four_ranks``."""

import torch
from lightning_models import (
    Network,
    assert_close,
    full_state,
    module_class,
    on,
    part_loader,
    quiet_import,
    reference,
    sgd,
    strategy_of,
    trainer_of,
)


def with_four_ranks():
    """All groups run on TIDE, end where one process alone ends, and have the bits of stock FSDP2."""
    pl = quiet_import("lightning.pytorch")
    expected = reference(Network(), sgd, epochs=2, batch_size=16, clip_norm=0.5)
    states = {}
    for plan in ("stock", "tide"):
        module, placements = module_class(pl)(), []
        look = on(pl, on_train_start=lambda t, m, seen=placements: seen.append(m.network.head.weight.placements))
        strategy = strategy_of(pl, replicate_size=2, plan=plan, timeout_s=30)
        trainer = trainer_of(pl, strategy, devices=4, max_epochs=2, gradient_clip_val=0.5, callbacks=[look])
        trainer.fit(module, part_loader())
        assert [str(p) for p in placements[0]] == ["R", "S(0)"], placements
        groups = trainer.strategy.tide_report().groups
        assert {g.path for g in groups} == {plan}, groups
        assert {g.topology for g in groups} == ({"1x2"} if plan == "tide" else {""}), groups
        # Two batches of 16 rows an epoch, one reduction each.
        assert {g.reduce_scatter.calls for g in groups} == {4}, groups
        assert len(groups) == 4, groups
        states[plan] = full_state(module.network)
        assert_close(states[plan], expected)
    assert_close(states["tide"], states["stock"], 0.0)  # two addends twice: they have but one order
    assert not torch.equal(states["tide"]["head.weight"], Network().state_dict()["head.weight"])
