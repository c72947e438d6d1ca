"""Each rule finds what it is for, by layer, and keeps quiet about a file that gives no reason."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
import torch
from export_models import pictures
from onnx import TensorProto, helper
from torch import nn

import converters
from converters import contents_tflite, lint_ops
from converters.contents import Contents, Function, Node, Value
from converters.lint import Finding, lint, lint_contents
from converters.lint_rules import RULES
from converters.quiet import quiet
from converters.signature import Size

DOCS = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()


def contents(form, *nodes, inputs=()):
    """A file's contents as a reader gives them."""
    function = Function("main", tuple(inputs), (), tuple(nodes))
    return Contents(Path(f"x.{form}"), form, "", (function,), (), ())


def node(kind, shape=(1, 8, 8, 8), dtype="float32", layer="blocks.0"):
    return Node(kind, "name", (), (Value("y", shape, dtype),), layer)


def rules(found):
    return {finding.rule for finding in found}


def one(found, rule):
    [finding] = [item for item in found if item.rule == rule]
    return finding


def test_files_of_a_plain_network_give_little_to_say(paths):
    assert lint(paths["tflite"]) == []
    assert lint(paths["coreml"]) == []
    assert rules(lint(paths["onnx"])) == {"dynamic", "integers", "ort-mobile"}  # it is dynamic


def test_a_fixed_onnx_file_is_what_the_dynamic_one_should_be(small, tmp_path):
    [artifact] = converters.export(
        small, small.signature, name="x", out=tmp_path, formats=["onnx"], sizes=Size.parse_list("64"), batch=1,
        sample_inputs=pictures,
    )  # fmt: skip
    assert not {"dynamic", "integers"} & rules(lint(artifact.path))


@pytest.mark.parametrize(
    ("found", "rule"),
    [
        (contents("onnx", node("Reshape", (1, 2, 3, 4, 5))), "rank"),
        (contents("tflite", node("RESHAPE", (1, 2, 3, 4, 5))), "rank"),
        (contents("coreml", node("reshape", (1, 2, 3, 4, 5), "float16")), "rank"),
        (contents("coreml", node("reshape", (1, 1, 1, 16385), "float16")), "length"),
        (contents("onnx", node("GatherElements")), "gather"),
        (contents("tflite", node("SCATTER_ND")), "gather"),
        (contents("coreml", node("gather_along_axis", dtype="float16")), "gather"),
        (contents("onnx", node("Shape", (4,), "int64")), "integers"),
        (contents("tflite", node("CAST", (4,), "int32")), "integers"),
        (contents("onnx", node("LSTM")), "recurrent"),
        (contents("onnx", node("GRU")), "recurrent"),
        (contents("tflite", node("UNIDIRECTIONAL_SEQUENCE_LSTM")), "recurrent"),
        (contents("coreml", node("lstm", dtype="float16")), "recurrent"),
        (contents("tflite", node("CUMSUM")), "xnnpack"),
        (contents("tflite", node("CUSTOM FlexErf")), "gpu-delegate"),
    ],
)
def test_each_rule_names_the_layer(found, rule):
    finding = one(lint_contents(found), rule)
    assert finding.layers == ("blocks.0",)
    assert finding.severity == "warning"
    assert finding.line.startswith(f"{rule}: ")
    assert finding.line.endswith(": blocks.0")


def test_limits_are_where_the_rules_say():
    quiet_file = contents(
        "coreml", node("reshape", (1, 2, 3, 4), "float16"), node("conv", (1, 16384, 16384, 4), "float16")
    )
    assert lint_contents(quiet_file) == []
    six = one(lint_contents(contents("coreml", node("reshape", (1,) * 6, "float16"))), "rank")
    assert "Core ML does not run at all" in six.message


def test_free_lengths_are_named_once():
    image = Value("image", (None, 3, 64, 64), "float32")
    for form in ("onnx", "tflite", "coreml"):
        finding = one(lint_contents(contents(form, inputs=[image])), "dynamic")
        assert "'image'" in finding.message
    assert lint_contents(contents("onnx", inputs=[Value("image", (1, 3, 64, 64), "float32")])) == []


def test_a_rule_with_many_layers_is_one_line():
    found = lint_contents(contents("onnx", *(node("Gather", layer=f"blocks.{i}") for i in range(30))))
    finding = one(found, "gather")
    assert len(finding.layers) == 30
    assert finding.line.endswith("blocks.0, blocks.1, blocks.2 and 27 more")


def test_fp32_in_core_ml():
    """Kept ops are told by layer; a program without fp16 as a whole; the casts at its ends are neither."""
    half, full = node("conv", dtype="float16", layer="a"), node("softmax", dtype="float32", layer="b")
    assert one(lint_contents(contents("coreml", half, full)), "kept-in-fp32").layers == ("b",)
    assert rules(lint_contents(contents("coreml", full))) == {"fp32-program"}
    assert lint_contents(contents("coreml", half, node("cast", dtype="float32"))) == []


def test_a_real_fp32_program(small, tmp_path):
    [artifact] = converters.export(
        small, small.signature, name="x", out=tmp_path, formats=["coreml"], sizes=Size.parse_list("64"),
        precision="fp32", sample_inputs=pictures,
    )  # fmt: skip
    assert "fp32-program" in rules(lint(artifact.path))


class Counting(nn.Module):
    def forward(self, x):
        return x.cumsum(dim=-1) * 0.5


def test_a_real_tflite_file_with_an_operator_that_no_delegate_has(tmp_path):
    """CUMSUM is the GPU delegate's and not XNNPACK's; the file says so without being run."""
    with quiet():
        import litert_torch

        content = litert_torch.convert(Counting().eval(), (torch.zeros(2, 8),)).model_content()
    (tmp_path / "x.tflite").write_bytes(content)
    found = lint(tmp_path / "x.tflite")
    assert "CUMSUM" in one(found, "xnnpack").message
    assert "gpu-delegate" not in rules(found)


def test_onnx_runtimes_checker_has_the_last_word(tmp_path):
    """Its tables know Relu and no Einsum; its own sentences are passed on."""
    for kind, shape, attributes in (("Einsum", [4, 4], {"equation": "ij->ji"}), ("Relu", [4, 4], {})):
        graph = helper.make_graph(
            [helper.make_node(kind, ["x"], ["y"], name="the_node", **attributes)],
            "graph",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        )
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)]), tmp_path / f"{kind}.onnx")
    assert lint(tmp_path / "Relu.onnx") == []
    found = [item for item in lint(tmp_path / "Einsum.onnx") if item.rule == "ort-mobile"]
    assert {item.message.split()[0] for item in found} == {"NNAPI", "CoreML"}
    assert all("cannot run any nodes" in item.message and "ai.onnx:Einsum" in item.message for item in found)
    assert all(item.layers == ("the_node",) for item in found)


def test_operator_lists_hold_only_operators_of_the_schema():
    known = set(contents_tflite.OPS.values())
    assert known >= lint_ops.XNNPACK_OPS
    assert known >= lint_ops.GPU_OPS
    assert {"CONV_2D", "BATCH_MATMUL", "GELU"} <= lint_ops.XNNPACK_OPS & lint_ops.GPU_OPS
    assert "GATHER" not in lint_ops.XNNPACK_OPS


def test_every_rule_is_explained_with_its_sources():
    for rule in RULES:
        assert f"`{rule.name}`" in DOCS
        for source in re.split("; ", rule.source):
            assert source.split(" ")[0] in DOCS


def test_findings_are_plain_data(paths):
    [first, *_] = lint(paths["onnx"])
    assert isinstance(first, Finding)
    assert first.source.startswith("https://")
