"""The Core ML evaluator's ops on shapes, indices and grids, against coremltools' own numpy, or numpy and torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mil_cases import Case, check, computed, integers, normal

IMAGE = normal(2, 4, 7, 6)
INDEX = np.array([[2, -1], [0, 1]], np.int32)
SIZE = {"target_size_height": 4, "target_size_width": 9}
GRIDS = {  # where the five modes read a line [0, 1] to make five points of it: the table in the docstring
    "UNALIGN_CORNERS": [0.0, 0.1, 0.5, 0.9, 1.0],
    "STRICT_ALIGN_CORNERS": [0.0, 0.25, 0.5, 0.75, 1.0],
    "ALIGN_CORNERS": [0.0, 0.25, 0.5, 0.75, 1.0],
    "DEFAULT": [0.0, 0.4, 0.8, 1.0, 1.0],
    "OFFSET_CORNERS": [0.1, 0.3, 0.5, 0.7, 0.9],
}
SAMPLINGS = [  # Core ML's mode, its padding, torch's padding, align_corners
    ("bilinear", "constant", "zeros", False),
    ("bilinear", "border", "border", True),
    ("nearest", "constant", "zeros", True),
    ("bilinear", "reflection", "reflection", True),
    ("bilinear", "symmetric", "reflection", False),
]


def torched(function: Callable, x: np.ndarray, *arguments: Any, **named: Any) -> np.ndarray:
    return function(torch.from_numpy(x), *arguments, **named).numpy()


def bilinear_reference(height: int, width: int, align_corners: bool) -> Callable[..., np.ndarray]:
    """The docstring's grid points of each axis, interpolated one axis after the other."""

    def along(x: np.ndarray, axis: int, size: int) -> np.ndarray:
        n = x.shape[axis]
        i = np.arange(size)
        grid = i * (n - 1) / (size - 1) if align_corners else i * n / size + 0.5 * n / size - 0.5
        return np.apply_along_axis(lambda line: np.interp(grid.clip(0, n - 1), np.arange(n), line), axis, x)

    return lambda x: along(along(x, -2, height), -1, width)


def shape_cases() -> list[Case]:
    x = normal(2, 3, 4)
    ones = normal(1, 3, 1, 4)
    window = {"begin": [0, -3, 1], "end": [2, 3, -1]}
    masks = {"begin_mask": [True, False, False], "end_mask": [False, True, True]}
    backwards = {"begin": [1, 2, 3], "end": [0, 0, 0], "stride": [-1, -1, -2], "end_mask": [True, False, True]}
    hot = {"one_hot_vector_size": 4, "on_value": np.float32(2), "off_value": np.float32(0)}
    FOUR = np.arange(4).reshape(1, 4, 1)

    def interleaved(values: list[np.ndarray]) -> np.ndarray:
        return np.stack(values, 2).reshape(2, 6, 4)

    def partly(x: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        y = x.copy()
        for row, length in enumerate(lengths):
            y[:, row, :length] = x[:, row, :length][:, ::-1]
        return y

    def windows(x: np.ndarray) -> np.ndarray:
        return np.stack([x[:, first : first + 3] for first in (0, 2, 4)], 1)

    return [
        Case("reshape", {"x": x}, {"shape": [4, -1]}),
        Case("reshape", {"x": x}, {"shape": [0, 2, -1]}),
        Case("transpose", {"x": x}, {"perm": [2, 0, 1]}),
        Case("expand_dims", {"x": x}, {"axes": [0, -1]}),
        Case("expand_dims", {"x": x}, {"axes": [3, 1]}),
        Case("squeeze", {"x": ones}, {"axes": [0]}),
        Case("squeeze", {"x": ones}),
        Case("concat", {"values": [x, 2 * x, normal(2, 1, 4)]}, {"axis": 1}, lambda values: np.concatenate(values, 1)),
        Case("concat", {"values": [x, 2 * x]}, {"axis": -1}, lambda values: np.concatenate(values, -1)),
        Case("stack", {"values": [x, 2 * x]}, {"axis": 1}),
        Case("stack", {"values": [x, 2 * x]}, {"axis": -1}),
        Case("split", {"x": x}, {"axis": 2, "num_splits": 2}),
        Case("split", {"x": x}, {"axis": 2, "split_sizes": [1, 3]}),
        Case("slice_by_index", {"x": x}, window),
        Case("slice_by_index", {"x": x}, window | masks | {"begin": [1, -3, 1], "stride": [1, 2, 2]}),
        Case("slice_by_index", {"x": x}, window | {"squeeze_mask": [False, True, False]}),
        Case("slice_by_size", {"x": x}, {"begin": [1, 0, -2], "size": [1, 2, 2]}),
        Case("slice_by_size", {"x": x}, {"begin": [0, 1, 2], "size": [-1, 1, -1]}),
        Case("pad", {"x": x}, {"pad": [1, 0, 0, 2, 3, 1], "constant_val": np.float32(7)}),
        Case("pad", {"x": x}, {"pad": [1, 2]}),
        Case("pad", {"x": IMAGE}, {"pad": [0, 0, 0, 0, 2, 3, 1, 0], "mode": "reflect"}),
        Case("pad", {"x": IMAGE}, {"pad": [2, 3, 1, 0], "mode": "replicate"}),
        Case("pad", {"x": normal(3, 4)}, {"pad": [2, 1], "mode": "reflect"}),
        Case("concat", {"values": [x, -x]}, {"axis": 1, "interleave": True}, interleaved),
        Case("slice_by_index", {"x": x}, backwards),
        Case("slice_by_index", {"x": x}, backwards | {"squeeze_mask": [True, False, False], "stride": [1, -1, -2]}),
        Case("reverse", {"x": x}, {"axes": [0, -1]}),
        Case("reverse", {"x": x}),
        Case("reverse_sequence", {"x": x, "lengths": np.int32([2, 0, 3])}, {"seq_axis": 2, "batch_axis": 1}, partly),
        Case("flatten2d", {"x": x}, {"axis": 2}),
        Case("flatten2d", {"x": x}, {"axis": -1}),
        Case("sliding_windows", {"x": normal(2, 7, 3)}, {"axis": 1, "size": 3, "stride": 2}, windows),
        Case("shape", {"x": x}),
        Case("fill", {"shape": np.int32([2, 3])}, {"value": np.float32(7)}, lambda shape: [np.full(shape, 7.0)]),
        Case("fill_like", {"ref_tensor": x}, {"value": np.int32(7)}, lambda x: [np.full(x.shape, 7)]),
        *(Case("range_1d", {"start": t(1), "end": t(8), "step": t(3)}) for t in (np.int32, np.float32)),
        Case(
            "one_hot", {"indices": abs(INDEX)}, hot | {"axis": 1}, lambda i: (i[:, None] == FOUR).astype("float32") * 2
        ),
        Case("one_hot", {"indices": INDEX}, {"one_hot_vector_size": 4}, lambda i: (i[..., None] == np.arange(4)) * 1),
        Case("tile", {"x": x}, {"reps": [2, 1, 3]}),
    ]


def block_cases() -> list[Case]:
    x = normal(2, 8, 4, 6)

    def depth_to_space(x: np.ndarray) -> np.ndarray:
        y = np.zeros((2, 2, 8, 12), np.float32)
        for row, column in itertools.product(range(2), range(2)):
            y[:, :, row::2, column::2] = x[:, (row * 2 + column) * 2 : (row * 2 + column) * 2 + 2]
        return y

    def space_to_depth(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[:, :, row::2, column::2] for row in range(2) for column in range(2)], 1)

    def space_to_batch(x: np.ndarray) -> np.ndarray:
        x = np.pad(x, [(0, 0), (0, 0), (1, 1), (0, 3)])
        return np.concatenate([x[:, :, row::2, column::3] for row in range(2) for column in range(3)], 0)

    def batch_to_space(x: np.ndarray) -> np.ndarray:
        y = np.zeros((1, 8, 4, 12), np.float32)
        for column in range(2):
            y[:, :, :, column::2] = x[column]
        return y[:, :, 1:, :-2]

    return [
        Case("pixel_shuffle", {"x": x}, {"upscale_factor": 2}, lambda x: torched(F.pixel_shuffle, x, 2)),
        Case(
            "pixel_unshuffle", {"x": x}, {"downscale_factor": np.uint32(2)}, lambda x: torched(F.pixel_unshuffle, x, 2)
        ),
        Case("depth_to_space", {"x": x}, {"block_size": 2}, depth_to_space),
        Case("space_to_depth", {"x": x}, {"block_size": 2}, space_to_depth),
        Case(
            "space_to_batch", {"x": x}, {"block_shape": [2, 3], "paddings": np.int32([[1, 1], [0, 3]])}, space_to_batch
        ),
        Case("batch_to_space", {"x": x}, {"block_shape": [1, 2], "crops": np.int32([[1, 0], [0, 2]])}, batch_to_space),
    ]


def gather_cases() -> list[Case]:
    x, data = normal(2, 3, 4), normal(4, 3)
    along, nd = (
        np.int32([[[2, 0, -1, 1]], [[0, 0, 1, 2]]]),
        np.int32([[[1, 2], [0, 0], [1, 2]], [[0, 1], [1, 1], [0, 2]]]),
    )
    batched, rows, updates = np.int32([[0, 2, 2], [1, 0, 1]]), np.int32([3, 0, 3]), normal(3, 3)
    element = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "max": np.maximum,
        "min": np.minimum,
    }

    def scattered(mode: str) -> Callable[..., np.ndarray]:
        def reference(data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
            y = data.copy()
            for row, update in zip(indices, updates, strict=True):
                y[row] = element[mode](y[row], update) if mode in element else update
            return y

        return reference

    def scattered_nd(data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
        y = data.copy()
        np.add.at(y, tuple(np.moveaxis(indices, -1, 0)), updates)
        return y

    def gathered_nd(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return np.stack([rows[tuple(np.moveaxis(index, -1, 0))] for rows, index in zip(x, indices, strict=True)])

    once = {"indices": np.int32([3, 0]), "updates": updates[:2]}
    many = {"indices": rows, "updates": updates}
    return [
        Case("gather", {"x": x, "indices": INDEX}, {"axis": 1}),
        Case("gather", {"x": x, "indices": INDEX[0]}, {"axis": -1}),
        Case("gather", {"x": x, "indices": abs(INDEX)}, {"axis": 1, "validate_indices": True}, opset="ios18"),
        Case("gather", {"x": x}, {"indices": np.int32(1), "axis": 1}),
        Case("gather", {"x": x, "indices": batched}, {"axis": 2, "batch_dims": 1}, opset="ios17"),
        Case("gather", {"x": normal(2, 5, 3, 4), "indices": batched}, {"axis": 2, "batch_dims": 1}, opset="ios16"),
        Case("gather_along_axis", {"x": x, "indices": along}, {"axis": 1}),
        Case("gather_nd", {"x": x, "indices": nd}, expected=lambda x, indices: x[indices[..., 0], indices[..., 1]]),
        Case("gather_nd", {"x": x, "indices": nd}, {"batch_dims": 1}, gathered_nd),
        Case("scatter", {"data": data, **once}, {"mode": "update"}, scattered("update")),
        *(Case("scatter", {"data": data, **many}, {"mode": mode}, scattered(mode)) for mode in element),
        Case(
            "scatter_along_axis",
            {"data": data, "indices": np.int32([[2, 1, 0]]), "updates": updates[:1]},
            {"mode": "update"},
        ),
        Case(
            "scatter_nd",
            {"data": data, "indices": np.int32([[3, 0], [0, 2], [3, 0]]), "updates": updates[0]},
            {"mode": "add"},
            scattered_nd,
        ),
        Case("non_zero", {"x": integers(3, 4).astype(np.float32)}),
        Case(
            "slice_update", {"x": x, "update": normal(1, 2, 2)}, {"begin": [1, 0, 1], "end": [2, 2, 3]}, opset="ios18"
        ),
        Case(
            "slice_update",
            {"x": x, "update": normal(2, 2, 4)},
            {"begin": [0, 2, 0], "end": [2, 0, 0], "stride": [1, -2, 1], "end_mask": [False, True, True]},
            opset="ios18",
        ),
    ]


def resize_cases() -> list[Case]:
    def upsample(height: float, width: float, size: tuple[int, int], **how: bool) -> Case:
        factors = {"scale_factor_height": height, "scale_factor_width": width}
        reference = bilinear_reference(*size, align_corners=how.get("align_corners", True))
        return Case("upsample_bilinear", {"x": IMAGE}, factors | how, reference)

    def resize(mode: str, align_corners: bool) -> Case:
        constants = {"target_size_height": 4, "target_size_width": 9, "sampling_mode": mode}
        return Case("resize_bilinear", {"x": IMAGE}, constants, bilinear_reference(4, 9, align_corners))

    up = np.float32
    row = np.float32([[[0, 1]]])  # the docstring's own example
    narrow = {"target_size_height": 1, "target_size_width": 5}
    one = {"target_size_height": 1, "target_size_width": 1, "sampling_mode": "ALIGN_CORNERS"}
    to = {"resized_dims": np.uint32(2), "sampling_mode": "UNALIGN_CORNERS"}
    near = to | {"sampling_mode": "DEFAULT", "interpolation_mode": "NEAREST_NEIGHBOR"}
    boxes = np.float32([[1, 2, 5, 4], [0, 0, 6, 3]])
    box = {"target_width": 2, "sampling_mode": "STRICT_ALIGN_CORNERS"}
    places = (1.3 * np.tanh(normal(2, 5, 4, 2))).astype(np.float32)  # some outside
    matrix = np.float32([[0.5, 0.2, 0.1, -0.3, 0.9, 0.2]] * 2)
    sampling = {"coordinates_mode": "normalized_minus_one_to_one", "padding_value": np.float32(0)}

    def cropped(x: np.ndarray, boxes: np.ndarray) -> np.ndarray:
        parts = [
            x[i, :, int(t) : int(b) + 1, int(left) : int(right) + 1] for i, (t, left, b, right) in enumerate(boxes)
        ]
        return np.stack([bilinear_reference(3, 2, align_corners=True)(part) for part in parts])

    def sampled(how: str, padding: str, aligned: bool) -> Callable[..., np.ndarray]:
        def reference(x: np.ndarray, grid: np.ndarray) -> np.ndarray:
            return torched(F.grid_sample, x, torch.from_numpy(grid), how, padding, aligned)

        return reference

    def moved(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
        grid = F.affine_grid(torch.from_numpy(matrix).reshape(2, 2, 3), [2, 4, 5, 4], align_corners=True)
        return torched(F.grid_sample, x, grid, align_corners=True)

    return [
        upsample(up(8 / 7), up(2), (8, 12), align_corners=False),  # 7 → 8, as for an odd map of MobileViT
        upsample(up(4 / 7), up(5 / 6), (4, 5), align_corners=False, half_pixel_centers=True),
        upsample(up(1.5), up(2), (10, 12), align_corners=True),
        upsample(2, 3, (14, 18)),
        resize("STRICT_ALIGN_CORNERS", True),
        resize("ALIGN_CORNERS", True),
        resize("UNALIGN_CORNERS", False),
        *(
            Case("resize_bilinear", {"x": row}, narrow | {"sampling_mode": mode}, lambda x, p=points: np.array([[p]]))
            for mode, points in GRIDS.items()
        ),
        Case("resize_bilinear", {"x": row}, one, lambda x: np.array([[[0.5]]])),
        Case("resize", {"x": IMAGE}, to | {"shape": np.int32([1, 4, 9])}, bilinear_reference(4, 9, False), "ios17"),
        Case(
            "resize",
            {"x": IMAGE},
            near | {"shape": np.int32([0, 4, 9])},
            lambda x: torched(F.interpolate, x, [4, 9]),
            "ios17",
        ),
        Case("resize", {"x": IMAGE}, to | {"shape": np.int32([0, 9])}, bilinear_reference(7, 9, False), "ios17"),
        Case("crop", {"x": IMAGE}, {"crop_height": [1, 2], "crop_width": [0, 3]}, lambda x: x[..., 1:-2, :-3]),
        Case("crop_resize", {"x": IMAGE, "boxes": boxes}, box | {"target_height": 3}, cropped, "ios17"),
        *(
            Case(
                "resample",
                {"x": IMAGE, "coordinates": places},
                sampling | {"padding_mode": mode, "align_corners": aligned, "sampling_mode": how},
                sampled(how, theirs, aligned),
            )
            for how, mode, theirs, aligned in SAMPLINGS
        ),
        Case(
            "affine",
            {"x": IMAGE, "transform_matrix": matrix},
            sampling
            | {
                "padding_mode": "constant",
                "align_corners": True,
                "sampling_mode": "bilinear",
                "output_height": 5,
                "output_width": 4,
            },
            moved,
        ),
        Case(
            "upsample_nearest_neighbor",
            {"x": IMAGE},
            {"scale_factor_height": up(2), "scale_factor_width": up(3)},
            lambda x: x.repeat(2, 2).repeat(3, 3),
        ),
        Case(
            "upsample_nearest_neighbor",
            {"x": IMAGE},
            {"scale_factor_height": up(10 / 7), "scale_factor_width": up(1.5)},
            lambda x: torched(F.interpolate, x, [10, 9]),
        ),
        Case("resize_nearest_neighbor", {"x": IMAGE}, SIZE, lambda x: torched(F.interpolate, x, [4, 9])),
    ]


CASES = [*shape_cases(), *block_cases(), *gather_cases(), *resize_cases()]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, np.ndarray]:
    return computed(CASES, tmp_path_factory.mktemp("ops"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i}-{case}" for i, case in enumerate(CASES)])
def test_op_computes_what_coremltools_defines(results, index):
    check(CASES[index], index, results)
