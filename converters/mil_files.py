"""Arrays in .npy files, into and out of the Core ML evaluator: what `edgevit run-coreml` adds to `mil.Program`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from converters.artifact import written_beside
from converters.errors import EdgeVitError, first_line
from converters.mil import Program

Arrays = dict[str, np.ndarray]


def read_inputs(program: Program, files: Sequence[str], function: str | None = None) -> Arrays:
    """Inputs for `program.run` from files: `NAME=FILE.npy` each, or `FILE.npy` where the program takes one input.

    Numbers of the right kind are cast to the input's dtype (int64 to int32, float64 to float32). Raises EdgeVitError
    for a file that cannot be read, and for an input without a name or with one that the program does not have.
    """
    types = program.inputs(function)
    arrays: Arrays = {}
    for text in files:
        name, _, file = text.rpartition("=")
        if not name and len(types) == 1:
            name = next(iter(types))
        if name not in types:
            raise EdgeVitError(f"input '{text}': write NAME={file}; the program takes {', '.join(types)}")
        if name in arrays:
            raise EdgeVitError(f"input '{text}': {name} is given twice")
        array = _read(Path(file))
        cast = np.can_cast(array.dtype, types[name].dtype, "same_kind")
        arrays[name] = array.astype(types[name].dtype) if cast else array
    return arrays


def write_arrays(folder: Path, arrays: Mapping[str, np.ndarray]) -> list[Path]:
    """Writes NAME.npy for each array; a file appears under its name only when it is whole."""
    paths = []
    for name, array in arrays.items():
        path = folder / f"{name.replace('/', '_')}.npy"
        with written_beside(path) as draft:
            np.save(draft, array)
        paths.append(path)
    return paths


def _read(path: Path) -> np.ndarray:
    if not path.is_file():
        raise EdgeVitError(f"{path}: no such file")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EdgeVitError(f"{path}: not a .npy file ({first_line(error)})") from error
    if not isinstance(array, np.ndarray):
        raise EdgeVitError(f"{path}: holds several arrays; save one as .npy")
    return array
