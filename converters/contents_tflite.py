"""What a TFLite file holds: a function per signature (or per subgraph), and each stored buffer once."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from converters.contents import Contents, Function, Node, Shape, Value, Weight
from converters.errors import EdgeVitError
from converters.tflite_file import METADATA_NAME, TFLiteFile, text


def _names(enum: type) -> dict[int, str]:
    return {code: name for name, code in vars(enum).items() if isinstance(code, int)}


OPS = _names(schema.BuiltinOperator)
DTYPES = {code: name.lower() for code, name in _names(schema.TensorType).items()}
# `pkg.Class_name/pkg.Class_name;3`: how litert-torch writes a module's path into the names of tensors.
_SEGMENT = re.compile(r"(?:.*\.)?_?[^_]+_(.+)")


def read(path: Path) -> Contents:
    """Raises EdgeVitError when `path` is no whole TFLite model."""
    model = load(path)
    try:
        return _contents(path, model)
    except (IndexError, TypeError, AttributeError, ValueError) as error:
        raise EdgeVitError(f"{path}: a damaged TFLite model, or one that was cut short") from error


def load(path: Path) -> Any:
    """Every table of the file as objects. Raises EdgeVitError when it is no whole TFLite model."""
    return TFLiteFile.parse(path.read_bytes(), name=path).model


def _contents(path: Path, model: Any) -> Contents:
    subgraphs = model.subgraphs or []
    if not subgraphs:
        raise EdgeVitError(f"{path}: not a TFLite model: it holds no graph")
    values = [[_value(tensor, model) for tensor in graph.tensors or []] for graph in subgraphs]
    signatures = {item.subgraphIndex: item for item in model.signatureDefs or []}
    functions = tuple(
        _function(number, graph, signatures.get(number), values[number], model)
        for number, graph in enumerate(subgraphs)
    )
    entries = {text(item.name): item.buffer for item in model.metadata or []}
    own = entries.pop(METADATA_NAME, None)
    return Contents(
        path=path,
        format="tflite",
        producer=text(model.description),
        functions=functions,
        weights=_weights(model),
        files=(path,),
        artifact_text=None if own is None else bytes(model.buffers[own].data).decode(),
        metadata={name: _metadata_text(model.buffers[buffer].data) for name, buffer in entries.items()},
        target=f"schema {model.version}",
    )


def layer_of(name: str) -> str:
    """`….Named/….Small_module/….Conv2d_stem;2` or, as this project shortens it, `stem;2` → `stem`; "" for others."""
    path, numbered, _ = name.partition(";")
    if "/" not in path:
        return path if numbered else ""
    parts = [match[1] for part in path.split("/") if (match := _SEGMENT.fullmatch(part))]
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _function(number: int, graph: Any, signature: Any, values: list[Value], model: Any) -> Function:
    inputs, outputs = ([values[index] for index in side] for side in (_ints(graph.inputs), _ints(graph.outputs)))
    if signature is not None:
        inputs = [_renamed(values[item.tensorIndex], text(item.name)) for item in signature.inputs or []]
        outputs = [_renamed(values[item.tensorIndex], text(item.name)) for item in signature.outputs or []]
    name = text(signature.signatureKey) if signature is not None else text(graph.name) or f"subgraph {number}"
    nodes: list[Node] = []
    for operator in graph.operators or []:
        taken, given = ([values[i] for i in _ints(side) if i >= 0] for side in (operator.inputs, operator.outputs))
        kind = op_name(model.operatorCodes[operator.opcodeIndex])
        path = given[0].name if given else ""
        # A long path that ends in no module's name says less than the place does.
        label = path if path and "/" not in path else f"{kind} #{len(nodes)}"
        # The last layer's output has the signature's name; its weights still have the module's.
        named = (layer_of(tensor) for tensor in (path, *(value.name for value in taken if value.constant)))
        nodes.append(Node(kind, label, tuple(taken), tuple(given), next(filter(None, named), "")))
    return Function(name, tuple(inputs), tuple(outputs), tuple(nodes))


def _renamed(value: Value, name: str) -> Value:
    return Value(name, value.shape, value.dtype, value.constant, value.note)


def op_name(code: Any) -> str:
    number = max(code.builtinCode, code.deprecatedBuiltinCode)  # old files have only the one byte
    name = OPS.get(number, f"operator {number}")
    return f"CUSTOM {text(code.customCode)}" if name == "CUSTOM" else name


def _value(tensor: Any, model: Any) -> Value:
    shape: Shape = tuple(_ints(tensor.shape))
    if tensor.shapeSignature is not None:
        shape = tuple(None if length < 0 else length for length in _ints(tensor.shapeSignature))
    return Value(text(tensor.name), shape, DTYPES.get(tensor.type, "?"), constant=_stored(model.buffers[tensor.buffer]))


def _stored(buffer: Any) -> bool:
    return (buffer.data is not None and len(buffer.data) > 0) or bool(buffer.offset and buffer.size)


def _weights(model: Any) -> tuple[Weight, ...]:
    tensors: dict[int, Any] = {}
    for graph in model.subgraphs:
        for tensor in graph.tensors or []:
            if _stored(model.buffers[tensor.buffer]):
                tensors.setdefault(tensor.buffer, tensor)
    return tuple(
        Weight(
            text(tensor.name),
            DTYPES.get(tensor.type, "?"),
            int(np.prod(_ints(tensor.shape), dtype=np.int64)),
            _compression(tensor),
        )
        for tensor in tensors.values()
    )


def _compression(tensor: Any) -> str:
    dtype, quantisation = DTYPES.get(tensor.type, "?"), tensor.quantization
    if tensor.sparsity is not None:
        return f"{dtype} sparse"
    scales = 0 if quantisation is None or quantisation.scale is None else len(quantisation.scale)
    if not dtype.startswith(("int", "uint")) or not scales:
        return ""
    return f"{dtype} per channel" if scales > 1 else f"{dtype} per tensor"


def _metadata_text(data: Any) -> str:
    raw = b"" if data is None else bytes(data)
    written = raw.rstrip(b"\0").decode(errors="replace")
    return written if written.isprintable() else f"{len(raw)} bytes"


def _ints(values: Any) -> list[int]:
    return [] if values is None else [int(value) for value in values]
