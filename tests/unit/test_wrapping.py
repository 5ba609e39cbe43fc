"""Which modules become FSDP2 units."""

import pytest
from torch import nn

from tide_strategies.errors import TideConfigError
from tide_strategies.integrations.wrapping import plan_units


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return x + self.down(self.up(x))


class Transformer(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Wrapper(nn.Module):
    """As a LightningModule does: the real model is an attribute."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def names(root, *args, **kw):
    by_id = {id(m): n for n, m in root.named_modules()}
    return [by_id[id(m)] for m in plan_units(root, *args, **kw)]


def test_repeated_blocks_and_nothing_inside_or_beside_them():
    assert names(Transformer()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(Wrapper(Transformer())) == ["model.blocks.0", "model.blocks.1", "model.blocks.2"]


def test_blocks_between_other_modules_of_a_list():
    root = Wrapper(nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))))
    assert names(root) == ["model.1", "model.2"]


def test_model_without_blocks_is_one_group():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Conv1d(2, 2, 1)

    assert names(Plain()) == []


def test_layers_of_a_plain_stack_where_there_are_no_blocks():
    assert names(Wrapper(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))) == ["model.0", "model.2"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == ["0", "2"]
    assert names(Wrapper(nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)))) == []


def test_stages_of_blocks_innermost_first():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.norm = nn.LayerNorm(4)

        def forward(self, x):
            return self.norm(self.blocks(x))

    root = Wrapper(nn.Sequential(Stage(), Stage()))
    assert names(root) == [f"model.{s}.blocks.{b}" for s in (0, 1) for b in (0, 1)] + ["model.0", "model.1"]


def test_experts_inside_a_block_stay_with_it():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList([nn.Sequential(Block(), Block()) for _ in range(4)])

        def forward(self, x):
            return self.experts[0](x)

    assert names(Wrapper(nn.ModuleList([Mixture(), Mixture()]))) == ["model.0", "model.1"]


def test_model_names_its_own_blocks():
    root = Wrapper(Transformer())
    root.model._no_split_modules = ["Block", "AbsentBlock"]
    assert names(root) == ["model.blocks.0", "model.blocks.1", "model.blocks.2"]


def test_tied_parameters_stay_in_one_group():
    root = Wrapper(Transformer(tied=True))
    assert not {"model.embedding", "model.head"} & set(names(root, {nn.Embedding, nn.Linear}))
    # The closest module that holds all sharers takes them.
    assert names(root, {Transformer}) == ["model"]
    blocks = nn.ModuleList([Block(), Block()])
    blocks[1].up.weight = blocks[0].up.weight
    assert names(Wrapper(blocks)) == []


def test_a_module_used_twice_is_one_unit():
    block = Block()
    assert names(Wrapper(nn.ModuleList([block, Block(), block]))) == ["model.0", "model.1"]


def test_policies():
    root = Transformer()
    assert names(root, {Block}) == names(root, ["Block"]) == names(root, lambda m: isinstance(m, Block)) == names(root)
    assert names(root, lambda m: isinstance(m, (nn.ModuleList, nn.Embedding))) == ["embedding"]
    assert names(root, {nn.Linear, "Block"})[:3] == ["blocks.0.down.0", "blocks.0.down.2", "blocks.1.down.0"]


def test_small_units_join_the_group_around_them():
    assert names(Transformer(), min_num_params=60) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(Transformer(), min_num_params=61) == []
    # What inner units hold already does not count for the outer one.
    assert names(Transformer(), {"Block", nn.Linear}, 20) == [
        *(f"blocks.{b}.down.{i}" for b in range(3) for i in (0, 2)),
        *(f"blocks.{b}.up" for b in range(3)),
        "head",
    ]


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"Blok"}, "did you mean 'Block'"),
        ({nn.Conv2d}, "no such module"),
        ({nn.ModuleList}, "without a forward"),
        ({3}, "lists module classes or class names; got 3"),
        (Block, "Write a single class as"),
        ("Block", "must be None, a collection"),
    ],
)
def test_policies_that_do_not_fit(policy, words):
    with pytest.raises(TideConfigError, match=words):
        plan_units(Transformer(), policy)
