"""What goes into a model and what comes out: names, shapes (fixed or symbolic), dtypes and meaning."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from converters.errors import EdgeVitError

Meaning = Literal["image", "tokens", "mask", "features", "logits", "probabilities", "boxes", "values"]
FIXED = "fixed"  # how the size of a signature without symbolic dimensions is written


@dataclass(frozen=True, order=True)
class Size:
    """Values of a signature's symbolic dimensions, written `256`, `192x320` (height × width) or `tokens=128`.

    A signature without symbolic dimensions has one size, `Size(())`, written `fixed`.
    """

    dims: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str) -> Size:
        """`"256"` → height 256, width 256. Raises EdgeVitError for anything that is not a size."""
        text = text.strip()
        if text == FIXED:
            return cls(())
        if match := re.fullmatch(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", text):
            return cls.image(int(match[1]), int(match[2] or match[1]))
        if match := re.fullmatch(r"([a-z_]+)=([1-9]\d{0,8})", text):
            return cls(((match[1], int(match[2])),))
        raise EdgeVitError(f"size '{text}': write 256, 192x320 (height x width) or tokens=128")

    @classmethod
    def parse_list(cls, text: str) -> tuple[Size, ...]:
        """`"160,192x320"` → sizes in the order given, each once."""
        return tuple(dict.fromkeys(cls.parse(part) for part in text.split(",")))

    @classmethod
    def image(cls, height: int, width: int) -> Size:
        return cls((("height", height), ("width", width)))

    def __getitem__(self, name: str) -> int:
        return dict(self.dims)[name]

    @property
    def height(self) -> int:
        return self["height"]

    @property
    def width(self) -> int:
        return self["width"]

    @property
    def entry_point(self) -> str:
        """Name of this size's TFLite signature or Core ML function, such as `size_256` or `size_192x320`."""
        return "size_" + str(self).replace("=", "_")

    def __str__(self) -> str:
        if [name for name, _ in self.dims] == ["height", "width"]:
            return str(self.height) if self.height == self.width else f"{self.height}x{self.width}"
        return ",".join(f"{name}={value}" for name, value in self.dims) or FIXED


@dataclass(frozen=True)
class Dim:
    """Range of a symbolic dimension."""

    name: str
    minimum: int = 1
    maximum: int | None = None
    multiple_of: int = 1


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. `shape` holds ints and names of symbolic dimensions; `"batch"` is the batch."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str = "float32"
    meaning: Meaning = "values"

    def resolve(self, size: Size, batch: int = 1) -> tuple[int, ...]:
        """The concrete shape at `size`."""
        values = {"batch": batch, **dict(size.dims)}
        return tuple(values[d] if isinstance(d, str) else d for d in self.shape)


@dataclass(frozen=True)
class Signature:
    """Inputs, outputs and the ranges of their symbolic dimensions, in the order of `forward`'s arguments."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dims: tuple[Dim, ...] = ()

    @classmethod
    def image_classifier(cls, num_classes: int, *, multiple_of: int = 32, channels: int = 3) -> Signature:
        """`image` (N, 3, H, W) float32 → `logits` (N, num_classes) float32; H and W multiples of `multiple_of`."""
        return cls(
            inputs=(TensorSpec("image", ("batch", channels, "height", "width"), "float32", "image"),),
            outputs=(TensorSpec("logits", ("batch", num_classes), "float32", "logits"),),
            dims=tuple(Dim(name, minimum=multiple_of, multiple_of=multiple_of) for name in ("height", "width")),
        )

    @property
    def batched(self) -> bool:
        """Whether every input and output has the batch as its first dimension, so that examples can be stacked."""
        return all(spec.shape[:1] == ("batch",) for spec in self.inputs + self.outputs)

    def check(self, size: Size) -> None:
        """Raises EdgeVitError, with the nearest sizes that would do, when the model cannot take `size`."""
        wanted, given = {dim.name for dim in self.dims}, {name for name, _ in size.dims}
        if wanted != given:
            need = f"sizes give {', '.join(sorted(wanted))}" if wanted else "shapes are fixed; leave the size out"
            raise EdgeVitError(f"size {size}: this model's {need}")
        for dim in self.dims:
            value = size[dim.name]
            if value % dim.multiple_of:
                below, step = value // dim.multiple_of * dim.multiple_of, dim.multiple_of
                near = f"{below} or {below + step}" if below >= dim.minimum else f"{below + step}"
                raise EdgeVitError(f"size {size}: {dim.name} must be a multiple of {step}; nearest: {near}")
            if value < dim.minimum or (dim.maximum is not None and value > dim.maximum):
                limits = f"{dim.minimum} to {dim.maximum}" if dim.maximum else f"at least {dim.minimum}"
                limits = str(dim.minimum) if dim.minimum == dim.maximum else limits
                raise EdgeVitError(f"size {size}: {dim.name} must be {limits}")

    def to_json(self) -> dict[str, Any]:
        return {
            "inputs": [vars(spec) | {"shape": list(spec.shape)} for spec in self.inputs],
            "outputs": [vars(spec) | {"shape": list(spec.shape)} for spec in self.outputs],
            "dims": [vars(dim) for dim in self.dims],
        }
