"""What is refused leaves no file: wrong arguments before any work, wrong files after they were run."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from export_models import Small, lively_small, pictures

import converters
from converters import run
from converters.errors import EdgeVitError, ParityError
from converters.signature import Size

SIZE = Size.parse("32")
SIZES = Size.parse_list("64,96")
FORMATS = ("onnx", "tflite", "coreml")


def export(module, out, formats=("onnx",), sizes=(SIZE,), sample_inputs=pictures, **options):
    return converters.export(
        module,
        Small.signature,
        name="small",
        out=out,
        formats=formats,
        sizes=sizes,
        sample_inputs=sample_inputs,
        **options,
    )


def patch_convert(monkeypatch, form, replacement):
    """`replacement(original, module, …)` in the place of a format's converter, which has no notes to give then."""
    module = import_module(f"converters.{form}")
    original = module.convert
    monkeypatch.setattr(module, "convert", lambda *args, **options: replacement(original, *args, **options) or [])


def left_in(folder):
    return sorted(path.name for path in folder.rglob("*"))


def copy(source, draft):
    (shutil.copytree if source.is_dir() else shutil.copy)(source, draft)


def corrupted(path, small):
    """Doubles half of the weights of one layer, where they lie in the file."""
    weights = small.qkv.weight.detach().numpy().astype(np.float16 if path.is_dir() else np.float32)
    wrong = weights.copy()
    wrong[:, :8] *= 2
    file = next(path.rglob("weight.bin")) if path.is_dir() else path
    content = file.read_bytes()
    before, after = (weights, wrong) if weights.tobytes() in content else (weights.T, wrong.T)
    assert content.count(before.tobytes()) == 1
    file.write_bytes(content.replace(before.tobytes(), after.tobytes()))


@pytest.mark.parametrize("form", FORMATS)
def test_a_file_of_other_weights_is_refused_and_the_old_one_stays(form, small, small_files, tmp_path, monkeypatch):
    """What the converter wrote, with a few weights changed in the file."""
    made = small_files[form].path

    def wrong(original, module, signature, sizes, draft, **options):
        copy(made, draft)
        corrupted(draft, small)

    old = tmp_path / made.name
    old.mkdir() if made.is_dir() else old.touch()
    before = left_in(tmp_path)
    patch_convert(monkeypatch, form, wrong)
    with pytest.raises(ParityError, match=rf"{made.name}: output 'logits' at size (64|96|64x72) is off by"):
        export(small, tmp_path, [form], sizes=SIZES, target="ios18")
    assert left_in(tmp_path) == before
    # The same way without the corruption passes, so it is the corruption that was found.
    patch_convert(monkeypatch, form, lambda original, module, signature, sizes, draft, **options: copy(made, draft))
    export(small, tmp_path, [form], sizes=SIZES, target="ios18")
    assert run.open_artifact(old).metadata.verified


def test_a_size_that_is_wrong_alone_is_found(small, small_files, tmp_path, monkeypatch):
    """The file advertises both sizes and is right at the first one only."""

    def wrong_at_96(path, *, size):
        session = run.load(path, size=size)
        off = 0.01 if size == Size.parse("96") else 0.0
        return replace(session, call=lambda inputs: {"logits": session.call(inputs)["logits"] + off})

    copied = small_files["onnx"].path
    patch_convert(monkeypatch, "onnx", lambda original, module, signature, sizes, draft, **options: copy(copied, draft))
    monkeypatch.setattr("converters.pipeline.load", wrong_at_96)
    with pytest.raises(ParityError, match="at size 96"):
        export(small, tmp_path, sizes=SIZES)
    assert left_in(tmp_path) == []


def test_a_batch_that_was_baked_in_is_found(small, tmp_path, monkeypatch):
    """The trace of one batch size, sold as any."""

    def baked(original, *args, batch, **options):
        original(*args, batch=2, **options)

    patch_convert(monkeypatch, "onnx", baked)
    with pytest.raises(ParityError, match=r"small\.onnx: takes batch 2 at size 32, not dynamic"):
        export(small, tmp_path)
    assert left_in(tmp_path) == []


def never(*args, **options):
    raise AssertionError("work began")


def test_an_output_that_says_nothing_is_refused_before_the_work(tmp_path, monkeypatch):
    patch_convert(monkeypatch, "onnx", never)
    dead = lively_small()
    torch.nn.init.zeros_(dead.head.weight)  # only the bias is left: logits with a spread, the same for every picture
    torch.nn.init.normal_(dead.head.bias)
    with pytest.raises(ParityError, match=r"'logits' at size 32 .* would prove nothing; use trained weights"):
        export(dead, tmp_path / "out")
    torch.nn.init.constant_(dead.head.bias, float("nan"))
    with pytest.raises(ParityError, match="not finite"):
        export(dead, tmp_path / "out")
    assert left_in(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": Size.parse_list("64,100")}, "size 100: height must be a multiple of 8; nearest: 96 or 104"),
        ({"sizes": ()}, "at least one"),
        ({"formats": ["onnx", "coremltools"]}, "format 'coremltools': choose from onnx, tflite, coreml"),
        ({"formats": ["tflite"], "precision": "int8"}, "tflite: precision 'int8' is not offered; fp32 or fp16 is"),
        ({"batch": 4}, "batch 4: 1 or dynamic"),
        ({"target": "ios12"}, "target 'ios12': choose from"),
    ],
)
def test_wrong_arguments_are_found_before_any_work(options, message, small, tmp_path):
    with pytest.raises(EdgeVitError, match=message):
        export(small, tmp_path / "out", sample_inputs=never, **options)
    assert left_in(tmp_path) == []


def test_examples_of_a_wrong_shape(small, tmp_path):
    with pytest.raises(EdgeVitError, match=r"'image' at size 32 must be \(3, 3, 32, 32\), not \(3, 3, 16, 16\)"):
        export(small, tmp_path, sample_inputs=lambda size, n: pictures(Size.parse("16"), n))
    with pytest.raises(EdgeVitError, match=r"'image' at size 32 must be \(3, 3, 32, 32\), not nothing"):
        export(small, tmp_path, sample_inputs=lambda size, n: {"x": np.zeros(3)})


def full_disk(original, module, signature, sizes, draft, **options):
    draft.write_bytes(b"half a file")
    try:
        raise OSError(errno.ENOSPC, "No space left on device")
    except OSError as error:
        raise RuntimeError("while saving") from error


def test_a_full_disk_is_one_line_and_leaves_nothing(small, tmp_path, monkeypatch):
    patch_convert(monkeypatch, "onnx", full_disk)
    with pytest.raises(EdgeVitError, match=r"small\.onnx: cannot write it \(No space left on device\)$") as caught:
        export(small, tmp_path)
    assert caught.value.exit_code == 2
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("form", FORMATS)
def test_an_interrupt_leaves_nothing(form, small, small_files, tmp_path, monkeypatch):
    def interrupted(original, module, signature, sizes, draft, **options):
        copy(small_files[form].path, draft)
        raise KeyboardInterrupt

    patch_convert(monkeypatch, form, interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(small, tmp_path, [form])
    assert left_in(tmp_path) == []


class TooHard(Small):
    def forward(self, image):
        return super().forward(image) if image.max() > 0 else super().forward(-image)


@pytest.mark.parametrize("form", FORMATS)
def test_what_a_converter_cannot_convert_is_one_line(form, tmp_path, capfd):
    with pytest.raises(EdgeVitError, match=r"^torch\.export cannot trace the module: [^\n]+, called at [^\n]+$"):
        export(TooHard().eval(), tmp_path, [form])
    assert left_in(tmp_path) == []
    assert capfd.readouterr() == ("", "")


def test_a_torchscript_module_is_refused(tmp_path):
    with pytest.raises(EdgeVitError, match="a TorchScript module cannot be traced"):
        export(torch.jit.script(torch.nn.Identity()), tmp_path)
    assert left_in(tmp_path) == []


def test_converters_import_nothing_heavy_until_they_work():
    code = """if True:
        import sys
        import converters, converters.artifact, converters.parity, converters.plan, converters.run
        import edgevit.cli.export
        heavy = {"torch", "onnx", "onnxruntime", "coremltools", "litert_torch", "ai_edge_litert", "rich", "sklearn"}
        print(sorted(heavy & set(sys.modules)))
    """
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
