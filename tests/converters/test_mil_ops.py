"""The Core ML evaluator's ops on elements and along axes, against coremltools' own definition of them.

The expected value is coremltools' value inference (its numpy implementation, which runs where an op's inputs are
constants) wherever it has one; otherwise numpy, after the op's docstring. All cases of one opset stand in one program.
"""

from __future__ import annotations

import numpy as np
import pytest
import test_mil_ops_compressed
import test_mil_ops_layers
import test_mil_ops_shape
from mil_cases import Case, check, computed, integers, normal

from converters.mil_ops import OPS

IMAGE, FOUR = normal(2, 4, 7, 6), normal(4)
HALF = np.float32(0.5)


def elementwise_cases() -> list[Case]:
    a, b = normal(2, 3, 4), normal(3, 1)
    same = integers(2, 3, 4).astype(np.float32)  # with ties
    yes, no = same > 0, integers(3, 1) > 0
    unary = ["abs", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "identity", "relu", "round"]
    unary += ["sigmoid", "sign", "sin", "sinh", "softplus", "softsign", "square", "tan", "tanh"]
    inside = np.tanh(a)
    alpha, ab = {"alpha": -HALF}, {"alpha": -HALF, "beta": np.float32(0.25)}

    def prelu(x: np.ndarray) -> np.ndarray:
        return np.where(x > 0, x, x * np.float32([0.1, -1, 2, 0]).reshape(4, 1, 1))

    def softplus_parametric(x: np.ndarray) -> np.ndarray:
        by_channel = FOUR.reshape(4, 1, 1)
        return abs(by_channel) * np.log1p(np.exp(by_channel * x))

    return [
        *(Case(op, {"x": a}) for op in unary),
        *(Case(op, {"x": inside}) for op in ("acos", "asin", "atanh")),
        Case("round", {"x": same + HALF}),  # halves go to even
        Case("relu6", {"x": 6 * a}),
        Case("silu", {"x": a}, expected=lambda x: x / (1 + np.exp(-x))),
        Case("sqrt", {"x": abs(a)}),
        Case("logical_not", {"x": yes}),
        *(Case(op, {"x": a, "y": b}) for op in ("add", "sub", "mul", "real_div", "maximum", "minimum")),
        *(Case(op, {"x": integers(2, 3), "y": integers(3)}) for op in ("add", "sub", "mul", "maximum", "minimum")),
        Case("real_div", {"x": same, "y": abs(b)}),
        *(Case(op, {"x": 3 * a, "y": b}) for op in ("floor_div", "mod")),
        *(Case(op, {"x": integers(2, 9), "y": np.int32([2, -2, 3] * 3)}) for op in ("floor_div", "mod")),
        Case("pow", {"x": abs(a), "y": b}),
        *(Case(op, {"x": same, "y": np.float32([[1]])}) for op in ("equal", "not_equal", "greater", "less")),
        *(Case(op, {"x": same, "y": np.float32([[1]])}) for op in ("greater_equal", "less_equal")),
        *(Case(op, {"x": yes, "y": no}) for op in ("logical_and", "logical_or", "logical_xor")),
        Case("select", {"cond": yes, "a": a, "b": -a}),
        Case("clip", {"x": a}, {"alpha": -HALF, "beta": np.float32(0.25)}),
        *(Case("gelu", {"x": 3 * a}, {"mode": f"{how}_APPROXIMATION"}) for how in ("TANH", "SIGMOID")),
        Case("gelu", {"x": 3 * a}, {"mode": "EXACT"}),
        Case("clamped_relu", {"x": a}, ab, lambda x: np.minimum(np.where(x >= 0, x, -0.5 * x), 0.25)),
        Case("elu", {"x": a}, alpha),
        Case("leaky_relu", {"x": a}, alpha),
        Case("linear_activation", {"x": a}, ab),
        Case("prelu", {"x": IMAGE}, {"alpha": np.float32([0.1, -1, 2, 0])}, prelu),
        Case("scaled_tanh", {"x": a}, ab),
        Case("softplus", {"x": 30 * a}),
        Case("softplus_parametric", {"x": IMAGE}, {"alpha": abs(FOUR), "beta": FOUR}, softplus_parametric),
        Case("threshold", {"x": a}, alpha),
        Case("inverse", {"x": abs(a)}, {"epsilon": HALF}),
        Case("inverse", {"x": 1 + abs(a)}),
        Case("log", {"x": abs(a)}, {"epsilon": HALF}),
        Case("log", {"x": abs(a)}),
        Case("rsqrt", {"x": abs(a)}, {"epsilon": HALF}),
        Case("sigmoid_hard", {"x": 3 * a}, {"alpha": np.float32(0.2), "beta": HALF}),
        Case("thresholded_relu", {"x": a}, {"alpha": -HALF}, lambda x: np.where(x >= -0.5, x, 0)),
        *(Case("softmax", {"x": a}, {"axis": axis}) for axis in (0, 1, -1)),
        Case("cast", {"x": 3 * a}, {"dtype": "int32"}),
        Case("cast", {"x": integers(3, 4)}, {"dtype": "fp32"}),
        Case("cast", {"x": 1000 * a}, {"dtype": "fp16"}),
        Case("cast", {"x": same}, {"dtype": "bool"}),
        *(Case("cast", {"x": abs(9 * a)}, {"dtype": f"{u}int{n}"}, opset="ios18") for u in ("", "u") for n in (8, 16)),
    ]


def axis_cases() -> list[Case]:
    x, ties = normal(2, 3, 4), integers(2, 3, 8)
    sums = ("max", "mean", "min", "sum", "prod", "l1_norm", "l2_norm", "log_sum_exp", "sum_square")
    bands = [(-1, 0), (0, -1), (0, 0), (1, 2)]
    return [
        *(Case(f"reduce_{how}", {"x": x}, {"axes": [0, -1]}) for how in sums),
        Case("reduce_log_sum", {"x": abs(x)}, {"axes": [1], "keep_dims": True}),
        *(Case(f"reduce_{how}", {"x": ties}, {"axes": [1], "keep_dims": True}) for how in ("sum", "prod", "max")),
        Case("reduce_mean", {"x": IMAGE}, {"axes": [2, 3], "keep_dims": True}),
        Case("reduce_mean", {"x": IMAGE}, {"keep_dims": True}),
        Case("reduce_sum", {"x": IMAGE}, {"axes": [1, 2, 3], "keep_dims": False}),
        *(Case(f"reduce_arg{how}", {"x": x}, {"axis": 1, "keep_dims": True}) for how in ("max", "min")),
        Case("reduce_argmax", {"x": x}, {"axis": -1, "output_dtype": "uint16"}, lambda x: x.argmax(-1), "ios17"),
        *(Case("argsort", {"x": x}, {"axis": 1, "ascending": way}) for way in (True, False)),
        Case("topk", {"x": x}, {"k": 2, "axis": 1}),
        Case("topk", {"x": x}, {"k": 3, "axis": -1, "ascending": True}),
        Case("topk", {"x": x}, {"k": 2, "return_indices": False}, lambda x: -np.sort(-x)[..., :2], "ios17"),
        Case("cumsum", {"x": x}, {"axis": 1}),
        Case("cumsum", {"x": x}, {"axis": -1, "reverse": True}),
        # coremltools' own value inference fails on `exclusive`
        Case("cumsum", {"x": x}, {"axis": 1, "exclusive": True}, lambda x: x.cumsum(1) - x),
        *(Case("band_part", {"x": normal(2, 4, 5)}, {"lower": low, "upper": up}) for low, up in bands),
    ]


CASES = [*elementwise_cases(), *axis_cases()]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, np.ndarray]:
    return computed(CASES, tmp_path_factory.mktemp("ops"))


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{i}-{case}" for i, case in enumerate(CASES)])
def test_op_computes_what_coremltools_defines(results, index):
    check(CASES[index], index, results)


def test_every_op_of_the_table_is_tested():
    tested = [*CASES, *test_mil_ops_layers.CASES, *test_mil_ops_shape.CASES]
    assert set(OPS) == {case.op for case in tested} | test_mil_ops_compressed.TESTED
