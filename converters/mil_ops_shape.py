"""Core ML ops on shapes: reshaping, slicing, joining, padding, making tensors, and moving blocks of pixels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from converters.mil_ops_layers import padded
from converters.mil_table import OPS, Function, Op, op, plain

# Shapes and elements


@op("x", selects=True)
def reshape(*, shape: list[int]) -> Function:
    return lambda x: x.reshape([x.shape[i] if size == 0 else size for i, size in enumerate(shape)])


@op("x", selects=True)
def transpose(*, perm: list[int]) -> Function:
    return lambda x: x.permute(perm)


@op("x", selects=True)
def expand_dims(*, axes: list[int]) -> Function:
    def run(x: Tensor) -> Tensor:
        rank = x.dim() + len(axes)
        for axis in sorted(axis % rank for axis in axes):
            x = x.unsqueeze(axis)
        return x

    return run


@op("x", selects=True)
def squeeze(*, axes: list[int] | None = None) -> Function:
    return lambda x: x.squeeze() if axes is None else x.squeeze(axes)


@op("*values", selects=True)
def concat(*, axis: int, interleave: bool = False) -> Function:
    if interleave:
        return lambda values: torch.stack(values, axis % values[0].dim() + 1).flatten(
            axis % values[0].dim(), axis % values[0].dim() + 1
        )
    return lambda values: torch.cat([value.reshape(1) if value.dim() == 0 else value for value in values], axis)


@op("*values", selects=True)
def stack(*, axis: int) -> Function:
    return lambda values: torch.stack(values, axis)


@op("x", selects=True)
def split(*, axis: int, num_splits: int | None = None, split_sizes: list[int] | None = None) -> Function:
    def run(x: Tensor) -> Sequence[Tensor]:
        sizes = split_sizes or [x.shape[axis] // (num_splits or 1)] * (num_splits or 1)
        return x.split(sizes, axis)

    return run


@op("x", selects=True)
def slice_by_index(
    *,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: list[bool] | None = None,
    end_mask: list[bool] | None = None,
    squeeze_mask: list[bool] | None = None,
) -> Function:
    index = _index(begin, end, stride, begin_mask, end_mask, squeeze_mask)

    def run(x: Tensor) -> Tensor:
        for axis in reversed(range(len(index))):  # from the last, so that a squeezed axis moves none that follows
            chosen = index[axis]
            if isinstance(chosen, int):
                x = x.select(axis, chosen)
            elif chosen.step > 0:
                x = x[(slice(None),) * axis + (chosen,)]
            else:
                x = x.index_select(axis, torch.tensor(range(*chosen.indices(x.shape[axis])), dtype=torch.int64))
        return x

    return run


@op("x", "update", selects=True)
def slice_update(
    *,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: list[bool] | None = None,
    end_mask: list[bool] | None = None,
    squeeze_mask: list[bool] | None = None,
) -> Function:
    chosen = slice_by_index(
        begin=begin, end=end, stride=stride, begin_mask=begin_mask, end_mask=end_mask, squeeze_mask=squeeze_mask
    )

    def run(x: Tensor, update: Tensor) -> Tensor:
        places = chosen(torch.arange(x.numel()).reshape(x.shape))
        if places.shape != update.shape:
            raise ValueError(f"the slice is {tuple(places.shape)}, the update {tuple(update.shape)}")
        return x.flatten().scatter(0, places.flatten(), update.flatten()).reshape(x.shape)

    return run


def _index(
    begin: list[int],
    end: list[int],
    stride: list[int] | None,
    begin_mask: list[bool] | None,
    end_mask: list[bool] | None,
    squeeze_mask: list[bool] | None,
) -> list[int | slice]:
    """What each dimension is indexed with. A masked begin or end is that of the whole dimension, as Python has it."""
    steps, no = stride or [1] * len(begin), [False] * len(begin)
    masks = zip(begin_mask or no, end_mask or no, squeeze_mask or no, strict=True)
    index: list[int | slice] = []
    for first, last, step, (from_start, to_end, squeezed) in zip(begin, end, steps, masks, strict=True):
        if squeezed:
            index.append(0 if from_start else first)
        else:
            index.append(slice(None if from_start else first, None if to_end else last, step))
    return index


@op("x", selects=True)
def slice_by_size(*, begin: list[int], size: list[int]) -> Function:
    def run(x: Tensor) -> Tensor:
        starts = [first % n for first, n in zip(begin, x.shape, strict=True)]
        return x[tuple(slice(a, None if n == -1 else a + n) for a, n in zip(starts, size, strict=True))]

    return run


@op("x", selects=True)
def pad(*, pad: list[int], mode: str = "constant", constant_val: float = 0.0) -> Function:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    if mode == "constant":
        return lambda x: padded(x, pairs, constant_val)
    if mode not in ("reflect", "replicate"):
        raise NotImplementedError(f"mode {mode!r}")
    while pairs and pairs[0] == (0, 0):
        del pairs[0]
    if len(pairs) > 3:
        raise NotImplementedError(f"mode {mode!r} over more than the last three dimensions")

    def run(x: Tensor) -> Tensor:
        # torch takes these modes with exactly two dimensions before the padded ones.
        shape = x.shape[-len(pairs) :]
        y = F.pad(x.reshape(1, -1, *shape), [amount for pair in reversed(pairs) for amount in pair], mode=mode)
        return y.reshape(*x.shape[: -len(pairs)], *y.shape[2:])

    return run


@op("x", selects=True)
def tile(*, reps: list[int]) -> Function:
    return lambda x: x.repeat(reps)


@op("x", selects=True)
def reverse(*, axes: list[int] | None = None) -> Function:
    return lambda x: x.flip(list(range(x.dim())) if axes is None else axes)


@op("x", "lengths", selects=True)
def reverse_sequence(*, seq_axis: int = 0, batch_axis: int = 0) -> Function:
    """The first `lengths[i]` elements along `seq_axis`, of the i-th along `batch_axis`, in reverse order."""

    def run(x: Tensor, lengths: Tensor) -> Tensor:
        y = x.movedim((batch_axis, seq_axis), (0, 1))
        place = torch.arange(y.shape[1]).expand(y.shape[0], -1)
        reversed_ = lengths.long()[:, None] - 1 - place
        place = torch.where(reversed_ >= 0, reversed_, place)
        return y[torch.arange(y.shape[0])[:, None], place].movedim((0, 1), (batch_axis, seq_axis))

    return run


@op("x", selects=True)
def flatten2d(*, axis: int = 1) -> Function:
    def run(x: Tensor) -> Tensor:
        before = x.shape[:axis].numel()
        return x.reshape(before, x.numel() // before)

    return run


@op("x", selects=True)
def sliding_windows(*, axis: int, size: int, stride: int = 1) -> Function:
    return lambda x: x.unfold(axis, size, stride).movedim(-1, axis % x.dim() + 1)


# Making tensors. `fill` and `range_1d` take no tensor: their arguments are numbers, constant or computed.

plain({"shape": lambda x: torch.tensor(x.shape, dtype=torch.int32)}, "x")
_HELD = {bool: torch.bool, int: torch.int32, float: torch.float32}


@op(selects=True)
def fill(*, shape: list[int], value: bool | int | float = 0.0) -> Function:
    return lambda: torch.full(shape, value, dtype=_HELD[type(value)])


@op("ref_tensor", selects=True)
def fill_like(*, value: bool | int | float = 0.0) -> Function:
    return lambda ref_tensor: torch.full(ref_tensor.shape, value, dtype=_HELD[type(value)])


@op()
def range_1d(*, end: int | float, start: int | float, step: int | float) -> Function:
    return lambda: torch.arange(start, end, step, dtype=_HELD[type(start)])


@op("indices", selects=True)
def one_hot(
    *,
    one_hot_vector_size: int,
    axis: int = -1,
    on_value: bool | int | float = 1,
    off_value: bool | int | float = 0,
) -> Function:
    """An index outside the vector makes one of `off_value` alone."""

    def run(indices: Tensor) -> Tensor:
        hot = indices.long()[..., None] == torch.arange(one_hot_vector_size)
        on, off = (torch.tensor(value, dtype=_HELD[type(on_value)]) for value in (on_value, off_value))
        return torch.where(hot, on, off).movedim(-1, axis)

    return run


# Blocks of pixels in (N, C, H, W)


@op("x", selects=True)
def pixel_shuffle(*, upscale_factor: int) -> Function:
    return lambda x: F.pixel_shuffle(x, upscale_factor)


@op("x", selects=True)
def pixel_unshuffle(*, downscale_factor: int) -> Function:
    return lambda x: F.pixel_unshuffle(x, downscale_factor)


@op("x", selects=True)
def depth_to_space(*, block_size: int) -> Function:
    """Unlike in pixel_shuffle, a block's pixels stand before the channels: channel (row · b + column) · C + c."""

    def run(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.reshape(n, block_size, block_size, c // block_size**2, h, w)
        return y.permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * block_size, w * block_size)

    return run


@op("x", selects=True)
def space_to_depth(*, block_size: int) -> Function:
    def run(x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.reshape(n, c, h // block_size, block_size, w // block_size, block_size)
        return y.permute(0, 3, 5, 1, 2, 4).reshape(n, -1, h // block_size, w // block_size)

    return run


@op("x", selects=True)
def space_to_batch(*, block_shape: list[int], paddings: list[list[int]]) -> Function:
    def run(x: Tensor) -> Tensor:
        x = padded(x, [(before, after) for before, after in paddings])
        (n, c, h, w), (rows, columns) = x.shape, block_shape
        y = x.reshape(n, c, h // rows, rows, w // columns, columns)
        return y.permute(3, 5, 0, 1, 2, 4).reshape(-1, c, h // rows, w // columns)

    return run


@op("x", selects=True)
def batch_to_space(*, block_shape: list[int], crops: list[list[int]]) -> Function:
    def run(x: Tensor) -> Tensor:
        (n, c, h, w), (rows, columns), (vertical, horizontal) = x.shape, block_shape, crops
        y = x.reshape(rows, columns, n // (rows * columns), c, h, w).permute(2, 3, 4, 0, 5, 1)
        y = y.reshape(-1, c, h * rows, w * columns)
        bottom, right = y.shape[2] - vertical[1], y.shape[3] - horizontal[1]
        return y[:, :, vertical[0] : bottom, horizontal[0] : right]

    return run


# Both read and give back what they are given: a state, and its new content, are values like any other here.
OPS["read_state"] = Op(("input",), lambda: lambda state: state, selects=True)
