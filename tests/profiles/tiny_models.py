"""Models of a few hundred bytes whose outputs are known by a formula: logits = mean over pixels @ WEIGHT + BIAS."""

import sys
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from converters.artifact import METADATA_KEY, Golden, Metadata
from converters.signature import Signature, Size
from profiles.profile import Protocol

WEIGHT = np.random.default_rng(7).normal(size=(3, 5)).astype(np.float32)
BIAS = np.linspace(-1, 1, 5, dtype=np.float32)
QUICK = Protocol(min_runs=5, max_runs=5, max_seconds=1, warm_up_seconds=0.02)


def expected_logits(image: np.ndarray) -> np.ndarray:
    return image.mean((2, 3)) @ WEIGHT + BIAS


def picture(size: str) -> np.ndarray:
    size_ = Size.parse(size)
    return np.random.default_rng(1).random((1, 3, size_.height, size_.width), dtype=np.float32)


def metadata(format: str, sizes: tuple[str, ...], golden_size: str, golden_error: float = 0.0) -> Metadata:
    """`golden_error`: how far the golden output is off, in its own std."""
    image = picture(golden_size)
    logits = expected_logits(image)
    return Metadata(
        model="tiny",
        format=format,
        precision="fp32",
        batch="dynamic" if format == "onnx" else 1,
        sizes=sizes,
        signature=Signature.image_classifier(5, multiple_of=1),
        source_sha256="0" * 64,
        versions={},
        flops=dict.fromkeys(sizes, 1000),
        golden=Golden(golden_size, {"image": image}, {"logits": logits + golden_error * logits.std()}),
    )


def write_onnx(path: Path, *, shape=("batch", 3, "height", "width"), about: Metadata | None = None) -> Path:
    """The model with inputs of `shape`; without `about` it is a file that this project did not write."""
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["image", "axes"], ["means"], keepdims=0),
            helper.make_node("Gemm", ["means", "weight", "bias"], ["logits"]),
        ],
        "tiny",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [shape[0], 5])],
        [
            numpy_helper.from_array(np.array([2, 3], np.int64), "axes"),
            numpy_helper.from_array(WEIGHT, "weight"),
            numpy_helper.from_array(BIAS, "bias"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    if about is not None:
        model.metadata_props.add(key=METADATA_KEY, value=about.to_json())
    onnx.save(model, path)
    return path


def write_fake_runtime(folder: Path, monkeypatch, on_load: str) -> None:
    """An `onnxruntime` that does `on_load` when a file is loaded, for processes that start from now on."""
    folder.mkdir(exist_ok=True)
    (folder / "onnxruntime.py").write_text(
        "import os, sys\n__version__ = 'fake'\n"
        "class SessionOptions:\n    def add_session_config_entry(self, *entry): pass\n"
        f"class InferenceSession:\n    def __init__(self, *given, **named):\n        {on_load}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


PYTHON = sys.executable
