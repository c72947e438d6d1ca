"""Replaces what an exported program computes from its weights alone by the result.

A position table resized to another picture, a mask made from arange: torch computes these now, so coremltools needs
no conversion for their ops, and the file does not compute them at every run.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.export.graph_signature import InputKind

WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def fold_constants(program: torch.export.ExportedProgram) -> None:
    """Changes `program` in place. Buffers that it writes to are no constants, nor are random numbers."""
    values = _constant_values(program)
    graph = program.graph
    for node in reversed(list(graph.nodes)):
        if node.op == "placeholder" or node not in values:
            continue
        if not node.users:
            graph.erase_node(node)
        elif isinstance(values[node], torch.Tensor) and not _better_computed(node):
            name = f"{node.name}_folded"
            program.graph_module.register_buffer(name, values[node])
            with graph.inserting_before(node):
                constant = graph.create_node("get_attr", name, name=name)
            constant.meta = dict(node.meta)
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
    program.graph_module.recompile()


def _constant_values(program: torch.export.ExportedProgram) -> dict[torch.fx.Node, Any]:
    """What each node holds that depends on weights alone. Without fake tensors: the weights are real ones."""
    written = set(program.graph_signature.buffers_to_mutate.values())
    weights = {
        item.arg.name: _weight(program, item.target)
        for item in program.graph_signature.input_specs
        if item.kind in WEIGHTS and item.target not in written
    }
    values: dict[torch.fx.Node, Any] = {}
    with torch.no_grad():
        for node in program.graph.nodes:
            if node.op == "placeholder" and node.name in weights:
                values[node] = weights[node.name]
            elif node.op == "call_function" and _pure(node.target) and all(i in values for i in node.all_input_nodes):
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values


def _weight(program: torch.export.ExportedProgram, name: str) -> torch.Tensor:
    held = program.state_dict if name in program.state_dict else program.constants
    return held[name].detach()


def _pure(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return target is operator.getitem
    return torch.Tag.nondeterministic_seeded not in target.tags and not target._schema.is_mutable


def _better_computed(node: torch.fx.Node) -> bool:
    """Ops that make much of little: as constants they would only make the file larger."""
    return node.target is torch.ops.aten.expand.default or not node.all_input_nodes
