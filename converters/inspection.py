"""What a file is and holds, for a person to read: signature, metadata, operations, size, parameters, lint."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converters.artifact import Metadata
from converters.contents import Contents, Function, Value, read_contents
from converters.errors import EdgeVitError
from converters.lint import Finding, lint_contents


@dataclass(frozen=True)
class Inspection:
    """`artifact` is edgevit's own metadata, None where the file has none (or where `problems` say why not)."""

    contents: Contents
    artifact: Metadata | None
    findings: tuple[Finding, ...]
    problems: tuple[str, ...]  # what is wrong with the file, one line each

    @property
    def parameters(self) -> dict[str, int]:
        """Numbers stored in the file by dtype, the most first; those that functions share are counted once."""
        counts: Counter[str] = Counter()
        for weight in self.contents.weights:
            counts[weight.dtype] += weight.count
        return dict(counts.most_common())

    @property
    def compressed(self) -> dict[str, int]:
        """Stored numbers by the form of compression, such as "int8 per channel"."""
        counts: Counter[str] = Counter()
        for weight in self.contents.weights:
            if weight.compression:
                counts[weight.compression] += weight.count
        return dict(counts.most_common())

    def to_json(self) -> dict[str, Any]:
        contents = self.contents
        meta = self.artifact
        return {
            "path": str(contents.path),
            "format": contents.format,
            "producer": contents.producer,
            "target": contents.target,
            "size_bytes": contents.size_bytes,
            "files": [str(file) for file in contents.files],
            "missing": list(contents.missing),
            "functions": [_function_json(function) for function in contents.functions],
            "parameters": self.parameters,
            "compressed": self.compressed,
            "labels": list(self.labels),
            "metadata": contents.metadata,
            "edgevit": None if meta is None else _metadata_json(meta),
            "problems": list(self.problems),
            "lint": [asdict(finding) for finding in self.findings],
        }

    @property
    def labels(self) -> tuple[str, ...]:
        return self.artifact.labels if self.artifact and self.artifact.labels else self.contents.labels


def inspect(path: Path | str) -> Inspection:
    """Reads any `.onnx`, `.tflite` or `.mlpackage`, this project's or another's. Runs nothing.

    Raises EdgeVitError for a file that is missing, foreign, empty or cut short.
    """
    contents = read_contents(path)
    artifact, problems = None, [f"weights are missing: {name}" for name in contents.missing]
    if contents.artifact_text is not None:
        try:
            artifact = Metadata.from_json(contents.artifact_text)
        except EdgeVitError as error:
            problems.append(str(error))
    return Inspection(contents, artifact, tuple(lint_contents(contents)), tuple(problems))


def operations(function: Function) -> dict[str, int]:
    """How many nodes of each type a function has, the most first."""
    return dict(Counter(node.type for node in function.nodes).most_common())


def _function_json(function: Function) -> dict[str, Any]:
    return {
        "name": function.name,
        "inputs": [_value_json(value) for value in function.inputs],
        "outputs": [_value_json(value) for value in function.outputs],
        "states": [_value_json(value) for value in function.states],
        "operations": operations(function),
    }


def _value_json(value: Value) -> dict[str, Any]:
    return {"name": value.name, "shape": value.shape, "dtype": value.dtype, "note": value.note}


def _metadata_json(meta: Metadata) -> dict[str, Any]:
    return {
        "model": meta.model,
        "precision": meta.precision,
        "batch": meta.batch,
        "sizes": meta.sizes,
        "target": meta.target,
        "source_sha256": meta.source_sha256,
        "versions": meta.versions,
        "preprocessing": meta.preprocessing and asdict(meta.preprocessing),
        "parameters": meta.parameters,
        "flops": meta.flops,
        "verified": [asdict(item) for item in meta.verified],
        "notes": list(meta.notes),
    }
