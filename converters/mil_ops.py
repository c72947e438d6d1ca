"""What each op of a Core ML program computes, in torch and fp32: the table `OPS`, gathered from its topics.

Sources: the docstrings and value inference in coremltools.converters.mil.mil.ops.defs (coremltools 9.0). An op or an
argument that is not here is not guessed. docs/coreml-evaluator.md says what is lacking and why.
"""

from __future__ import annotations

from converters import (
    mil_ops_compressed,
    mil_ops_gather,
    mil_ops_layers,
    mil_ops_math,
    mil_ops_recurrent,
    mil_ops_resize,
    mil_ops_shape,
)
from converters.mil_table import OPS

TOPICS = (
    mil_ops_math,
    mil_ops_layers,
    mil_ops_recurrent,
    mil_ops_shape,
    mil_ops_gather,
    mil_ops_resize,
    mil_ops_compressed,
)

__all__ = ["OPS", "TOPICS"]
