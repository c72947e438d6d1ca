"""ONNX Runtime's own mobile usability checker, in its words: how the NNAPI and Core ML providers would cut a file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from converters.contents import Contents
from converters.contents_onnx import infer_shapes, load, weight_name
from converters.quiet import quiet

ML_PROGRAM_OPS = "coreml_supported_mlprogram_ops.md"


def ort_mobile(contents: Contents) -> Iterator[tuple[str, str]]:
    """(message, layer): the checker's conclusion about each provider that it does not fully recommend.

    Its optimiser is left out: that would load the file into a runtime. Nothing is yielded where the checker cannot
    read the file or is not where onnxruntime 1.22 to 1.32 have it.
    """
    try:
        with quiet():
            from onnxruntime.tools.mobile_helpers import usability_checker as checker

            model = infer_shapes(load(contents.path))
            fixed = not checker.check_shapes(model.graph)[0]
            results = {
                "NNAPI": checker.check_nnapi_partitions(model, True),
                "CoreML": checker.check_coreml_partitions(model, True, ML_PROGRAM_OPS),
            }
    except Exception:  # a tool of another library, on a stranger's file: its words are a service, not a promise
        return
    initializers = {tensor.name for tensor in model.graph.initializer}
    for provider, result in results.items():
        if not result.num_nodes or result.suitability() == checker.PartitioningInfo.TryWithEP.YES:
            continue
        conclusion = _words(result, provider)[-1].strip()
        if not fixed:
            conclusion += " The input shapes are not fixed."
        if result.unsupported_ops:
            conclusion += f" Unsupported ops: {', '.join(sorted(result.unsupported_ops))}"
        unsupported = {name.rpartition(":")[2] for name in result.unsupported_ops}
        layers = [
            weight_name(node, initializers) or node.name for node in model.graph.node if node.op_type in unsupported
        ]
        for layer in layers or [""]:
            yield conclusion, layer


def _words(result: Any, provider: str) -> list[str]:
    """What the checker logs about a result, line by line."""
    lines: list[str] = []
    logger = logging.Logger("edgevit.usability_checker", logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    result.print_analysis(logger, provider)
    return lines
