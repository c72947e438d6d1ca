"""Core ML ops that read and write elements by index. An index out of range raises here: hardware leaves it open."""

from __future__ import annotations

import torch
from torch import Tensor

from converters.mil_table import Function, op


@op("x", "indices", selects=True)
def gather(*, axis: int = 0, batch_dims: int = 0, validate_indices: bool = False) -> Function:
    """x.shape[:axis] + indices.shape[batch_dims:] + x.shape[axis + 1:]."""

    def run(x: Tensor, indices: Tensor) -> Tensor:
        dim = axis % x.dim()
        index = _counted_from_start(indices, x.shape[dim])
        if not batch_dims:
            return x.index_select(dim, index.flatten()).reshape(x.shape[:dim] + index.shape + x.shape[dim + 1 :])
        batch, between, after = x.shape[:batch_dims], x.shape[batch_dims:dim], x.shape[dim + 1 :]
        rows = x.reshape(batch.numel(), between.numel(), x.shape[dim], after.numel()).movedim(2, 1)
        chosen = rows[torch.arange(batch.numel())[:, None], index.reshape(batch.numel(), -1)]
        return chosen.movedim(1, 2).reshape(batch + between + index.shape[batch_dims:] + after)

    return run


@op("x", "indices", selects=True)
def gather_along_axis(*, axis: int = 0, validate_indices: bool = False) -> Function:
    return lambda x, indices: x.gather(axis, _counted_from_start(indices, x.shape[axis]))


@op("x", "indices", selects=True)
def gather_nd(*, batch_dims: int = 0, validate_indices: bool = False) -> Function:
    def run(x: Tensor, indices: Tensor) -> Tensor:
        index = tuple(indices.long().unbind(-1))
        for dim in range(batch_dims):  # a batch dimension is indexed by its own position
            places = torch.arange(x.shape[dim])
            index = (*index[:dim], places.reshape(-1, *[1] * (indices.dim() - 2 - dim)), *index[dim:])
        return x[index]

    return run


@op("data", "indices", "updates")
def scatter(*, axis: int = 0, mode: str = "add", validate_indices: bool = False) -> Function:
    return _scattered(gather(axis=axis), mode)


@op("data", "indices", "updates")
def scatter_along_axis(*, axis: int = 0, mode: str = "add", validate_indices: bool = False) -> Function:
    return _scattered(gather_along_axis(axis=axis), mode)


@op("data", "indices", "updates")
def scatter_nd(*, mode: str = "add", validate_indices: bool = False) -> Function:
    return _scattered(gather_nd(), mode)


@op("x", selects=True)
def non_zero() -> Function:
    return lambda x: torch.nonzero(x).int()


_REDUCTIONS = {"add": "sum", "sub": "sum", "mul": "prod", "div": "prod", "max": "amax", "min": "amin"}


def _scattered(places: Function, mode: str) -> Function:
    """`places(x, indices)` reads the elements that are written: on a tensor of positions it says where they are."""
    if mode not in ("update", *_REDUCTIONS):
        raise NotImplementedError(f"mode {mode!r}")

    def run(data: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        where = places(torch.arange(data.numel()).reshape(data.shape), indices).flatten()
        values = updates.flatten()
        if mode == "update":
            return data.flatten().scatter(0, where, values).reshape(data.shape)
        values = -values if mode == "sub" else 1 / values if mode == "div" else values
        return data.flatten().scatter_reduce(0, where, values, _REDUCTIONS[mode]).reshape(data.shape)

    return run


def _counted_from_start(indices: Tensor, size: int) -> Tensor:
    index = indices.long()
    return torch.where(index < 0, index + size, index)
