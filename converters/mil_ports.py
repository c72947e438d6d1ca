"""How a Core ML model's description dresses its program's inputs: as pictures, and with several allowed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from coremltools.proto import FeatureTypes_pb2
from torch import Tensor

from converters.errors import EdgeVitError
from converters.mil_package import ValueType

_COLOURS = {
    FeatureTypes_pb2.ImageFeatureType.RGB: "RGB",
    FeatureTypes_pb2.ImageFeatureType.BGR: "BGR",
    FeatureTypes_pb2.ImageFeatureType.GRAYSCALE: "grayscale",
    FeatureTypes_pb2.ImageFeatureType.GRAYSCALE_FLOAT16: "grayscale",
}


@dataclass(frozen=True)
class InputPort:
    """One input as a caller sees it.

    `type` is what `tensor` takes: for a picture uint8 (N, H, W, 3), always RGB, or (N, H, W, 1). `colours` is the order
    in which the program wants a picture's channels. `shapes` lists the only allowed shapes; `ranges` holds the
    smallest and largest size (None: any) of each dimension.
    """

    type: ValueType
    program: ValueType
    colours: str | None = None
    shapes: tuple[tuple[int, ...], ...] = ()
    ranges: tuple[tuple[int, int | None], ...] = ()

    def tensor(self, array: np.ndarray, label: str) -> Tensor:
        """The program's own tensor for `array`. Raises EdgeVitError, which begins with `label`, if it does not fit."""
        found = ValueType(array.shape, array.dtype.name)
        if not self.type.matches(found):
            raise EdgeVitError(f"{label} is {found}, the program declares {self.type}")
        if self.shapes and array.shape not in self.shapes:
            raise EdgeVitError(f"{label} is {found}, the program takes {' or '.join(map(str, self.shapes))}")
        for size, (least, most) in zip(array.shape, self.ranges, strict=False):
            if size < least or (most is not None and size > most):
                ranges = " × ".join(f"{low}…{'any' if high is None else high}" for low, high in self.ranges)
                raise EdgeVitError(f"{label} is {found}, the program takes {ranges}")
        if self.colours is None:
            return torch.from_numpy(array.astype(self.program.held.dtype))
        picture = array[..., ::-1] if self.colours == "BGR" else array
        return torch.from_numpy(np.ascontiguousarray(picture.transpose(0, 3, 1, 2)).astype(self.program.held.dtype))


@dataclass(frozen=True)
class OutputPort:
    """One output as a caller sees it. With `colours` a picture: uint8 (N, H, W, 3), RGB, or (N, H, W, 1)."""

    type: ValueType
    colours: str | None = None

    def array(self, tensor: Tensor) -> np.ndarray:
        """What the caller gets for the program's value. A picture's numbers are rounded, and cut off at 0 and 255."""
        array = tensor.numpy()
        if self.colours is not None:
            array = array.transpose(0, 2, 3, 1)
            array = array[..., ::-1] if self.colours == "BGR" else array
            array = array.round().clip(0, 255) if self.type.dtype == "uint8" else array
        return array.astype(self.type.dtype, order="C")


def described(spec: Any, function: str) -> Any:
    """The part of a model's description that tells of one function."""
    return next((item for item in spec.description.functions if item.name == function), spec.description)


def input_port(declared: ValueType, feature: Any | None) -> InputPort:
    """`declared` is the program's type, `feature` the description's entry of the same name."""
    if feature is None:
        return InputPort(declared, declared)
    if feature.type.WhichOneof("Type") == "imageType":
        return _picture(declared, feature.type.imageType)
    array = feature.type.multiArrayType
    kind = array.WhichOneof("ShapeFlexibility")
    if kind == "enumeratedShapes":
        return InputPort(declared, declared, shapes=tuple(tuple(item.shape) for item in array.enumeratedShapes.shapes))
    if kind == "shapeRange":
        return InputPort(declared, declared, ranges=tuple(map(_range, array.shapeRange.sizeRanges)))
    return InputPort(declared, declared)


def output_port(declared: ValueType, feature: Any | None) -> OutputPort:
    """`declared` is the program's type, `feature` the description's entry of the same name."""
    if feature is None or feature.type.WhichOneof("Type") != "imageType":
        return OutputPort(declared)
    image = feature.type.imageType
    return OutputPort(_seen(declared, image), _COLOURS[image.colorSpace])


def _seen(declared: ValueType, image: Any) -> ValueType:
    """The type of a picture as a caller sees it: its channels last."""
    batch, channels, height, width = declared.shape
    return ValueType((batch, height, width, channels), _pixels(image))


def _pixels(image: Any) -> str:
    return "float16" if image.colorSpace == FeatureTypes_pb2.ImageFeatureType.GRAYSCALE_FLOAT16 else "uint8"


def _picture(declared: ValueType, image: Any) -> InputPort:
    colours, seen = _COLOURS[image.colorSpace], _seen(declared, image)
    batch, _, _, channels = seen.shape
    sizes: tuple[tuple[int, ...], ...] = ()
    ranges: tuple[tuple[int, int | None], ...] = ()
    kind = image.WhichOneof("SizeFlexibility")
    if kind == "enumeratedSizes":
        sizes = tuple((batch or 1, item.height, item.width, channels or 3) for item in image.enumeratedSizes.sizes)
    elif kind == "imageSizeRange":
        ranges = ((1, None), _range(image.imageSizeRange.heightRange), _range(image.imageSizeRange.widthRange))
    return InputPort(seen, declared, colours, sizes, ranges)


def _range(item: Any) -> tuple[int, int | None]:
    return item.lowerBound, item.upperBound if item.upperBound >= 0 else None


def feature_type(feature: Any, labels: Sequence[str] = (), declared: ValueType | None = None) -> ValueType:
    """The type of a description's entry as `Program` takes or gives it.

    `declared` is the program's own type: the description leaves out the shape of an output that has a free size.
    """
    kind = feature.type.WhichOneof("Type")
    if kind == "imageType":
        image = feature.type.imageType
        channels = 3 if _COLOURS.get(image.colorSpace) in ("RGB", "BGR") else 1
        flexible = image.WhichOneof("SizeFlexibility")
        return ValueType(
            (1, None if flexible else image.height, None if flexible else image.width, channels), _pixels(image)
        )
    if kind == "dictionaryType":
        return ValueType((1, len(labels) or None), "float32")
    if kind in ("stringType", "int64Type"):
        return ValueType((1,), "str")
    array = feature.type.multiArrayType
    if declared is not None and not array.shape:
        return declared
    shape: tuple[int | None, ...] = tuple(array.shape)
    flexible = array.WhichOneof("ShapeFlexibility")
    if flexible == "enumeratedShapes":
        columns = zip(*(item.shape for item in array.enumeratedShapes.shapes), strict=True)
        shape = tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in columns)
    elif flexible == "shapeRange":
        bounds = map(_range, array.shapeRange.sizeRanges)
        shape = tuple(least if least == most else None for least, most in bounds)
    return ValueType(shape, _ARRAYS.get(array.dataType, "float32"))


_ARRAYS = {
    FeatureTypes_pb2.ArrayFeatureType.FLOAT16: "float16",
    FeatureTypes_pb2.ArrayFeatureType.FLOAT32: "float32",
    FeatureTypes_pb2.ArrayFeatureType.DOUBLE: "float64",
    FeatureTypes_pb2.ArrayFeatureType.INT32: "int32",
    FeatureTypes_pb2.ArrayFeatureType.INT8: "int8",
}
