"""Models by library and by a function of one's own: what export gets for them, compared with the library itself."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file

from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import evaluation_transform, photographs
from edgevit.sources import load_source
from edgevit.sources.hugging_face import _from_processor, _inputs, _preprocessing
from edgevit.sources.random_weights import scale_weights


@pytest.fixture
def _no_network(monkeypatch, tmp_path):
    """No connection, and caches that are empty."""

    def refuse(*_args, **_kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@torch.no_grad()
def test_timm_with_a_file_of_weights_and_its_own_preprocessing(tmp_path):
    reference = timm.create_model("resnet10t", num_classes=7).eval()
    save_file(reference.state_dict(), tmp_path / "weights.safetensors")
    source = load_source("timm:resnet10t", weights=str(tmp_path / "weights.safetensors"))
    assert source.signature.outputs[0].shape == ("batch", 7)
    assert [spec.name for spec in (*source.signature.inputs, *source.signature.outputs)] == ["image", "logits"]
    config = timm.data.resolve_model_data_config(reference)
    assert source.size == Size.parse(str(config["input_size"][1]))
    picture = photographs()[0]
    ours = evaluation_transform(source.preprocessing, source.size)(picture)
    theirs = timm.data.create_transform(**config)(picture)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(source.module(ours[None]), reference(theirs[None]))
    assert source.note == ""
    assert source.labels == ()  # timm knows no names of seven classes


def test_timm_knows_the_names_of_imagenets_classes(tmp_path):
    save_file(timm.create_model("test_resnet").state_dict(), tmp_path / "weights.safetensors")
    source = load_source("timm:test_resnet", weights=str(tmp_path / "weights.safetensors"))
    assert len(source.labels) == 1000
    assert source.labels[1].startswith("goldfish")


@torch.no_grad()
def test_torchvision_with_its_own_transforms(tmp_path):
    torch.manual_seed(0)
    reference = torchvision.models.squeezenet1_1(weights=None, num_classes=4).eval()
    torch.save(reference.state_dict(), tmp_path / "weights.pth")
    source = load_source("torchvision:squeezenet1_1", weights=str(tmp_path / "weights.pth"), num_classes=4)
    transforms = torchvision.models.SqueezeNet1_1_Weights.DEFAULT.transforms()
    picture = photographs()[1]
    ours = evaluation_transform(source.preprocessing, source.size)(picture)
    torch.testing.assert_close(ours, transforms(picture), atol=1e-5, rtol=0)
    torch.testing.assert_close(source.module(ours[None]), reference(ours[None]))


@pytest.mark.parametrize("name", ["timm:resnet10t", "torchvision:squeezenet1_1"])
def test_random_weights_on_request_are_repeatable_and_said_to_be_random(name):
    state = torch.random.get_rng_state()
    source = load_source(name, weights="random")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert source.note.startswith("random weights")
    assert source.labels == ()
    assert load_source(name, weights="random").sha256 == source.sha256


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("name", ["timm:test_resnet", "torchvision:squeezenet1_1", "hf:owner/name"])
def test_without_a_network_one_line_says_how_to_go_on(name):
    with pytest.raises(EdgeVitError, match=r"^[^\n]* cannot be fetched \([^\n]*check the [^\n]*$") as caught:
        load_source(name)
    assert str(caught.value).startswith(name)
    assert "random" in str(caught.value) or "give a folder" in str(caught.value)


@pytest.fixture(scope="module")
def vit_folder(tmp_path_factory):
    """A small ViT of transformers', with a processor that crops and normalises."""
    folder = tmp_path_factory.mktemp("vit") / "small-vit"
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=32, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    config.id2label = {0: "cat", 1: "dog", 2: "emu"}
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    processor = {
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.3, 0.4],
        "resample": 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


@torch.no_grad()
def test_a_folder_of_transformers(vit_folder):
    source = load_source(f"hf:{vit_folder}")
    reference = transformers.AutoModelForImageClassification.from_pretrained(vit_folder).eval()
    pictures = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(source.module(pictures)["logits"], reference(pictures).logits, atol=1e-5, rtol=1e-4)
    assert (source.name, source.labels, source.note) == ("small-vit", ("cat", "dog", "emu"), "")
    assert source.preprocessing.crop_fraction == 0.8
    assert source.preprocessing.mean == (0.5, 0.4, 0.3)
    assert source.preprocessing.interpolation == "bicubic"
    assert source.size == Size.parse("32")
    assert [spec.meaning for spec in source.signature.inputs] == ["image"]


def test_the_library_says_nothing_on_its_own(vit_folder):
    code = f"from edgevit.sources import load_source; load_source('hf:{vit_folder}')"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (said.returncode, said.stdout, said.stderr) == (0, "", "")


def test_processors_that_squash_are_said_to(vit_folder):
    preprocessing, note = _from_processor({"size": {"height": 24, "width": 32}, "do_rescale": False}, None)
    assert preprocessing.size == "24x32"
    assert preprocessing.scale == 1.0
    assert "squashes" in note


@torch.no_grad()
def test_text_models_take_tokens_of_one_length(tmp_path):
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=12,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    source = load_source(f"hf:{tmp_path}")
    assert [(spec.name, spec.shape, spec.meaning) for spec in source.signature.inputs] == [
        ("input_ids", ("batch", 12), "tokens"),
        ("attention_mask", ("batch", 12), "mask"),
    ]
    assert source.size == Size(())
    assert source.preprocessing is None
    tokens, mask = torch.randint(0, 50, (3, 12)), torch.ones(3, 12, dtype=torch.int64)
    mask[0, 5:] = 0
    expected = model(input_ids=tokens, attention_mask=mask).logits
    torch.testing.assert_close(source.module(tokens, mask)["logits"], expected, atol=1e-5, rtol=1e-4)


GOOD = """
import torch
from converters.signature import Signature, TensorSpec

def plain():
    return torch.nn.Linear(3, 2), torch.rand(2, 3)

def described():
    signature = Signature((TensorSpec("features", ("batch", 3)),), (TensorSpec("scores", ("batch", 2)),))
    return torch.nn.Linear(3, 2), {"input": torch.rand(2, 3)}, signature

def broken():
    size = 0
    return 1 / size

def alone():
    return torch.nn.Linear(3, 2)

def mismatched():
    return torch.nn.Linear(3, 2), torch.rand(2, 4)

def leaving():
    raise SystemExit("no weights here")

def short():
    return torch.nn.Linear(3, 2).bfloat16(), torch.rand(2, 3).bfloat16()
"""


@pytest.fixture
def _my_models(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(GOOD)
    (tmp_path / "unreadable.py").write_text("def f(:\n")
    (tmp_path / "needy.py").write_text("\nimport not_installed_here\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("my_models", "unreadable", "needy"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("_my_models")
def test_a_function_in_the_current_folder():
    source = load_source("python:my_models:plain")
    assert source.name == "my_models_plain"
    assert source.signature.inputs[0].shape == ("batch", 3)
    assert source.examples["input"].shape == (2, 3)
    assert source.preprocessing is None
    described = load_source("python:my_models:described")
    assert [spec.name for spec in (*described.signature.inputs, *described.signature.outputs)] == ["features", "scores"]
    assert list(described.examples) == ["features"]


@pytest.mark.usefixtures("_my_models")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("my_models:broken", r"my_models\.py, line 14: ZeroDivisionError: division by zero"),
        ("my_models:alone", r"must return \(module, example_inputs\) .*, not a module alone"),
        ("my_models:mismatched", r"the module fails on the example inputs: .*shapes"),
        ("my_models:leaving", r"my_models\.py, line 23: SystemExit: no weights here"),
        ("my_models:short", r"the module holds 'weight' in bfloat16; call \.float\(\) on it"),
        ("my_models:missing", r"my_models has no function missing; it has plain, described"),
        ("my_models", r"write python:MODULE:FUNCTION"),
        ("nowhere_at_all:f", r"there is no module nowhere_at_all to import from "),
        ("unreadable:f", r"unreadable\.py, line 1: SyntaxError: invalid syntax"),
        ("needy:f", r"needy\.py, line 2: ModuleNotFoundError: No module named 'not_installed_here'"),
    ],
)
def test_what_goes_wrong_in_ones_own_function_is_one_line_with_its_place(name, message):
    with pytest.raises(EdgeVitError, match=rf"^python:{name}: [^\n]*{message}[^\n]*$"):
        load_source(f"python:{name}")


@pytest.mark.parametrize(
    ("source", "weights", "message"),
    [
        ("timm:resnet19", "random", "timm has no model of that name; did you mean resnet1"),
        ("timm:resnet18.nothing", "random", "timm has no model of that name; did you mean resnet18."),
        ("torchvision:resnet19", "random", "did you mean resnet18"),
        ("timm:test_resnet", "nowhere.pt", "nowhere.pt: no such file of weights; write a file, or random"),
        ("torchvision:squeezenet1_1", "WEIGHTS", "not weights of torchvision:squeezenet1_1; for example "),
        ("hf:./nowhere", None, "no such folder; a repository is written hf:OWNER/NAME"),
        ("hf:EMPTY", None, "has no config.json"),
        ("hf:NOWEIGHTS", None, "has no model.safetensors; save it so, or take --weights random"),
        ("hf:UNKNOWN", "random", "its config.json cannot be used"),
        ("hf:UNNAMED", "random", "must name its architecture, one of transformers'; found ViTConfig"),
        ("hf:T5", "random", "text in and text out takes two modules"),
        ("hf:EMPTY", "weights.pt", "weights are its own, or random"),
        ("python:a:b", "random", "takes no weights; leave it out"),
        ("resnet:18", None, "timm:NAME, torchvision:NAME, hf:FOLDER, python:MODULE:FUNCTION"),
    ],
)
def test_wrong_sources_are_one_line(source, weights, message, tmp_path):
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "w.safetensors")
    configs = {
        "EMPTY": None,
        "NOWEIGHTS": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        "UNKNOWN": {"model_type": "never_heard_of", "architectures": ["X"]},
        "UNNAMED": {"model_type": "vit", "architectures": ["ViTConfig"]},
        "T5": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    }
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        source = source.replace(name, str(tmp_path / name))
    weights = str(tmp_path / "w.safetensors") if weights == "WEIGHTS" else weights
    with pytest.raises(EdgeVitError) as caught:
        load_source(source, weights=weights)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


class Dead(torch.nn.Module):
    """What random initialisation leaves of many networks: a branch that is switched off, and a signal that fades."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Conv2d(3, 3, 3, padding=1) for _ in range(20))
        self.norm = torch.nn.BatchNorm2d(3)
        self.gamma = torch.nn.Parameter(1e-6 * torch.ones(3, 1, 1))
        self.branch = torch.nn.Conv2d(3, 3, 1)

    def forward(self, x):
        for layer in self.layers:
            x = 0.5 * layer(x).relu()
        return (self.norm(x) + self.gamma * self.branch(x)).mean((2, 3))


@torch.no_grad()
def test_random_weights_leave_nothing_dead():
    pictures = torch.stack(
        [torch.from_numpy(np.array(p.resize((32, 32), Image.Resampling.BOX))) for p in photographs() * 4]
    )
    pictures = pictures.permute(0, 3, 1, 2).float() / 255
    module = Dead().eval()
    before = module(pictures[:2])
    assert float(before.std(0).max()) < 1e-3
    scale_weights(module, (pictures,))
    after = module(pictures[:2])
    assert float(after.std(0).max()) > 1e-2
    assert not module.norm.training
    assert module.norm.momentum == 0.1
    module.branch.weight.zero_()
    assert float((module(pictures[:2]) - after).abs().max()) > 1e-2


def test_a_module_that_random_weights_do_not_fit_is_one_line():
    with pytest.raises(EdgeVitError, match="the module fails on the example inputs: mat1 and mat2"):
        scale_weights(torch.nn.Linear(3, 4), (torch.rand(4, 5),))


@pytest.mark.parametrize("architecture", ["logging", "BertTokenizer", 7])
def test_an_architecture_that_is_no_model_is_one_line(architecture, tmp_path):
    config = {"model_type": "bert", "architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EdgeVitError, match=r"config\.json"):
        load_source(f"hf:{tmp_path}", weights="random")


@pytest.mark.parametrize("size", [[224], "224", [224.0, 224.0], {"height": 224}, -1])
def test_an_image_size_that_is_none_is_one_line(size, tmp_path):
    with pytest.raises(EdgeVitError, match=r"config\.json: image_size is [^\n]*; write one number, or two$"):
        _preprocessing(tmp_path, SimpleNamespace(image_size=size))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    if not isinstance(size, dict):
        with pytest.raises(EdgeVitError, match=r"preprocessor_config\.json: damaged, or of an unknown kind"):
            _preprocessing(tmp_path, SimpleNamespace(image_size=size))


@pytest.mark.parametrize("config", [{}, {"vocab_size": "many"}])
def test_a_text_model_without_a_vocabulary_is_one_line(config, tmp_path):
    model = SimpleNamespace(main_input_name="input_ids")
    with pytest.raises(EdgeVitError, match=r"^hf:x: its config\.json says no vocab_size"):
        _inputs("hf:x", tmp_path, SimpleNamespace(**config), model)


def test_the_current_folder_has_a_name(vit_folder, monkeypatch):
    monkeypatch.chdir(vit_folder)
    assert load_source("hf:.").name == vit_folder.name
