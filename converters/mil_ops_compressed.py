"""Core ML ops that unpack compressed weights (`constexpr_*`, iOS 16 and iOS 18), and (de)quantise activations.

Some have two forms of the same name: iOS 16's has packed bytes and a shape, iOS 18's a tensor of few bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from converters.mil_table import Function, op


@op("quantized_data", "zero_point", "scale")
def constexpr_affine_dequantize(*, axis: int) -> Function:
    def run(data: Tensor, zero_point: Tensor, scale: Tensor) -> Tensor:
        return (data.float() - _on_axis(zero_point, data, axis)) * _on_axis(scale, data, axis)

    return run


@op("source_val", selects=True)
def constexpr_cast(*, output_dtype: str) -> Function:
    if output_dtype != "fp32":
        raise NotImplementedError(f"output_dtype {output_dtype!r}")
    return lambda source_val: source_val


@op("indices", "lut", selects=True)
def constexpr_lut_to_dense(*, shape: list[int] | None = None, vector_axis: int | None = None) -> Function:
    """iOS 16: `indices` are packed bits, `lut` (P,). iOS 18: indices of the weight's rank, `lut` (blocks…, P, V)."""

    def run(indices: Tensor, lut: Tensor) -> Tensor:
        if shape is None:
            return _looked_up(indices, lut, vector_axis)
        bits = int(math.log2(len(lut)))
        return lut[_unpacked(indices, bits, math.prod(shape))].reshape(shape)

    return run


@op("nonzero_data", "mask", selects=True)
def constexpr_sparse_to_dense(*, shape: list[int] | None = None) -> Function:
    def run(nonzero_data: Tensor, mask: Tensor) -> Tensor:
        if shape is not None:
            mask = _unpacked(mask, 1, math.prod(shape)).reshape(shape)
        return _spread(nonzero_data, mask)

    return run


@op("data", "scale", "offset?")
def constexpr_blockwise_shift_scale() -> Function:
    """(data − offset) × scale; each element of `scale` serves a block of `data`."""

    def run(data: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
        return _shifted_and_scaled(data, scale, offset)

    return run


@op("indices_mask", "indices_nonzero_data", "lut", selects=True)
def constexpr_lut_to_sparse(*, vector_axis: int | None = None) -> Function:
    """The mask of the unpacked weight, and its elements that are not zero."""

    def run(mask: Tensor, indices: Tensor, lut: Tensor) -> tuple[Tensor, Tensor]:
        dense = _looked_up(_spread(indices, mask), lut, vector_axis)
        if vector_axis is not None:
            mask = mask.repeat_interleave(lut.shape[-1], vector_axis)
        return mask, dense[mask != 0]

    return run


@op("data_mask", "nonzero_data", "scale", "offset?")
def constexpr_sparse_blockwise_shift_scale() -> Function:
    def run(mask: Tensor, data: Tensor, scale: Tensor, offset: Tensor | None) -> tuple[Tensor, Tensor]:
        return mask, _shifted_and_scaled(_spread(data, mask), scale, offset)[mask != 0]

    return run


@op("input", "zero_point?", "scale")
def quantize(*, output_dtype: str, axis: int | None = None) -> Function:
    """clip(round(input / scale) + zero_point), rounding halves to even."""
    if output_dtype not in ("int8", "uint8"):
        raise NotImplementedError(f"output_dtype {output_dtype!r}")
    kept = getattr(torch, output_dtype)
    limits = torch.iinfo(kept)

    def run(x: Tensor, zero_point: Tensor | None, scale: Tensor) -> Tensor:
        y = torch.round(x / _on_axis(scale, x, axis))
        if zero_point is not None:
            y = y + _on_axis(zero_point, x, axis)
        return y.clamp(limits.min, limits.max).to(kept)

    return run


@op("input", "zero_point?", "scale")
def dequantize(*, axis: int | None = None) -> Function:
    def run(x: Tensor, zero_point: Tensor | None, scale: Tensor) -> Tensor:
        y = x.float() if zero_point is None else x.float() - _on_axis(zero_point, x, axis)
        return y * _on_axis(scale, x, axis)

    return run


def _on_axis(value: Tensor, data: Tensor, axis: int | None) -> Tensor:
    """A scalar, or a vector along `axis`, in the rank of `data`."""
    if value.dim() == 0 or axis is None:
        return value.float()
    sizes = [1] * data.dim()
    sizes[axis] = -1
    return value.float().reshape(sizes)


def _blocks(value: Tensor, shape: torch.Size) -> Tensor:
    """`value` repeated until it has `shape`, each element as a block."""
    for axis, size in enumerate(shape):
        if value.shape[axis] != size:
            value = value.repeat_interleave(size // value.shape[axis], axis)
    return value


def _shifted_and_scaled(data: Tensor, scale: Tensor, offset: Tensor | None) -> Tensor:
    y = data.float()
    if offset is not None:
        y = y - _blocks(offset.float(), data.shape)
    return y * _blocks(scale, data.shape)


def _spread(nonzero: Tensor, mask: Tensor) -> Tensor:
    dense = torch.zeros(mask.shape, dtype=nonzero.dtype)
    dense[mask != 0] = nonzero
    return dense


def _looked_up(indices: Tensor, lut: Tensor, vector_axis: int | None) -> Tensor:
    """Each index replaced by its entry of its block's table; an entry of several elements lies along `vector_axis`."""
    palette, vector = lut.shape[-2:]
    tables = lut
    for axis, size in enumerate(indices.shape):
        if lut.shape[axis] not in (1, size):
            tables = tables.repeat_interleave(size // lut.shape[axis], axis)
    tables = tables.expand(*indices.shape, palette, vector)
    index = indices.long()[..., None, None].expand(*indices.shape, 1, vector)
    entries = tables.gather(-2, index).squeeze(-2)  # (indices…, vector)
    if vector == 1 or vector_axis is None:
        return entries.squeeze(-1)
    axis = vector_axis % indices.dim()
    return entries.movedim(-1, axis + 1).flatten(axis, axis + 1)


def _unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """`count` numbers of `bits` bits each out of bytes, the least significant bits first."""
    stream = (packed[:, None].int() >> torch.arange(8)) & 1
    numbers = stream.flatten()[: count * bits].reshape(count, bits)
    return (numbers << torch.arange(bits)).sum(-1)
