"""Files that were exported well and then changed in one layer: what verify and bisect must find."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from converters.contents_coreml import BLOB_HEADER, _operations
from converters.contents_tflite import load
from converters.coreml import parse_specification, specification_file
from converters.tflite_file import text


def tamper_onnx(path: Path, out: Path, initializer: str, factor: float = 1.2) -> Path:
    """A copy in which one initializer's first row (output channel) is multiplied."""
    model = onnx.load(path)
    tensor = next(item for item in model.graph.initializer if item.name == initializer)
    array = numpy_helper.to_array(tensor).copy()
    array[0] *= factor
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, out)
    return out


def swap_onnx_channels(path: Path, out: Path, layer: str) -> Path:
    """A copy in which the first two output channels of a layer have changed places."""
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        if tensor.name in (f"{layer}.weight", f"{layer}.bias"):
            array = numpy_helper.to_array(tensor).copy()
            array[[0, 1]] = array[[1, 0]]
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, out)
    return out


def replace_onnx_op(path: Path, out: Path, old: str, new: str) -> Path:
    """A copy in which the first node of type `old` is of type `new`."""
    model = onnx.load(path)
    next(node for node in model.graph.node if node.op_type == old).op_type = new
    onnx.save(model, out)
    return out


def tamper_tflite(path: Path, out: Path, layer: str, shape: tuple[int, ...], factor: float = 1.2) -> Path:
    """A copy in which the first row of the weight of that shape, in the tensor named after `layer`, is multiplied."""
    model = load(path)
    stored = next(
        bytes(model.buffers[tensor.buffer].data)
        for graph in model.subgraphs
        for tensor in graph.tensors
        if layer in text(tensor.name) and tuple(tensor.shape) == shape and model.buffers[tensor.buffer].data is not None
    )
    array = np.frombuffer(stored, np.float32).copy().reshape(shape)
    array[0] *= factor
    content = path.read_bytes()
    assert content.count(stored) == 1
    out.write_bytes(content.replace(stored, array.tobytes()))
    return out


def tamper_coreml(path: Path, out: Path, constant: str, factor: float = 1.2) -> Path:
    """A copy in which the constant whose name ends so, in the weight file, is multiplied."""
    shutil.copytree(path, out)
    spec = parse_specification(specification_file(out), out)
    blob = next(
        operation.attributes["val"]
        for function in spec.mlProgram.functions.values()
        for block in function.block_specializations.values()
        for operation in _operations(block)
        if operation.type == "const" and operation.outputs[0].name.endswith(constant)
    )
    file = out / "Data" / "com.apple.CoreML" / "weights" / "weight.bin"
    content = bytearray(file.read_bytes())
    offset = blob.blobFileValue.offset
    _, _, length, start = BLOB_HEADER.unpack(content[offset : offset + BLOB_HEADER.size])
    dtype = np.float16 if "fp16" in constant else np.float32
    array = np.frombuffer(content[start : start + length], dtype)
    content[start : start + length] = (array * dtype(factor)).astype(dtype).tobytes()
    file.write_bytes(content)
    return out
