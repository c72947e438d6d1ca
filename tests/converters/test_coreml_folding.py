"""What a program computes from its weights alone is computed once, at export."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.coreml_folding import fold_constants
from converters.coreml_program import trace, write
from converters.mil import Program
from converters.signature import Signature, Size, TensorSpec


class Positions(nn.Module):
    """A position table for 3 × 3 patches, resized to 5 × 4 with a filter that coremltools lacks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(1, 8, 3, 3))
        self.scale = nn.Buffer(torch.rand(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        table = F.interpolate(self.table, (5, 4), mode="bicubic")
        table, _ = (table.flatten(2).mT * self.scale).split([20, 0], 1)
        return x + table + torch.tensor([0.5]).repeat(8).cumsum(0)


class Masked(nn.Module):
    """Attention over what a mask made in `forward` leaves, as transformers' models make theirs."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        places = torch.arange(n)
        causal = places[:, None] >= places
        starts = torch.diff(places // 2, prepend=torch.tensor([-1])) > 0
        mask = x.new_ones((1, n), dtype=torch.bool) & causal & (starts.cumsum(0) < 9)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask) * x.new_ones(8)


CASES = {"resized position table": Positions(), "mask made in forward": Masked()}


def exported(module: nn.Module, *shape: int) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), (torch.zeros(shape),)).run_decompositions({})


def kinds(program: torch.export.ExportedProgram) -> list[str]:
    return [node.target.__name__.split(".")[0] for node in program.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", CASES)
def test_a_program_with_ops_that_coremltools_lacks_on_constants(name, tmp_path):
    module, x = CASES[name], torch.randn(1, 20, 8)
    signature = Signature((TensorSpec("x", (1, 20, 8)),), (TensorSpec("y", (1, 20, 8)),))
    write(trace(module, signature, Size(()), 1), tmp_path / "m.mlpackage", target="ios16", half=False)
    found = Program(tmp_path / "m.mlpackage").run({"x": x.numpy()})["y"]
    with torch.no_grad():
        np.testing.assert_allclose(found, module(x).numpy(), atol=1e-5)


def test_only_the_results_remain_and_the_program_still_runs():
    program = exported(Positions(), 1, 20, 8)
    assert "upsample_bicubic2d" in kinds(program)
    fold_constants(program)
    assert kinds(program) == ["add", "add"]
    x = torch.randn(1, 20, 8)
    with torch.no_grad():
        (found,) = torch.fx.Interpreter(program.graph_module).run(*3 * [None], x)  # the weights are read no more
        torch.testing.assert_close(found, Positions()(x))


class Kept(nn.Module):
    """Nothing of this may be folded: a state, random numbers, and an op that makes much of little."""

    def __init__(self) -> None:
        super().__init__()
        self.state = nn.Buffer(torch.zeros(4))
        self.row = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.state.add_(1)
        noise = torch.rand(4)
        return x + self.state * 2 + noise * 2 + self.row.neg().expand(300, 4)


def test_states_random_numbers_and_cheap_enlargements_stay_in_the_program():
    program = exported(Kept(), 300, 4)
    fold_constants(program)
    assert kinds(program) == ["add", "rand", "mul", "add", "mul", "add", "expand", "add"]
