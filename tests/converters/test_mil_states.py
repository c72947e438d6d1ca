"""Programs that keep something from run to run (iOS 18): a KV cache, against attention over the whole sequence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from converters.errors import EdgeVitError
from converters.mil import Program

STEPS, WIDTH = 6, 8


class Cached(nn.Module):
    """One token's attention to itself and those before it, whose keys and values are kept; and a running count."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("keys", torch.zeros(1, STEPS, WIDTH))
        self.register_buffer("values", torch.zeros(1, STEPS, WIDTH))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """`x` (1, 1, WIDTH), `place` (1, STEPS, 1): 1 at the token's place, else 0."""
        query, key, value = self.qkv(x).chunk(3, -1)
        self.keys.copy_(self.keys * (1 - place) + key * place)
        self.values.copy_(self.values * (1 - place) + value * place)
        self.seen.add_(1)
        known = place.flip(1).cumsum(1).flip(1)
        scores = (query @ self.keys.mT) / WIDTH**0.5 + (known.mT - 1) * 1e4
        return self.out(scores.softmax(-1) @ self.values), self.seen * 1.0

    def whole(self, x: Tensor) -> Tensor:
        """All tokens at once, without a cache: `x` (1, STEPS, WIDTH)."""
        query, key, value = self.qkv(x).chunk(3, -1)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed)


class Window(nn.Module):
    """The last four rows, written slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        before = self.rows.sum(0)
        self.rows[:3] = self.rows[1:].clone()
        self.rows[3] = x
        return before + 10 * self.rows.sum(0)


def states(module: nn.Module) -> list[ct.StateType]:
    """Of fp16: coremltools takes no other."""
    kinds = {
        name: ct.TensorType(shape=tuple(buffer.shape), dtype=np.float16) for name, buffer in module.named_buffers()
    }
    return [ct.StateType(wrapped_type=kind, name=name) for name, kind in kinds.items()]


def exported(module: nn.Module, *inputs: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(module.eval(), inputs).run_decompositions({})


def scripted(module: nn.Module, *inputs: Tensor) -> torch.jit.ScriptModule:
    """The older way, in which a slice that is written stays one."""
    return torch.jit.trace(copy.deepcopy(module).eval(), inputs, check_trace=False)


def convert(traced: Any, module: nn.Module, inputs: dict[str, Tensor], outputs: list[str], path: Path) -> Program:
    model = ct.convert(
        traced,
        inputs=[ct.TensorType(name, tensor.shape, dtype=np.float32) for name, tensor in inputs.items()],
        outputs=[ct.TensorType(name, dtype=np.float32) for name in outputs],
        states=states(module),
        minimum_deployment_target=ct.target.iOS18,
        compute_precision=ct.precision.FLOAT32,
        skip_model_load=True,
    )
    model.save(str(path))
    return Program(path)


def place(step: int) -> Tensor:
    return torch.eye(STEPS)[step].reshape(1, STEPS, 1)


@pytest.fixture(scope="module")
def module() -> Cached:
    return Cached()


@pytest.fixture(scope="module")
def program(module, tmp_path_factory) -> Program:
    inputs = {"x": torch.zeros(1, 1, WIDTH), "place": place(0)}
    traced = exported(module, *inputs.values())
    return convert(traced, module, inputs, ["y", "count"], tmp_path_factory.mktemp("states") / "cached.mlpackage")


def test_each_step_with_a_cache_is_the_same_as_all_at_once(program, module):
    x = torch.randn(1, STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = module.whole(x)[0].numpy()
        keys = module.qkv(x).chunk(3, -1)[1].numpy()
    kinds = [op.kind for op in program.ops()]
    assert {"read_state", "write_state"} <= set(kinds)
    for _ in range(2):  # an empty dict begins anew
        kept: dict[str, np.ndarray] = {}
        for step in range(STEPS):
            found = program.run({"x": x[:, step : step + 1].numpy(), "place": place(step).numpy()}, states=kept)
            np.testing.assert_allclose(found["y"][0, 0], expected[step], atol=4e-3)  # the cache is fp16
            assert found["count"] == [step + 1]
        assert {name: (array.shape, array.dtype.name) for name, array in kept.items()} == {
            "keys": ((1, STEPS, WIDTH), "float16"),
            "values": ((1, STEPS, WIDTH), "float16"),
            "seen": ((1,), "float16"),
        }
        np.testing.assert_allclose(kept["keys"], keys, atol=2e-3)


def test_without_states_every_run_begins_anew_and_the_cache_matters(program, module):
    x = torch.randn(1, STEPS, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs = {"x": x[:, 1:2].numpy(), "place": place(1).numpy()}
    first, second = program.run(inputs), program.run(inputs)
    assert first["count"] == second["count"] == [1]
    with torch.no_grad():
        expected = module.whole(x)[0, 1].numpy()
    assert abs(first["y"][0, 0] - expected).max() > 0.05


def test_states_are_a_value_that_a_run_does_not_share(program):
    inputs = {"x": np.ones((1, 1, WIDTH), np.float32), "place": place(0).numpy()}
    kept: dict[str, np.ndarray] = {}
    program.run(inputs, states=kept)
    copy = {name: array.copy() for name, array in kept.items()}
    first = dict(kept)
    program.run(inputs, states=kept)
    assert kept["seen"] == [2]
    assert all((first[name] == copy[name]).all() for name in copy)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"keys": np.zeros((1, 2, WIDTH), np.float16)}, r"state 'keys' is float16 \(1, 2, 8\), .* float16 \(1, 6, 8\)"),
        ({"keys": np.zeros((1, STEPS, WIDTH), np.float32)}, r"state 'keys' is float32 \(1, 6, 8\), .* float16"),
        ({"cache": np.zeros(1, np.float16)}, "no state 'cache'; its states: "),
    ],
)
def test_a_state_that_does_not_fit_is_one_line(program, states, message):
    with pytest.raises(EdgeVitError, match=message) as error:
        program.run({"x": np.zeros((1, 1, WIDTH), np.float32), "place": place(0).numpy()}, states=states)
    assert "\n" not in str(error.value)


def test_a_state_is_written_slice_by_slice(tmp_path):
    module = Window()
    inputs = {"x": torch.zeros(3)}
    program = convert(scripted(module, *inputs.values()), module, inputs, ["y"], tmp_path / "window.mlpackage")
    assert "slice_update" in [op.kind for op in program.ops()]
    kept: dict[str, np.ndarray] = {}
    for step in range(6):
        x = torch.arange(3.0) + step
        with torch.no_grad():
            expected = module(x).numpy()
        assert program.run({"x": x.numpy()}, states=kept)["y"].tolist() == expected.tolist()
        assert kept["rows"].tolist() == module.rows.tolist()
