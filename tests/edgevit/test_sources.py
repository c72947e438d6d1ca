"""What export and evaluation get for a name, a run folder and a checkpoint."""

from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Signature
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder
from edgevit.sources import load_source, weights_sha256

PREPROCESSING = Preprocessing(size="64", crop_fraction=0.875, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def make_run(path: Path) -> tuple[RunFolder, torch.nn.Module]:
    config = {
        "model": "mobilevit_xxs",
        "num_classes": 2,
        "classes": ["cat", "dog"],
        "data": "pets",
        "sizes": ["32", "64"],
        "base_size": "64",
        "seed": 0,
        "preprocessing": vars(PREPROCESSING),
    }
    torch.manual_seed(7)
    module = create_model("mobilevit_xxs", 2).eval()
    return RunFolder.create(path, config), module


@torch.no_grad()
def check_is(source, module):
    image = torch.rand(1, 3, 64, 64)
    assert not source.module.training
    assert torch.equal(source.module(image), module(image))


def test_a_run_folder_and_its_checkpoints(tmp_path):
    run, module = make_run(tmp_path / "run")
    with pytest.raises(EdgeVitError, match=r"has no model.safetensors yet"):
        load_source(run.path)
    save_file(module.state_dict(), run.weights_path)
    source = load_source(run.path)
    check_is(source, module)
    assert source.name == "mobilevit_xxs"
    assert source.signature == Signature.image_classifier(2)
    assert source.preprocessing == PREPROCESSING
    assert source.labels == ("cat", "dog")
    assert source.run == run
    assert source.note == ""
    assert load_source(str(run.weights_path)).sha256 == source.sha256

    run.state.mkdir()
    other = create_model("mobilevit_xxs", 2).eval()
    save_file(other.state_dict(), run.state / "weights.safetensors")
    earlier = load_source(run.state / "weights.safetensors")
    check_is(earlier, other)
    assert earlier.preprocessing == PREPROCESSING
    assert earlier.sha256 != source.sha256


def test_a_runs_weights_for_another_model_by_name(tmp_path):
    run, module = make_run(tmp_path / "run")
    save_file(module.state_dict(), run.weights_path)
    source = load_source("mobilevit_xxs", weights=str(run.path))
    check_is(source, module)
    assert source.preprocessing == PREPROCESSING
    assert source.labels == ("cat", "dog")


def test_a_name_with_weights_has_their_classes(tmp_path):
    torch.save(timm.create_model("mobilevit_xxs", num_classes=6).state_dict(), tmp_path / "weights.pt")
    source = load_source("mobilevit_xxs", weights=str(tmp_path / "weights.pt"))
    assert source.signature == Signature.image_classifier(6)
    assert source.preprocessing.interpolation == "bicubic"
    assert source.labels == ()
    assert source.note == ""
    with pytest.raises(EdgeVitError, match="has 6 classes, the model 10"):
        load_source("mobilevit_xxs", weights=str(tmp_path / "weights.pt"), num_classes=10)


@torch.no_grad()
def test_a_name_alone_is_random_but_repeatable_and_worth_comparing():
    state = torch.random.get_rng_state()
    source = load_source("mobilevit_xxs", num_classes=10)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert source.note.startswith("random weights")
    assert source.sha256 == load_source("mobilevit_xxs", num_classes=10).sha256
    for side in (32, 256):
        assert source.module(torch.rand(1, 3, side, side)).std() > 1e-2  # a parity check refuses below 1e-3


def test_the_hash_is_of_names_and_values():
    module = torch.nn.Linear(2, 1)
    before = weights_sha256(module)
    assert weights_sha256(torch.nn.ModuleDict({"a": module})) != before
    module.bias.data += 1
    assert weights_sha256(module) != before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mobilevit_xx",), "did you mean mobilevit_xxs?"),
        (("nothing/like/it",), "models are mobilevit_xxs, mobilevit_xs, mobilevit_s"),
        (("EMPTY",), "not a run folder"),
        (("EMPTY/file.pt",), "lies in no run folder; name its model"),
        (("mobilevit_xxs", "nowhere.pt"), "nowhere.pt: no such file or folder"),
        (("RUN", "weights.pt"), "a run has weights of its own"),
        (("mobilevit_xxs", None, None, "BGR"), "the channel order is that of weights; give --weights"),
        (("mobilevit_xxs", "random", None, "RGB"), "the channel order is that of weights"),
        (("RUN", None, 5), "was trained with 2 classes, not 5"),
    ],
)
def test_wrong_sources_are_one_line(arguments, message, tmp_path):
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file.pt").touch()
    source, weights, num_classes, order = (*arguments, None, None, None)[:4]
    source = source.replace("EMPTY", str(tmp_path / "empty")).replace("RUN", str(tmp_path / "run"))
    with pytest.raises(EdgeVitError) as caught:
        load_source(source, weights=weights, num_classes=num_classes, channel_order=order)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
