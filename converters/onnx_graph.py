"""Edits of an exporter's ONNX graph that change what runtimes can do with it, and not what it computes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common


def tidy(model: ir.Model) -> None:
    """Reshapes to constants, picks of one element as slices, and no node left that nothing reads.

    What computes the shape for a Reshape out of Shape and Gather takes a graph off NNAPI, QNN and Core ML, although
    all of it but one length is known: `-1` says the same.
    """
    common.ShapeInferencePass(data_prop=True)(model)  # knows the lengths behind a shape that the graph computes
    for node in list(model.graph):
        if node.op_type == "Reshape":
            _fix_reshape(model, node)
        elif node.op_type == "Gather":
            _slice_instead(model, node)
    common.RemoveUnusedNodesPass()(model)


def _fix_reshape(model: ir.Model, node: ir.Node) -> None:
    """The target shape as a constant, where at most one length of the output is symbolic."""
    target, shape = node.inputs[1], node.outputs[0].shape
    if target is None or shape is None or ir.convenience.get_const_tensor(target) is not None:
        return
    lengths = [length if isinstance(length, int) else -1 for length in shape]
    if lengths.count(-1) <= 1 and 0 not in lengths:
        node.replace_input_with(1, _constant(model, f"{node.outputs[0].name}_shape", lengths))


def _slice_instead(model: ir.Model, node: ir.Node) -> None:
    """`x[:, 3]` as Slice and Squeeze: Gather with one fixed index is what accelerators lack a kernel for."""
    data, index = node.inputs
    number = None if index is None else ir.convenience.get_const_tensor(index)
    known = data is not None and not data.is_initializer() and data.shape is not None
    if number is None or number.shape.rank() != 0 or not known:
        return
    axis, start = node.attributes.get_int("axis", 0), int(number.numpy())
    name, graph = node.outputs[0].name, model.graph
    assert name is not None
    axes = _constant(model, f"{name}_axis", [axis])
    end = np.iinfo(np.int64).max if start == -1 else start + 1
    bounds = [_constant(model, f"{name}_{what}", [value]) for what, value in (("start", start), ("end", end))]
    part = ir.node("Slice", [data, *bounds, axes], name=f"{node.name}_slice")
    whole = ir.node("Squeeze", [part.outputs[0], axes], name=f"{node.name}_squeeze")
    for made in (part, whole):
        made.metadata_props.update(node.metadata_props)
    part.outputs[0].name, whole.outputs[0].name = f"{name}_part", f"{name}_picked"
    part.outputs[0].type = whole.outputs[0].type = node.outputs[0].type
    whole.outputs[0].shape = node.outputs[0].shape
    graph.insert_before(node, [part, whole])
    ir.convenience.replace_all_uses_with(node.outputs[0], whole.outputs[0], replace_graph_outputs=True)
    was_output = whole.outputs[0].is_graph_output()
    graph.remove(node, safe=True)
    if was_output:
        whole.outputs[0].name = name


def _constant(model: ir.Model, name: str, values: list[int]) -> ir.Value:
    tensor = ir.tensor(np.array(values, np.int64), name=name)
    value = ir.Value(
        name=name, shape=ir.Shape([len(values)]), type=ir.TensorType(ir.DataType.INT64), const_value=tensor
    )
    model.graph.register_initializer(value)
    return value
