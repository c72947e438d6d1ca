"""The rules of lint, each with its source. A rule takes a file's contents and yields (message, layer or "")."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from converters.contents import Contents, Node, Value
from converters.lint_ops import GPU_OPS, XNNPACK_OPS
from converters.lint_ort import ort_mobile

Hits = Iterator[tuple[str, str]]
ALL = ("onnx", "tflite", "coreml")
MAX_RANK = 4
MAX_RANK_COREML = 5
MAX_LENGTH = 16384
FREE_OF_CHARGE = {"const", "cast"}

RECURRENT = ("lstm", "gru", "rnn")


@dataclass(frozen=True)
class Rule:
    name: str
    formats: tuple[str, ...]
    source: str
    check: Callable[[Contents], Hits]


def _computed(contents: Contents) -> Iterator[tuple[Node, Value]]:
    """Every value that a node computes."""
    return ((node, value) for node in contents.nodes for value in node.outputs if not value.constant)


def _rank(contents: Contents) -> Hits:
    for node, value in _computed(contents):
        rank = len(value.shape or ())
        if contents.format == "coreml" and rank > MAX_RANK_COREML:
            yield f"tensors of rank above {MAX_RANK_COREML}, which Core ML does not run at all", node.label
        elif rank > MAX_RANK:
            yield (
                f"tensors of rank above {MAX_RANK}, which GPUs and the Neural Engine tend to leave to the CPU",
                node.label,
            )


def _length(contents: Contents) -> Hits:
    for node, value in _computed(contents):
        if any(length is not None and length > MAX_LENGTH for length in value.shape or ()):
            yield f"an axis longer than {MAX_LENGTH}, the Neural Engine's limit for height and width", node.label


def _dynamic(contents: Contents) -> Hits:
    consequence = {
        "onnx": "NNAPI and Core ML providers want every length fixed (export one size with --batch 1)",
        "tflite": "XNNPACK takes no dynamic tensors",
        "coreml": "with a range of shapes only the default one runs on the Neural Engine",
    }[contents.format]
    for function in contents.functions:
        for value in function.inputs:
            if value.shape is None or None in value.shape:
                yield f"input '{value.name}' has free lengths: {consequence}", ""


def _gather(contents: Contents) -> Hits:
    for node in contents.nodes:
        if node.type.lower().startswith(("gather", "scatter")):
            yield "gather and scatter, which the Neural Engine and many delegates leave to the CPU", node.label


def _integers(contents: Contents) -> Hits:
    for node, value in _computed(contents):
        if value.dtype in ("int32", "int64", "uint32", "uint64"):
            yield f"computes with {value.dtype}, which float accelerators leave to the CPU", node.label


def _recurrent(contents: Contents) -> Hits:
    for node in contents.nodes:
        name = node.type.lower()
        if any(name == kind or name.endswith(f"_{kind}") for kind in RECURRENT):
            yield "recurrent layers, which have no path on the Neural Engine and run step by step", node.label


def _xnnpack(contents: Contents) -> Hits:
    for node in contents.nodes:
        if node.type not in XNNPACK_OPS:
            yield f"{node.type} is not among XNNPACK's operators: it runs in LiteRT's own kernel", node.label


def _gpu(contents: Contents) -> Hits:
    for node in contents.nodes:
        if node.type not in GPU_OPS:
            yield f"{node.type} is not among the GPU delegate's operators: the graph is cut there", node.label


def _kept_in_fp32(contents: Contents) -> Hits:
    """The ops of an fp16 program that compute in fp32; a program without any fp16 is the next rule's."""
    halves = any(value.dtype == "float16" for _, value in _computed(contents))
    for node, value in _computed(contents):
        if halves and value.dtype == "float32" and node.type not in FREE_OF_CHARGE:
            yield "kept in fp32 in an fp16 program: these ops leave the Neural Engine", node.label


def _fp32_program(contents: Contents) -> Hits:
    dtypes = {value.dtype for node, value in _computed(contents) if node.type not in FREE_OF_CHARGE}
    if "float32" in dtypes and "float16" not in dtypes:
        yield "an fp32 program: it runs on the CPU and the GPU, never on the Neural Engine", ""


RULES = (
    Rule("rank", ("onnx", "tflite"), "https://machinelearning.apple.com/research/neural-engine-transformers", _rank),
    Rule(
        "rank",
        ("coreml",),
        "https://github.com/apple/coremltools/issues/1723; "
        "https://machinelearning.apple.com/research/neural-engine-transformers",
        _rank,
    ),
    Rule(
        "length",
        ("coreml",),
        "https://ane-guide.readthedocs.io/en/latest/part-5-practice/17-model-design-rules.html",
        _length,
    ),
    Rule(
        "dynamic",
        ("onnx",),
        "https://onnxruntime.ai/docs/tutorials/mobile/helpers/make-dynamic-shape-fixed.html",
        _dynamic,
    ),
    Rule(
        "dynamic",
        ("tflite",),
        "https://github.com/google-ai-edge/LiteRT/blob/main/tflite/delegates/xnnpack/README.md",
        _dynamic,
    ),
    Rule("dynamic", ("coreml",), "https://developer.apple.com/forums/thread/724930", _dynamic),
    Rule(
        "gather",
        ALL,
        "https://github.com/hollance/neural-engine/blob/master/docs/unsupported-layers.md; "
        "https://ane-guide.readthedocs.io/en/latest/part-1-machine/04-capability-surface.html",
        _gather,
    ),
    Rule(
        "integers",
        ALL,
        "https://ane-guide.readthedocs.io/en/latest/part-5-practice/17-model-design-rules.html; "
        "https://github.com/google-ai-edge/LiteRT/blob/main/tflite/delegates/xnnpack/README.md",
        _integers,
    ),
    Rule(
        "recurrent",
        ALL,
        "https://github.com/hollance/neural-engine/blob/master/docs/unsupported-layers.md; "
        "https://ane-guide.readthedocs.io/en/latest/part-1-machine/04-capability-surface.html",
        _recurrent,
    ),
    Rule(
        "xnnpack",
        ("tflite",),
        "tensorflow/lite/delegates/xnnpack/xnnpack_delegate.cc (VisitNode) of tensorflow/tensorflow at 0004bf9ddef9",
        _xnnpack,
    ),
    Rule(
        "gpu-delegate",
        ("tflite",),
        "tflite/tools/versioning/gpu_compatibility.cc of google-ai-edge/LiteRT at 007226f498a6",
        _gpu,
    ),
    Rule(
        "kept-in-fp32",
        ("coreml",),
        "https://apple.github.io/coremltools/docs-guides/source/typed-execution-example.html",
        _kept_in_fp32,
    ),
    Rule(
        "fp32-program",
        ("coreml",),
        "https://apple.github.io/coremltools/docs-guides/source/typed-execution-example.html",
        _fp32_program,
    ),
    Rule(
        "ort-mobile",
        ("onnx",),
        "onnxruntime.tools.mobile_helpers.usability_checker; "
        "https://onnxruntime.ai/docs/tutorials/mobile/helpers/model-usability-checker.html",
        ort_mobile,
    ),
)
