"""Core ML ops that sample pictures (…, H, W) on another grid.

A grid is the list of input positions of each output element along one axis. They follow the formulas in the docstring
of coremltools' resize_bilinear (and upsample_bilinear, whose two grids are among its five).
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from converters.mil_table import Function, op

GRIDS = ("STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS")


@op("x")
def upsample_bilinear(
    *,
    scale_factor_height: float = 1,
    scale_factor_width: float = 1,
    align_corners: bool = True,
    half_pixel_centers: bool | None = None,
) -> Function:
    if half_pixel_centers not in (None, not align_corners):
        raise NotImplementedError(f"align_corners {align_corners} with half_pixel_centers {half_pixel_centers}")
    mode = "STRICT_ALIGN_CORNERS" if align_corners else "UNALIGN_CORNERS"

    def run(x: Tensor) -> Tensor:
        height, width = _scaled(x, scale_factor_height, scale_factor_width)
        return _bilinear(x, {-2: height, -1: width}, mode)

    return run


@op("x")
def resize_bilinear(
    *, target_size_height: int = 1, target_size_width: int = 1, sampling_mode: str = "DEFAULT"
) -> Function:
    _check_mode(sampling_mode)
    return lambda x: _bilinear(x, {-2: target_size_height, -1: target_size_width}, sampling_mode)


@op("x", selects=True)
def upsample_nearest_neighbor(*, scale_factor_height: float = 1, scale_factor_width: float = 1) -> Function:
    return lambda x: _nearest(x, dict(zip((-2, -1), _scaled(x, scale_factor_height, scale_factor_width), strict=True)))


@op("x", selects=True)
def resize_nearest_neighbor(*, target_size_height: int, target_size_width: int) -> Function:
    return lambda x: _nearest(x, {-2: target_size_height, -1: target_size_width})


@op("x")
def resize(
    *,
    shape: list[int],
    resized_dims: int,
    interpolation_mode: str = "LINEAR",
    sampling_mode: str = "DEFAULT",
) -> Function:
    """The last `resized_dims` dimensions take the last sizes of `shape`, in which 0 keeps one.

    Of nearest neighbours only the DEFAULT grid i · size / count is known to be rounded down, as torch does.
    """
    _check_mode(sampling_mode)
    nearest = interpolation_mode == "NEAREST_NEIGHBOR"
    if (not nearest and interpolation_mode != "LINEAR") or (nearest and sampling_mode != "DEFAULT"):
        raise NotImplementedError(f"interpolation_mode {interpolation_mode!r} with sampling_mode {sampling_mode!r}")
    sizes = {i - resized_dims: size for i, size in enumerate(shape[len(shape) - resized_dims :])}

    def run(x: Tensor) -> Tensor:
        wanted = {axis: size or x.shape[axis] for axis, size in sizes.items()}
        return _nearest(x, wanted) if nearest else _bilinear(x, wanted, sampling_mode)

    return run


@op("x", selects=True)
def crop(*, crop_height: list[int], crop_width: list[int]) -> Function:
    top, left = crop_height[0], crop_width[0]
    return lambda x: x[..., top : x.shape[-2] - crop_height[1], left : x.shape[-1] - crop_width[1]]


@op("x", "boxes", "box_indices?")
def crop_resize(
    *,
    target_height: int = 1,
    target_width: int = 1,
    normalized_coordinates: bool = False,
    spatial_scale: float = 1.0,
    box_coordinate_mode: str = "CORNERS_HEIGHT_FIRST",
    sampling_mode: str = "DEFAULT",
    pad_value: float = 0.0,
) -> Function:
    """iOS 17's form: boxes (N, 4), corners inclusive, and the picture that each is cut from.

    A box over the border is refused: what `pad_value` then touches is not written down.
    """
    _check_mode(sampling_mode)
    if pad_value:
        raise NotImplementedError(f"pad_value {pad_value}")
    if not box_coordinate_mode.startswith("CORNERS"):
        raise NotImplementedError(f"box_coordinate_mode {box_coordinate_mode!r}")
    order = [0, 1, 2, 3] if box_coordinate_mode == "CORNERS_HEIGHT_FIRST" else [1, 0, 3, 2]

    def run(x: Tensor, boxes: Tensor, box_indices: Tensor | None) -> Tensor:
        last = torch.tensor([x.shape[-2] - 1, x.shape[-1] - 1] * 2, dtype=torch.float32)
        corners = boxes.float()[:, order] * spatial_scale * (last if normalized_coordinates else 1)
        if bool(((corners < 0) | (corners > last)).any()):
            raise ValueError("a box reaches over the picture's border")
        which = range(len(boxes)) if box_indices is None else box_indices.tolist()
        pieces = []
        for number, (top, left, bottom, right) in zip(which, corners.tolist(), strict=True):
            rows = top + _grid(bottom - top + 1, target_height, sampling_mode)
            columns = left + _grid(right - left + 1, target_width, sampling_mode)
            pieces.append(_along(_along(x[number], -2, rows), -1, columns))
        return torch.stack(pieces)

    return run


_PADDING = {"constant": "zeros", "border": "border", "reflection": "reflection", "symmetric": "reflection"}


@op("x", "coordinates")
def resample(
    *,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Function:
    """torch's grid_sample, where it is that; its two ways to reflect are Core ML's reflection and symmetric."""
    reflects = {"reflection": True, "symmetric": False}.get(padding_mode, align_corners)
    if coordinates_mode != "normalized_minus_one_to_one" or reflects != align_corners:
        raise NotImplementedError(f"coordinates_mode {coordinates_mode!r} with padding_mode {padding_mode!r}")
    if sampling_mode not in ("bilinear", "nearest") or padding_mode not in _PADDING:
        raise NotImplementedError(f"sampling_mode {sampling_mode!r} with padding_mode {padding_mode!r}")
    if padding_mode == "constant" and padding_value:
        raise NotImplementedError(f"padding_value {padding_value}")
    padding = _PADDING[padding_mode]
    return lambda x, coordinates: F.grid_sample(x, coordinates.float(), sampling_mode, padding, align_corners)


@op("x", "transform_matrix")
def affine(
    *,
    output_height: int,
    output_width: int,
    sampling_mode: str,
    padding_mode: str,
    padding_value: float,
    coordinates_mode: str,
    align_corners: bool,
) -> Function:
    sample = resample(
        sampling_mode=sampling_mode,
        padding_mode=padding_mode,
        padding_value=padding_value,
        coordinates_mode=coordinates_mode,
        align_corners=align_corners,
    )

    def run(x: Tensor, transform_matrix: Tensor) -> Tensor:
        matrix = transform_matrix.reshape(-1, 2, 3).expand(x.shape[0], -1, -1)
        return sample(x, F.affine_grid(matrix, [*x.shape[:2], output_height, output_width], align_corners))

    return run


def _check_mode(sampling_mode: str) -> None:
    if sampling_mode not in GRIDS:
        raise NotImplementedError(f"sampling_mode {sampling_mode!r}")


def _grid(size: float, count: int, mode: str) -> Tensor:
    """`count` positions in 0 … size − 1. `size` may be a fraction: the extent of a box."""
    i, last = torch.arange(count, dtype=torch.float64), size - 1
    if mode == "UNALIGN_CORNERS":
        grid = (i + 0.5) * size / count - 0.5
    elif mode == "DEFAULT":
        grid = i * size / count
    elif mode == "OFFSET_CORNERS":
        grid = (i + 0.5) * max(1.0, last) / count
    elif count == 1:
        grid = i + (last / 2 if mode == "ALIGN_CORNERS" else 0.0)
    else:
        grid = i * last / (count - 1)
    return grid.clamp(0, last)


def _bilinear(x: Tensor, sizes: dict[int, int], mode: str) -> Tensor:
    for axis, size in sizes.items():
        x = _along(x, axis, _grid(x.shape[axis], size, mode))
    return x


def _along(x: Tensor, axis: int, grid: Tensor) -> Tensor:
    """`x` at the positions of `grid` along one axis, linear between its elements."""
    before = grid.floor().long().clamp(max=x.shape[axis] - 1)
    after = (before + 1).clamp(max=x.shape[axis] - 1)
    share = (grid - before).float().reshape(-1, *[1] * (-1 - axis))
    return torch.lerp(x.index_select(axis, before).float(), x.index_select(axis, after).float(), share)


def _nearest(x: Tensor, sizes: dict[int, int]) -> Tensor:
    """Output i takes input floor(i · size / count), as torch does."""
    for axis, count in sizes.items():
        x = x.index_select(axis, torch.arange(count) * x.shape[axis] // count)
    return x


def _scaled(x: Tensor, height: float, width: float) -> tuple[int, int]:
    """floor(size × factor), in fp32 as the definition of the op computes it."""
    return math.floor(np.float32(height) * x.shape[-2]), math.floor(np.float32(width) * x.shape[-1])
