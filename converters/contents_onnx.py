"""What an ONNX file holds: its graph with inferred shapes, its weights, and the files where weights lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError

from converters.artifact import METADATA_KEY
from converters.contents import Contents, Function, Node, Shape, Value, Weight
from converters.errors import EdgeVitError, first_line

EXTERNAL = onnx.TensorProto.EXTERNAL
SMALL = 1024  # shape inference needs the values of short constants (shapes, axes), never those of weights
QUANTISED = {onnx.TensorProto.INT8, onnx.TensorProto.UINT8, onnx.TensorProto.INT4, onnx.TensorProto.UINT4}


def read(path: Path) -> Contents:
    """Raises EdgeVitError when `path` is no whole ONNX model. Weight files outside its folder are never opened."""
    model = load(path)
    try:
        _check_text(model)
        return _contents(path, model)
    except (IndexError, TypeError, ValueError) as error:  # names that are no text come as bytes
        raise EdgeVitError(f"{path}: a damaged ONNX model ({first_line(error)})") from error


def _check_text(model: Any) -> None:
    """Raises TypeError for a name that is no UTF-8: protobuf gives it as bytes."""
    names = [value for item in model.metadata_props for value in (item.key, item.value)]
    for node in _nodes(model):
        names += (node.op_type, node.domain, node.name, *node.input, *node.output)
    for item in (*_tensors(model), *_declared(model.graph)):
        names.append(item.name)
    if not all(isinstance(name, str) for name in (*names, model.graph.name, model.producer_name)):
        raise TypeError("a name in it is no text")


def _contents(path: Path, model: Any) -> Contents:
    types = {value.name: _value(value) for value in _declared(infer_shapes(model).graph)}
    tensors = list(_tensors(model))
    files, missing = _weight_files(path, [tensor for tensor in tensors if tensor.data_location == EXTERNAL])
    constants = {tensor.name: _constant(tensor) for tensor in tensors}
    graph = model.graph
    function = Function(
        name=graph.name or "graph",
        inputs=tuple(_value(item) for item in graph.input if item.name not in constants),
        outputs=tuple(_value(item) for item in graph.output),
        nodes=tuple(_node(node, types, constants) for node in _nodes(model)),
    )
    properties = {item.key: item.value for item in model.metadata_props}
    return Contents(
        path=path,
        format="onnx",
        producer=f"{model.producer_name} {model.producer_version}".strip(),
        functions=(function,),
        weights=tuple(_weight(tensor) for tensor in tensors),
        files=(path, *files),
        missing=missing,
        artifact_text=properties.pop(METADATA_KEY, None),
        metadata=properties,
        target=", ".join(f"{item.domain or 'opset'} {item.version}" for item in model.opset_import),
    )


def load(path: Path) -> Any:
    """The ModelProto without its external weights. Raises EdgeVitError when it is no whole ONNX model."""
    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise EdgeVitError(f"{path}: not an ONNX model, or cut short") from error
    if not model.graph.node and not model.graph.output:
        raise EdgeVitError(f"{path}: not an ONNX model: it holds no graph")
    if not model.opset_import:
        raise EdgeVitError(f"{path}: an ONNX model that was cut short: it names no opset")
    return model


def infer_shapes(model: Any) -> Any:
    """A copy of `model` with the shapes of intermediate values, without its weights' data; `model` where that fails."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    for tensor in light.graph.initializer:
        if _count(tensor) > SMALL:
            for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                tensor.ClearField(field)
    try:
        return onnx.shape_inference.infer_shapes(light, data_prop=True)
    except Exception:  # a stranger's model may hold anything; then only what it declares is known
        return model


def weight_name(node: Any, constants: Iterable[str]) -> str:
    """The PyTorch module's path, from the name of a parameter that the node takes, such as `module.stem.weight`."""
    for name in node.input:
        if name in constants and (name.endswith((".weight", ".bias")) or name.startswith("module.")):
            return name.rpartition(".")[0].removeprefix("module.").removeprefix("module.")
    return ""


def _nodes(model: Any) -> Iterator[Any]:
    yield from _graph_nodes(model.graph.node)
    for function in model.functions:
        yield from _graph_nodes(function.node)


def _graph_nodes(nodes: Iterable[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in [attribute.g, *attribute.graphs]:
                yield from _graph_nodes(graph.node)


def _graphs(graph: Any) -> Iterator[Any]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                if inner.node:
                    yield from _graphs(inner)


def _declared(graph: Any) -> Iterator[Any]:
    for item in _graphs(graph):
        yield from (*item.value_info, *item.input, *item.output)


def _tensors(model: Any) -> Iterator[Any]:
    """Every stored tensor: initializers, and what Constant nodes hold, under the name of their output."""
    for graph in _graphs(model.graph):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
    for node in _nodes(model):
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.HasField("t"):
                tensor = onnx.TensorProto()
                tensor.CopyFrom(attribute.t)
                tensor.name = node.output[0]
                yield tensor


def _node(node: Any, types: dict[str, Value], constants: dict[str, Value]) -> Node:
    def value(name: str) -> Value:
        return constants.get(name) or types.get(name) or Value(name, None, "")

    kind = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
    outputs = tuple(value(name) for name in node.output if name)
    name = node.name or (node.output[0] if node.output else kind)
    return Node(kind, name, tuple(value(name) for name in node.input if name), outputs, weight_name(node, constants))


def _value(info: Any) -> Value:
    kind = info.type.WhichOneof("value")
    if kind not in ("tensor_type", "sparse_tensor_type"):
        return Value(info.name, None, kind.removesuffix("_type") if kind else "")
    tensor = getattr(info.type, kind)
    shape: Shape | None = None
    if tensor.HasField("shape"):
        shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
    symbols = [dim.dim_param for dim in tensor.shape.dim if dim.dim_param]
    return Value(info.name, shape, _dtype(tensor.elem_type), note=f"free: {', '.join(symbols)}" if symbols else "")


def _constant(tensor: Any) -> Value:
    return Value(tensor.name, tuple(tensor.dims), _dtype(tensor.data_type), constant=True)


def _weight(tensor: Any) -> Weight:
    compression = (
        f"{_dtype(tensor.data_type)} quantised" if tensor.data_type in QUANTISED and _count(tensor) > 1 else ""
    )
    return Weight(tensor.name, _dtype(tensor.data_type), _count(tensor), compression)


def _count(tensor: Any) -> int:
    count = 1
    for length in tensor.dims:
        count *= length
    return count


def _dtype(code: int) -> str:
    try:
        name = onnx.TensorProto.DataType.Name(code).lower()
    except ValueError:
        return f"type {code}"
    return {"float": "float32", "double": "float64"}.get(name, name)


def _weight_files(path: Path, tensors: list[Any]) -> tuple[list[Path], tuple[str, ...]]:
    """The files that hold external weights, and what is wrong with those that cannot be counted."""
    folder = path.parent.resolve()
    ends: dict[str, int] = {}
    for tensor in tensors:
        entries = {item.key: item.value for item in tensor.external_data}
        end = sum(int(entries.get(key, "0")) for key in ("offset", "length") if entries.get(key, "0").isdigit())
        ends[entries.get("location", "")] = max(end, ends.get(entries.get("location", ""), 0))
    files, missing = [], []
    for location, end in ends.items():
        file = (folder / location).resolve()
        if not location or not file.is_relative_to(folder):
            missing.append(f"{location or 'a file without a name'} (outside the model's folder: not followed)")
        elif not file.is_file():
            missing.append(location)
        elif file.stat().st_size < end:
            missing.append(f"{location} (cut short: {file.stat().st_size} bytes of {end})")
        else:
            files.append(file)
    return files, tuple(missing)
