"""Every intermediate value of a model file, computed by its own runtime without optimisations, for given inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converters.artifact import format_of
from converters.errors import EdgeVitError, first_line

Intermediate = tuple[str, str, np.ndarray]  # name, op type, array


def intermediates(path: Path, inputs: Mapping[str, np.ndarray], entry_point: str | None) -> Iterator[Intermediate]:
    """What each node of `path` computes for `inputs`, by the file's names, in its order.

    `entry_point` is the TFLite signature or the Core ML function; None takes the only one. Constants are left out.
    ONNX Runtime runs with its graph optimisations off and LiteRT without XNNPACK, since both would merge nodes: what
    an optimised kernel alone does wrong is not seen here. Raises EdgeVitError when the file cannot be run so.
    """
    reader = {"onnx": _onnx, "tflite": _tflite, "coreml": _coreml}[format_of(path)]
    return reader(path, dict(inputs), entry_point)


def _onnx(path: Path, inputs: dict[str, np.ndarray], _: str | None) -> Iterator[Intermediate]:
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        model = onnx.load(path)
        kinds = {name: node.op_type for node in model.graph.node for name in node.output if name}
        declared = {item.name for item in model.graph.output}
        # No types: the runtime infers them.
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in kinds if name not in declared)
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        arrays = session.run(list(kinds), inputs)
    except Exception as error:  # its exceptions share no base class
        raise EdgeVitError(f"{path}: ONNX Runtime cannot run it node by node ({first_line(error)})") from error
    for (name, kind), array in zip(kinds.items(), arrays, strict=True):
        if isinstance(array, np.ndarray):  # not a sequence or a map
            yield name, kind, array


def _tflite(path: Path, inputs: dict[str, np.ndarray], entry_point: str | None) -> Iterator[Intermediate]:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    from converters.contents_tflite import load, op_name
    from converters.quiet import quiet
    from converters.tflite_file import text

    model = load(path)
    signatures = {text(item.signatureKey): item.subgraphIndex for item in model.signatureDefs or []}
    key = entry_point if entry_point in signatures else next(iter(signatures), "")
    try:
        with quiet():
            interpreter = Interpreter(
                model_path=str(path),
                num_threads=1,
                experimental_preserve_all_tensors=True,
                experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            )
            interpreter.allocate_tensors()
            interpreter.get_signature_runner(key)(**inputs)
    except (ValueError, RuntimeError) as error:
        raise EdgeVitError(f"{path}: LiteRT cannot run it node by node ({first_line(error)})") from error
    subgraph = model.subgraphs[signatures[key]]
    for operator in subgraph.operators:
        for index in operator.outputs:
            array = interpreter.get_tensor(int(index), signatures[key])
            tensor = subgraph.tensors[index]
            yield text(tensor.name), op_name(model.operatorCodes[operator.opcodeIndex]), _dequantised(array, tensor)


def _dequantised(array: np.ndarray, tensor: Any) -> np.ndarray:
    """The numbers that per-tensor quantised integers stand for; other tensors unchanged."""
    quantisation = tensor.quantization
    if (
        array.dtype.kind not in "iu"
        or quantisation is None
        or quantisation.scale is None
        or len(quantisation.scale) != 1
    ):
        return array
    return (array.astype(np.float32) - np.float32(quantisation.zeroPoint[0])) * np.float32(quantisation.scale[0])


def _coreml(path: Path, inputs: dict[str, np.ndarray], entry_point: str | None) -> Iterator[Intermediate]:
    from converters.mil import Program

    program = Program(path)
    return iter(program.values(inputs, function=entry_point if entry_point in program.functions else None))
