"""ONNX in half precision: float16 inside, float32 in and out; what would leave float16's range stays float32."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes import common

from converters.errors import EdgeVitError
from converters.unsupported import own_path

# Half of float16's largest number: an op whose values come near it on a few examples would overflow on others.
LARGEST = 32_000.0
# Tensors smaller than this are scales, shapes and biases; whether they are halved says nothing about a file.
WEIGHT_ELEMENTS = 1024
_SCOPE_KEY = "pkg.torch.onnx.name_scopes"


def to_half(model: onnx.ModelProto, samples: Iterable[Mapping[str, np.ndarray]]) -> tuple[onnx.ModelProto, list[str]]:
    """`model` in float16 with float32 inputs and outputs, and a note when ops had to stay in float32.

    `samples` are realistic inputs, arrays (N, …) by name: the float32 model runs on each example, and an op that reads
    or writes a value beyond LARGEST keeps float32. Raises EdgeVitError when the file's weights would not be float16
    after all.
    """
    from onnxruntime.transformers.float16 import convert_float_to_float16

    largest = largest_values(model, samples)
    kept = [node for node in model.graph.node if _reach(node, largest) > LARGEST]
    note = _note(kept, largest)
    names = [node.name for node in kept]
    half = _settled(convert_float_to_float16(copy.deepcopy(model), keep_io_types=True, node_block_list=names))
    check_half(half, names)
    return half, note


def largest_values(model: onnx.ModelProto, samples: Iterable[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """max |value| of every float32 tensor of `model`, by name: of weights, and of activations over all examples.

    `samples` are arrays (N, …) by name; an input without a batch dimension takes each example as it is.
    """
    import onnxruntime

    largest = {
        item.name: float(np.abs(numpy_helper.to_array(item)).max(initial=0.0))
        for item in model.graph.initializer
        if item.data_type == TensorProto.FLOAT
    }
    values, watched = _watched(model)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = [f"{name}/{end}" for name in values for end in ("max", "min")]
    ranks = {item.name: len(item.type.tensor_type.shape.dim) for item in model.graph.input}
    for arrays in samples:
        for example in range(len(next(iter(arrays.values())))):
            one = {
                name: array[example : example + 1] if array.ndim == ranks[name] else array[example]
                for name, array in arrays.items()
            }
            found = np.abs(np.array(session.run(outputs, one), np.float64).reshape(-1, 2)).max(axis=1)
            for name, value in zip(values, found, strict=True):
                largest[name] = max(largest.get(name, 0.0), float(value))
    return largest


def check_half(model: onnx.ModelProto, kept: Iterable[str]) -> None:
    """Raises EdgeVitError when a weight that no op named in `kept` reads is still float32."""
    allowed = set(kept)
    readers: dict[str, set[str]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.name)
    full = [
        item.name
        for item in model.graph.initializer
        if item.data_type == TensorProto.FLOAT
        and np.prod(item.dims) >= WEIGHT_ELEMENTS
        and not readers.get(item.name, set()) & allowed
    ]
    if full:
        raise EdgeVitError(f"fp16: weight '{full[0]}' is still float32 ({len(full)} in all); export fp32 instead")
    halved = sum(np.prod(item.dims) for item in model.graph.initializer if item.data_type == TensorProto.FLOAT16)
    whole = sum(np.prod(item.dims) for item in model.graph.initializer if item.data_type == TensorProto.FLOAT)
    if whole > halved:
        raise EdgeVitError(f"fp16: most weights belong to ops that reach beyond {LARGEST:,.0f}; export fp32 instead")


def _settled(model: onnx.ModelProto) -> onnx.ModelProto:
    """What the conversion leaves to do: nodes in order, and float32 handed on as it is.

    Between two ops that keep float32 it casts to float16 and back, which is just where the values do not fit.
    """
    graph = ir.from_proto(model)
    for node in list(graph.graph):
        inner = node.inputs[0].producer() if node.op_type == "Cast" and node.inputs[0] is not None else None
        if inner is None or inner.op_type != "Cast" or _target(node) != TensorProto.FLOAT:
            continue
        source = inner.inputs[0]
        if _target(inner) == TensorProto.FLOAT16 and source is not None and source.dtype == ir.DataType.FLOAT:
            node.replace_input_with(0, source)
            if not node.outputs[0].is_graph_output():
                ir.convenience.replace_all_uses_with(node.outputs[0], source)
    common.RemoveUnusedNodesPass()(graph)
    common.TopologicalSortPass()(graph)
    return ir.to_proto(graph)


def _target(cast: ir.Node) -> int | None:
    return cast.attributes.get_int("to")


def _watched(model: onnx.ModelProto) -> tuple[list[str], onnx.ModelProto]:
    """Names of float32 activations, and a copy of `model` whose only outputs are the largest and smallest of each."""
    typed = onnx.shape_inference.infer_shapes(model)
    watched = copy.deepcopy(typed)
    described = [*typed.graph.value_info, *typed.graph.input, *typed.graph.output]
    floats = {item.name for item in described if item.type.tensor_type.elem_type == TensorProto.FLOAT}
    produced = [name for node in model.graph.node for name in node.output]
    values = [name for name in [*(item.name for item in model.graph.input), *produced] if name in floats]
    del watched.graph.output[:]
    for name in values:
        for end, op in (("max", "ReduceMax"), ("min", "ReduceMin")):
            watched.graph.node.append(helper.make_node(op, [name], [f"{name}/{end}"], keepdims=0))
            watched.graph.output.append(helper.make_tensor_value_info(f"{name}/{end}", TensorProto.FLOAT, []))
    return values, watched


def _reach(node: onnx.NodeProto, largest: Mapping[str, float]) -> float:
    return max((largest.get(name, 0.0) for name in [*node.input, *node.output]), default=0.0)


def _note(kept: list[onnx.NodeProto], largest: Mapping[str, float]) -> list[str]:
    if not kept:
        return []
    worst = max(kept, key=lambda node: _reach(node, largest))
    count = f"{len(kept)} op{'s' if len(kept) > 1 else ''} kept in fp32"
    return [f"{count}: {_described(worst)} reaches {_reach(worst, largest):,.0f}"]


def _described(node: onnx.NodeProto) -> str:
    """An op by its type and, where the exporter recorded it, the module that it came from."""
    scopes = next((item.value for item in node.metadata_props if item.key == _SCOPE_KEY), "[]")
    paths = [path for path in ast.literal_eval(scopes)[:-1] if path]
    path = own_path(paths[-1]) if paths else ""
    return f"{node.op_type} in '{path}'" if path else f"{node.op_type} '{node.name}'"
