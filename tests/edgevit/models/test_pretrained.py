"""Weights of timm, Hugging Face and CVNets give the logits that they give at home, from the picture on."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import MobileViTConfig, MobileViTForImageClassification
from transformers.models.mobilevit.image_processing_mobilevit import MobileViTImageProcessor
from transformers.models.mobilevit.image_processing_pil_mobilevit import MobileViTImageProcessorPil

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import evaluation_transform, photographs
from edgevit.models.pretrained import load_weights, read_weights
from edgevit.models.registry import create_model

VARIANTS = ("mobilevit_xxs", "mobilevit_xs", "mobilevit_s")
SIZES = ((160, 160), (192, 192), (224, 224), (256, 256), (288, 288), (320, 320), (192, 320))
HUGGING_FACE = {
    "mobilevit_xxs": {
        "hidden_sizes": [64, 80, 96],
        "neck_hidden_sizes": [16, 16, 24, 48, 64, 80, 320],
        "expand_ratio": 2.0,
    },
    "mobilevit_xs": {"hidden_sizes": [96, 120, 144], "neck_hidden_sizes": [16, 32, 48, 64, 80, 96, 384]},
    "mobilevit_s": {"hidden_sizes": [144, 192, 240], "neck_hidden_sizes": [16, 32, 64, 96, 128, 160, 640]},
}
# apple/mobilevit-small's preprocessor_config.json.
HUGGING_FACE_PROCESSOR = {
    "crop_size": {"height": 256, "width": 256},
    "do_center_crop": True,
    "do_flip_channel_order": True,
    "do_resize": True,
    "resample": 2,
    "size": {"shortest_edge": 288},
}


@torch.no_grad()
def randomise(model: nn.Module) -> nn.Module:
    """Random weights under which every layer matters, and logits have a standard deviation near 1.

    Default initialisations hide mistakes: zero biases, unit norms and, in transformers, logits of 1e-41.
    """
    generator = torch.Generator().manual_seed(0)
    norms = (nn.BatchNorm2d, nn.LayerNorm)
    for module in model.modules():
        if isinstance(module, norms):
            module.weight.uniform_(0.7, 1.3, generator=generator)
            module.bias.normal_(0, 0.2, generator=generator)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            module.weight.normal_(0, module.weight[0].numel() ** -0.5, generator=generator)
            if module.bias is not None:
                module.bias.normal_(0, 0.2, generator=generator)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # running statistics become those of the next batch
    coarse, fine = (torch.rand(4, 3, side, side, generator=generator) for side in (8, 128))
    image = torch.cat((nn.functional.interpolate(coarse, size=128, mode="bilinear"), fine))  # like pictures, and noise
    model.train()(image)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            shift = torch.randn(module.running_mean.shape, generator=generator)
            module.running_mean += 0.1 * shift * module.running_var.sqrt()
            module.running_var *= 0.8 + 0.4 * torch.rand(module.running_var.shape, generator=generator)
    logits = model.eval()(image)
    classifier = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    classifier.weight /= (logits if isinstance(logits, torch.Tensor) else logits.logits).std()
    return model


def timm_reference(name: str, num_classes: int = 1000) -> nn.Module:
    return randomise(timm.create_model(name, num_classes=num_classes))


def hugging_face_reference(name: str, num_labels: int = 1000) -> nn.Module:
    config = MobileViTConfig(**HUGGING_FACE[name], num_labels=num_labels)
    return randomise(MobileViTForImageClassification(config))


def saved(state: dict[str, torch.Tensor], path: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    return path


@torch.no_grad()
def check_equal(logits: torch.Tensor, reference: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert 0.3 < reference.std() < 3, f"a comparison of logits with std {reference.std():.2g} proves nothing"
    assert (logits - reference).abs().max() < tolerance


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_timm_logits(name, tmp_path):
    reference = timm_reference(name)
    model = create_model(name).eval()
    preprocessing = load_weights(model, saved(reference.state_dict(), tmp_path / "model.safetensors"))
    assert preprocessing == Preprocessing(size="256", crop_fraction=0.9, interpolation="bicubic")
    for size in SIZES:
        image = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(1))
        check_equal(model(image), reference(image))


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_hugging_face_logits(name, tmp_path):
    reference = hugging_face_reference(name)
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    model = create_model(name).eval()
    preprocessing = load_weights(model, tmp_path)
    assert preprocessing == Preprocessing(size="256", crop_fraction=256 / 288, interpolation="bilinear")
    for size in SIZES:
        image = torch.rand(1, 3, *size, generator=torch.Generator().manual_seed(1))
        check_equal(model(image), reference(image.flip(1)).logits)


# CVNets' names, by timm's: their modules' attributes in apple/ml-cvnets, cvnets/models/classification/mobilevit.py,
# cvnets/modules/{mobilevit_block,mobilenetv2,transformer}.py and cvnets/layers/{conv_layer,multi_head_attention}.py.
CVNETS_NAMES = (
    (r"^stem", "conv_1.block"),
    (r"^stages\.(\d)\.", lambda match: f"layer_{int(match[1]) + 1}."),
    (r"conv1_1x1\.", "block.exp_1x1.block."),
    (r"conv2_kxk\.", "block.conv_3x3.block."),
    (r"conv3_1x1\.", "block.red_1x1.block."),
    (r"conv_kxk\.", "local_rep.conv_3x3.block."),
    (r"conv_1x1\.", "local_rep.conv_1x1.block.conv."),
    (r"transformer\.(\d)\.norm1", r"global_rep.\1.pre_norm_mha.0"),
    (r"transformer\.(\d)\.attn\.qkv", r"global_rep.\1.pre_norm_mha.1.qkv_proj"),
    (r"transformer\.(\d)\.attn\.proj", r"global_rep.\1.pre_norm_mha.1.out_proj"),
    (r"transformer\.(\d)\.norm2", r"global_rep.\1.pre_norm_ffn.0"),
    (r"transformer\.(\d)\.mlp\.fc1", r"global_rep.\1.pre_norm_ffn.1"),
    (r"transformer\.(\d)\.mlp\.fc2", r"global_rep.\1.pre_norm_ffn.4"),
    (r"^layer_3\.1\.norm", "layer_3.1.global_rep.2"),
    (r"^layer_4\.1\.norm", "layer_4.1.global_rep.4"),
    (r"^layer_5\.1\.norm", "layer_5.1.global_rep.3"),
    (r"conv_proj\.", "conv_proj.block."),
    (r"conv_fusion\.", "fusion.block."),
    (r"^final_conv", "conv_1x1_exp.block"),
    (r"^head\.fc", "classifier.fc"),
    (r"\.bn\.", ".norm."),
)


@torch.no_grad()
@pytest.mark.parametrize("channel_order", [None, "RGB"])
def test_cvnets_logits(channel_order, tmp_path):
    reference = timm_reference("mobilevit_xxs")
    state = {}
    for name, tensor in reference.state_dict().items():
        for pattern, replacement in CVNETS_NAMES:
            name = re.sub(pattern, replacement, name)
        state[name] = tensor
    assert {
        "conv_1.block.norm.running_var",
        "layer_2.2.block.exp_1x1.block.conv.weight",
        "layer_4.1.local_rep.conv_3x3.block.norm.weight",
        "layer_5.1.global_rep.2.pre_norm_mha.1.qkv_proj.bias",
        "layer_5.1.global_rep.3.weight",
        "layer_5.1.fusion.block.conv.weight",
        "classifier.fc.weight",
    } <= state.keys()
    torch.save({"epoch": 3, "model_state_dict": state}, tmp_path / "checkpoint.pt")
    model = create_model("mobilevit_xxs").eval()
    preprocessing = load_weights(model, tmp_path / "checkpoint.pt", channel_order=channel_order)
    assert preprocessing == Preprocessing(size="256", crop_fraction=256 / 288, interpolation="bilinear")
    image = torch.rand(1, 3, 160, 160)
    check_equal(model(image), reference(image if channel_order == "RGB" else image.flip(1)))


def test_own_weights_load_again(tmp_path):
    first, second = create_model("mobilevit_xxs", 10), create_model("mobilevit_xxs", 10)
    load_weights(second, saved(first.state_dict(), tmp_path / "weights.safetensors"))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@torch.no_grad()
@pytest.mark.parametrize("processor_class", [MobileViTImageProcessorPil, MobileViTImageProcessor])
def test_photographs_through_hugging_faces_processor(processor_class, tmp_path):
    """Raw tensors cannot show that their weights expect blue first; pictures can."""
    reference = hugging_face_reference("mobilevit_xxs")
    saved(reference.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(HUGGING_FACE_PROCESSOR))
    model = create_model("mobilevit_xxs").eval()
    transform = evaluation_transform(load_weights(model, tmp_path), Size.parse("256"))
    processor = processor_class(**HUGGING_FACE_PROCESSOR)
    for photograph in photographs():
        # 636 wide: where an odd number of pixels is to be cut off, theirs cuts half a pixel further left.
        photograph = photograph.crop((0, 0, 636, photograph.height))
        pixels = processor(photograph, return_tensors="pt")["pixel_values"]
        expected = reference(pixels).logits
        # torchvision's resampling of tensors rounds differently from Pillow's: up to one level of 255 per pixel.
        tolerance = 1e-3 if processor_class is MobileViTImageProcessorPil else 3e-2
        image = transform(photograph)[None]
        check_equal(model(image), expected, tolerance)
        assert (model(image.flip(1)) - expected).abs().max() > 0.3  # so the order of the channels is what was tested


@torch.no_grad()
def test_photographs_through_timms_transform(tmp_path):
    reference = timm_reference("mobilevit_xxs")
    saved(reference.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": reference.pretrained_cfg}))
    model = create_model("mobilevit_xxs").eval()
    transform = evaluation_transform(load_weights(model, tmp_path), Size.parse("256"))
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(reference))
    for photograph in photographs():
        check_equal(model(transform(photograph)[None]), reference(theirs(photograph)[None]), 1e-3)


def test_a_folders_own_configuration_counts(tmp_path):
    saved(timm.create_model("mobilevit_xxs").state_dict(), tmp_path / "model.safetensors")
    config = {"input_size": [3, 192, 320], "crop_pct": 1.0, "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1]}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": config | {"interpolation": "bilinear"}}))
    assert read_weights(tmp_path).preprocessing == Preprocessing(
        "192x320", 1.0, "bilinear", mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1)
    )

    folder = tmp_path / "hugging_face"
    folder.mkdir()
    state = MobileViTForImageClassification(MobileViTConfig(**HUGGING_FACE["mobilevit_xxs"], num_labels=2)).state_dict()
    saved(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"id2label": {"1": "dog", "0": "cat"}}))
    old_style = {"size": 320, "crop_size": 288, "resample": 3, "do_flip_channel_order": False}
    (folder / "preprocessor_config.json").write_text(json.dumps(old_style))
    weights = read_weights(folder)
    assert weights.preprocessing == Preprocessing("288", 0.9, "bicubic")
    assert weights.labels == ("cat", "dog")
    assert weights.num_classes == 2
    stem = state["mobilevit.conv_stem.convolution.weight"]
    assert torch.equal(weights.state["stem.conv.weight"], stem)  # this one was trained on RGB
    assert torch.equal(read_weights(folder, channel_order="BGR").state["stem.conv.weight"], stem.flip(1))


def test_from_the_hub(tmp_path, monkeypatch):
    saved(timm.create_model("mobilevit_xxs", num_classes=3).state_dict(), tmp_path / "model.safetensors")
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(tmp_path))
    assert read_weights("hf:timm/mobilevit_xxs.cvnets_in1k").num_classes == 3
    assert asked == ["timm/mobilevit_xxs.cvnets_in1k"]


def test_hub_out_of_reach_is_one_line(monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(EdgeVitError, match=r"^hf:a/b: cannot be fetched \(no route to host\); check [^\n]+$"):
        read_weights("hf:a/b")


def test_another_set_of_classes(tmp_path):
    reference = timm.create_model("mobilevit_xxs", num_classes=5)
    file = saved(reference.state_dict(), tmp_path / "five.safetensors")
    model = create_model("mobilevit_xxs", 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        EdgeVitError, match=r"five.safetensors: has 5 classes, the model 3; give num_classes=5 or new_head"
    ):
        load_weights(model, file)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    load_weights(model, file, new_head=True)
    assert torch.equal(model.classifier.weight, before["classifier.weight"])
    assert torch.equal(model.stem.conv.weight, reference.stem.conv.weight)


def test_weights_of_another_model_are_named(tmp_path):
    file = saved(timm.create_model("mobilevit_s").state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(EdgeVitError, match="timm weights of mobilevit_s, the model is mobilevit_xxs"):
        load_weights(create_model("mobilevit_xxs"), file)


def write_pickle(path):
    torch.save({"model": nn.Linear(2, 2)}, path)


def write_truncated(path):
    path.write_bytes(path.name.encode() * 20)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("absent.pt", lambda path: None, "no such file or folder"),
        ("code.pt", write_pickle, "more than tensors"),
        ("garbage.safetensors", write_truncated, "cannot be read as weights"),
        ("garbage.pth", write_truncated, "garbage.pth"),
        ("other.pt", lambda path: torch.save({"fc.weight": torch.ones(2)}, path), "its names begin fc.weight"),
        ("tensor.pt", lambda path: torch.save(torch.ones(2), path), "no state_dict"),
        ("empty", lambda path: path.mkdir(), "one file of weights"),
    ],
)
def test_wrong_files_are_one_line(name, write, message, tmp_path):
    write(tmp_path / name)
    with pytest.raises(EdgeVitError, match=message) as caught:
        read_weights(tmp_path / name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_channel_order():
    with pytest.raises(EdgeVitError, match="RGB or BGR"):
        read_weights("weights.pt", channel_order="RBG")
