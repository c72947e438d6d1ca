"""What every kind of source comes down to: a module that is ready to run, and what a file made of it should carry."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from torch import nn

from converters.artifact import Preprocessing
from converters.signature import Signature, Size
from edgevit.run_folder import RunFolder

RANDOM = "random"  # what `weights` says where random ones are wanted


@dataclass(frozen=True)
class Source:
    """A module, ready to be run, and what an artifact made of it should carry."""

    module: nn.Module  # in evaluation mode
    name: str  # what files are called, such as "mobilevit_xxs"
    signature: Signature
    preprocessing: Preprocessing | None  # None where the inputs are no pictures
    labels: tuple[str, ...]  # one per class, or none where nobody named them
    sha256: str  # of the weights
    run: RunFolder | None = None
    note: str = ""  # a warning that the user should see, else ""
    examples: dict[str, np.ndarray] | None = None  # (N, …) by input name, where pictures are not all it takes

    @property
    def size(self) -> Size:
        """The one that is meant where nobody names another."""
        dims = {dim.name: dim for dim in self.signature.dims}
        if all(dim.minimum == dim.maximum for dim in dims.values()):
            return Size(tuple((name, dim.minimum) for name, dim in dims.items()))
        if set(dims) == {"height", "width"} and self.preprocessing:
            return Size.parse(self.preprocessing.size)
        values: dict[str, int] = {}
        for spec in self.signature.inputs:
            shape = self.examples[spec.name].shape if self.examples else ()
            values |= {d: n for d, n in zip(spec.shape, shape, strict=False) if isinstance(d, str)}
        return Size(tuple((name, values.get(name, dim.minimum)) for name, dim in dims.items()))


def weights_sha256(module: nn.Module) -> str:
    """SHA-256 of a module's state: each name, dtype, shape and value, in the order of the names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        array = tensor.detach().cpu().contiguous().numpy()
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
