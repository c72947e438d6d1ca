"""Weights that Core ML packs, and recurrent layers: what the evaluator makes of them, against coremltools and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import pytest
import torch
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 (its own documentation's name)
from coremltools.converters.mil.mil import types
from mil_cases import normal
from torch import nn

from converters.mil import Program

# Built here by hand, so test_mil_ops.py counts them as tested.
TESTED = {"lstm", "gru", "rnn", "quantize", "dequantize", "read_state", "constexpr_cast"}
TESTED |= {"constexpr_affine_dequantize", "constexpr_lut_to_dense", "constexpr_sparse_to_dense"}
TESTED |= {"constexpr_blockwise_shift_scale", "constexpr_lut_to_sparse", "constexpr_sparse_blockwise_shift_scale"}


def saved(
    function: Callable, shapes: dict[str, tuple[int, ...]], path: Path, target: Any, dtype: Any = types.fp32
) -> Any:
    specs = {name: mb.TensorSpec(shape=shape, dtype=dtype) for name, shape in shapes.items()}
    program = mb.program(input_specs=list(specs.values()), opset_version=target)(function)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=target,
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(path))
    return Program(path)


def numbers(low: int, high: int, *shape: int, dtype: Any) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape).astype(dtype)


def packed(bits: np.ndarray, width: int) -> np.ndarray:
    """Numbers of `width` bits in bytes, the least significant bits first."""
    stream = (bits.reshape(-1, 1) >> np.arange(width)) & 1
    return np.packbits(stream.astype(np.uint8).flatten(), bitorder="little")


def bits_of(kind: str, array: np.ndarray) -> np.ndarray:
    return array.astype(types.nptype_from_builtin(types.string_to_builtin(kind)))


MASK = np.random.default_rng(2).integers(0, 2, (4, 6)).astype(np.uint8)
INDICES = numbers(0, 4, 4, 6, dtype=np.uint8)
KEPT = int(MASK.sum())
HALF = normal(4, 6).astype(np.float16)


def compressed() -> dict[str, tuple[Any, Callable[[], Any]]]:
    """Name → opset and a function that builds the op (inside a program) from constants."""
    old, new = ct.target.iOS16, ct.target.iOS18
    data8, data4 = numbers(-128, 128, 4, 6, dtype=np.int8), bits_of("int4", numbers(-8, 8, 4, 6, dtype=np.int8))
    scale, scale16 = abs(normal(2, 3)), abs(normal(2, 3)).astype(np.float16)
    tables = normal(1, 2, 4, 1)

    def lut(bits: int, vector: int = 1, **more: Any) -> Callable[[], Any]:
        indices = bits_of(f"uint{bits}", numbers(0, 2**bits, 4, 6, dtype=np.uint8))
        table = normal(1, 1, 2**bits, vector)
        return lambda: mb.constexpr_lut_to_dense(indices=indices, lut=table, **more)

    return {
        "affine": (
            old,
            lambda: mb.constexpr_affine_dequantize(
                quantized_data=data8, zero_point=np.int8([1, -2, 3, 0]), scale=abs(normal(4)), axis=np.int32(0)
            ),
        ),
        "affine fp16": (
            old,
            lambda: mb.constexpr_affine_dequantize(
                quantized_data=data8, zero_point=np.int8(3), scale=np.float16(0.017), axis=np.int32(0)
            ),
        ),
        "packed table": (
            old,
            lambda: mb.constexpr_lut_to_dense(indices=packed(INDICES, 2), lut=normal(4), shape=np.uint32([4, 6])),
        ),
        "packed table of 64": (
            old,
            lambda: mb.constexpr_lut_to_dense(
                indices=packed(np.arange(24), 6), lut=normal(64), shape=np.uint32([4, 6])
            ),
        ),
        "packed mask": (
            old,
            lambda: mb.constexpr_sparse_to_dense(
                nonzero_data=normal(KEPT), mask=packed(MASK, 1), shape=np.uint32([4, 6])
            ),
        ),
        "cast": (old, lambda: mb.constexpr_cast(source_val=HALF, output_dtype="fp32")),
        "blocks": (new, lambda: mb.constexpr_blockwise_shift_scale(data=data8, scale=scale)),
        "blocks of int4": (
            new,
            lambda: mb.constexpr_blockwise_shift_scale(
                data=data4, scale=scale16, offset=bits_of("int4", np.int8([[1, 2, 3], [-1, 0, -8]]))
            ),
        ),
        **{f"table of {bits} bits": (new, lut(bits)) for bits in (1, 2, 3, 4, 6, 8)},
        "tables": (new, lambda: mb.constexpr_lut_to_dense(indices=bits_of("uint2", INDICES), lut=tables)),
        "vectors": (new, lut(2, 3, vector_axis=np.int32(0))),
        "vectors along the last": (new, lut(2, 2, vector_axis=np.int32(-1))),
        "mask": (new, lambda: mb.constexpr_sparse_to_dense(nonzero_data=normal(KEPT), mask=bits_of("uint1", MASK))),
        "table under a mask": (
            new,
            lambda: dense(
                mb.constexpr_lut_to_sparse(
                    indices_mask=bits_of("uint1", MASK),
                    indices_nonzero_data=bits_of("uint2", INDICES[MASK != 0]),
                    lut=tables,
                )
            ),
        ),
        "blocks under a mask": (
            new,
            lambda: dense(
                mb.constexpr_sparse_blockwise_shift_scale(
                    data_mask=bits_of("uint1", MASK), nonzero_data=data8[MASK != 0], scale=scale
                )
            ),
        ),
    }


def dense(mask_and_data: Any) -> Any:
    mask, data = mask_and_data
    return mb.constexpr_sparse_to_dense(nonzero_data=data, mask=mask)


def materialized(var: Any) -> np.ndarray:
    """coremltools' own decompression, through a chain of two ops if need be."""
    op = var.op
    if op.op_type == "constexpr_sparse_to_dense" and op.opset_version == ct.target.iOS18:
        inner = op.nonzero_data.op
        if inner is not None and inner.op_type != "const":
            mask, data = inner.materialized_val_inference()
            return op.decompress(data, mask)
    return op.materialized_val_inference()


@pytest.mark.parametrize("name", compressed())
def test_packed_weights_are_what_coremltools_unpacks(name, tmp_path):
    target, build = compressed()[name]
    expected: list[np.ndarray] = []

    def function(x: Any) -> Any:
        weight = build()
        expected.append(materialized(weight))
        return mb.add(x=x, y=mb.cast(x=weight, dtype="fp32"), name="y")

    program = saved(function, {"x": (1,)}, tmp_path / "packed.mlpackage", target)
    found = program.run({"x": np.zeros(1, np.float32)})["y"]
    assert expected[0].std() > 0
    assert found.tolist() == expected[0].astype(np.float32).tolist()  # to the bit


@pytest.mark.parametrize("kind", ["int8", "uint8"])
@pytest.mark.parametrize("axis", [None, 1])
def test_quantised_activations(kind, axis, tmp_path):
    scale = np.float32(0.005) if axis is None else np.float32([0.004, 0.006, 0.008])
    zero = np.dtype(kind).type(5) if axis is None else np.array([1, 2, 3], kind)
    more = {} if axis is None else {"axis": np.int32(axis)}

    def function(x: Any) -> Any:
        q = mb.quantize(input=x, scale=scale, zero_point=zero, output_dtype=kind, **more)
        return mb.dequantize(input=q, scale=scale, zero_point=zero, name="y", **more)

    x = normal(2, 3, 40)
    found = saved(function, {"x": x.shape}, tmp_path / "q.mlpackage", ct.target.iOS17).run({"x": x})["y"]
    by_axis = (lambda v: v) if axis is None else (lambda v: v.reshape(3, 1))
    steps = np.round(x / by_axis(scale)) + by_axis(zero).astype(np.float32)
    limits = np.iinfo(kind)
    np.testing.assert_allclose(found, (steps.clip(limits.min, limits.max) - by_axis(zero)) * by_axis(scale), rtol=1e-6)
    assert (steps > limits.max).any(), "nothing was clipped"


def forward(layer: nn.Module, x: np.ndarray, *states: np.ndarray) -> list[np.ndarray]:
    """torch's outputs as Core ML lays them out: the sequence, then each state as (N, directions × H)."""
    given = [
        torch.from_numpy(state.reshape(len(state), -1, layer.hidden_size)).transpose(0, 1).contiguous()
        for state in states
    ]
    with torch.no_grad():
        y, last = layer(torch.from_numpy(x), tuple(given) if len(given) > 1 else given[0])
    last = last if isinstance(last, tuple) else (last,)
    return [y.numpy(), *(state.transpose(0, 1).flatten(1).numpy() for state in last)]


def in_order(weight: torch.Tensor, order: str, torchs: str) -> np.ndarray:
    """Rows of a torch weight, gate by gate, in Core ML's order of gates."""
    return torch.cat([weight.chunk(len(torchs))[torchs.index(gate)] for gate in order]).detach().numpy()


def weights(layer: nn.Module, order: str, torchs: str, back: bool = False) -> dict[str, np.ndarray]:
    end, suffix = ("_reverse", "_back") if back else ("", "")
    found = {
        f"weight_{side}{suffix}": in_order(getattr(layer, f"weight_{side}_l0{end}"), order, torchs)
        for side in ("ih", "hh")
    }
    both = getattr(layer, f"bias_ih_l0{end}") + getattr(layer, f"bias_hh_l0{end}")
    return found | {f"bias{suffix}": in_order(both, order, torchs)}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("whole", [True, False])
def test_lstm_is_torchs(direction, whole, tmp_path):
    torch.manual_seed(0)
    two = direction == "bidirectional"
    layer = nn.LSTM(3, 5, bidirectional=two)
    given = weights(layer, "ifoz", "ifzo") | (weights(layer, "ifoz", "ifzo", back=True) if two else {})
    x, h, c = normal(4, 2, 3), normal(2, 10 if two else 5), normal(2, 10 if two else 5)

    def function(x: Any, initial_h: Any, initial_c: Any) -> Any:
        states = {"initial_h": initial_h, "initial_c": initial_c}
        return mb.lstm(x=x, **states, **given, direction=direction, output_sequence=whole)

    fed = {"x": x, "initial_h": h, "initial_c": c}
    program = saved(
        function, {name: value.shape for name, value in fed.items()}, tmp_path / "r.mlpackage", ct.target.iOS16
    )
    expected = forward(layer, x[::-1].copy() if direction == "reverse" else x, h, c)
    if direction == "reverse":
        expected[0] = expected[0][::-1]
    compare(program.run(fed), expected, whole, direction)


@pytest.mark.parametrize("kind", ["gru", "rnn"])
def test_gru_and_rnn_are_torchs(kind, tmp_path):
    torch.manual_seed(0)
    layer = (nn.GRU if kind == "gru" else nn.RNN)(3, 5)
    order = ("roz", "rzo") if kind == "gru" else ("h", "h")
    given = weights(layer, *order)
    more: dict[str, Any] = {}
    if kind == "gru":  # the reset gate takes W_ho h + b_ho as a whole, so the two biases stay apart
        biases = {
            name: in_order(getattr(layer, f"{theirs}_l0"), *order)
            for name, theirs in (("bias", "bias_hh"), ("input_bias", "bias_ih"))
        }
        given, more = given | biases, {"reset_after": True}
    x, h = normal(4, 2, 3), normal(2, 5)

    def function(x: Any, initial_h: Any) -> Any:
        return getattr(mb, kind)(x=x, initial_h=initial_h, **given, output_sequence=True, **more)

    program = saved(function, {"x": x.shape, "initial_h": h.shape}, tmp_path / "r.mlpackage", ct.target.iOS18)
    compare(program.run({"x": x, "initial_h": h}), forward(layer, x, h), True, "forward")


def compare(found: dict[str, np.ndarray], expected: list[np.ndarray], whole: bool, direction: str) -> None:
    """Without the whole sequence there is one step of it: the last that each direction took."""
    if not whole:
        last = expected[0][:1] if direction == "reverse" else expected[0][-1:]
        if direction == "bidirectional":
            half = last.shape[-1] // 2
            last = np.concatenate([last[..., :half], expected[0][:1, :, half:]], -1)
        expected = [last, *expected[1:]]
    for array, name in zip(expected, found, strict=True):
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(8, 64, 3), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).mean((2, 3)))


RECIPES: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "int8": (ct.target.iOS16, lambda m: cto.linear_quantize_weights(m, quantization(cto.OpLinearQuantizerConfig()))),
    "int4 in blocks": (ct.target.iOS18, lambda m: cto.linear_quantize_weights(m, quantization(
        cto.OpLinearQuantizerConfig(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=32)))),
    "palette": (ct.target.iOS16, lambda m: cto.palettize_weights(m, quantization(
        cto.OpPalettizerConfig(mode="uniform", nbits=4)))),
    "palettes": (ct.target.iOS18, lambda m: cto.palettize_weights(m, quantization(
        cto.OpPalettizerConfig(mode="uniform", nbits=3, granularity="per_grouped_channel", group_size=16)))),
    "sparse": (ct.target.iOS16, lambda m: cto.prune_weights(m, quantization(
        cto.OpMagnitudePrunerConfig(target_sparsity=0.5, weight_threshold=16)))),
}  # fmt: skip


def quantization(config: Any) -> Any:
    return cto.OptimizationConfig(global_config=config)


@pytest.mark.parametrize("name", RECIPES)
def test_a_compressed_package_runs_like_its_decompressed_twin(name, tmp_path):
    target, compress = RECIPES[name]
    torch.manual_seed(0)
    exported = torch.export.export(Two().eval(), (torch.zeros(1, 8, 6, 6),)).run_decompositions({})
    model = ct.convert(exported, minimum_deployment_target=target, skip_model_load=True)
    small = compress(model)
    small.save(str(tmp_path / "small.mlpackage"))
    cto.decompress_weights(small).save(str(tmp_path / "large.mlpackage"))
    kinds = {item.type for item in operations(tmp_path / "small.mlpackage")}
    assert any(kind.startswith("constexpr_") for kind in kinds), kinds
    one, two = (Program(tmp_path / f"{which}.mlpackage") for which in ("small", "large"))
    x = {next(iter(one.inputs())): normal(1, 8, 6, 6)}
    for found, expected in zip(one.run(x).values(), two.run(x).values(), strict=True):
        assert found.tolist() == expected.tolist()  # to the bit


def operations(path: Path) -> Any:
    function = ct.utils.load_spec(str(path)).mlProgram.functions["main"]
    return function.block_specializations[function.opset].operations
