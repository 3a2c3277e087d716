"""Trees of tensors and modules: a loss sees a module as the user wrote it, with the parameters of a row."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dbo.tasks.trees import flatten


class Inner(nn.Module):
    """Two levels, a list, a dictionary, a buffer and a parameter that two names share."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(3, 3)])
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(3)), "b": nn.Parameter(torch.ones(3))})
        self._shift = nn.Parameter(torch.zeros(3))
        self.decoder = nn.Linear(3, 3, bias=False)
        self.decoder.weight = self.blocks[1].weight      # type: ignore[assignment]
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[1](self.blocks[0](inputs)) * self.scales["a"] * self.mask
        return self.decoder(hidden) + self._shift * self.scales["b"]


@pytest.fixture
def module() -> Inner:
    torch.manual_seed(0)
    return Inner().double()


@pytest.fixture
def net(module: Inner) -> Any:
    """The module as a loss sees it, at another row than the module's own parameters."""
    spec, row = flatten({"net": module}, "x")
    other = row + torch.arange(len(row), dtype=row.dtype) / len(row)
    return spec.unflatten(other)["net"], spec.rebuild(other)["net"]


def test_inner_parameters_are_attributes(net: Any) -> None:
    """`net.conv.weight` and `net.blocks[0][2].bias` are the row's entries, as in the user's own module."""
    seen, own = net
    for read in (
        lambda m: m.conv.weight, lambda m: m.blocks[0][2].bias, lambda m: m.blocks[-1].weight, lambda m: m.scales["b"],
        lambda m: m.scales.a, lambda m: m._shift, lambda m: m.mask, lambda m: m.blocks[0][0].weight,
    ):
        assert torch.equal(read(seen), read(own))


def test_inner_modules_can_be_called(net: Any) -> None:
    """A loss may use a part of a module, such as its encoder."""
    seen, own = net
    inputs = torch.rand(5, 3, dtype=torch.float64)
    assert torch.equal(seen(inputs), own(inputs))
    assert torch.equal(seen.blocks[0](inputs), own.blocks[0](inputs))
    assert [name for name, _ in seen.blocks.named_parameters()] == [name for name, _ in own.blocks.named_parameters()]


def test_a_shared_parameter_has_both_names(net: Any, module: Inner) -> None:
    """It is one part of the row; under its second name too it is that of the row, not the module's start."""
    seen, own = net
    inputs = torch.rand(5, 3, dtype=torch.float64)
    assert torch.equal(seen.decoder.weight, seen.blocks[1].weight)
    assert torch.equal(seen.decoder(inputs), own.decoder(inputs))
    assert not torch.equal(seen.decoder.weight, module.decoder.weight)


def test_gradients_pass_through_inner_modules(module: Inner) -> None:
    spec, row = flatten(module, "x")
    row.requires_grad_(True)
    spec.unflatten(row).blocks[0][2].weight.sum().backward()
    assert row.grad is not None
    assert int((row.grad != 0).sum()) == 12


def test_unknown_names_are_refused(net: Any) -> None:
    """With the names that there are; a copy of it is a copy."""
    seen, _ = net
    with pytest.raises(AttributeError, match=r"no parameter 'wieght'; it has weight, bias"):
        _ = seen.conv.wieght
    with pytest.raises(AttributeError, match=r"no parameter 'con'; it has .*conv\.weight, .*, conv, blocks"):
        _ = seen.con
    assert torch.equal(copy.copy(seen).conv.weight, seen.conv.weight)
