"""Evaluation agrees with timm and Hugging Face; augmentation is a function of (seed, epoch, index)."""

import numpy as np
import pytest
import timm.data
import torch
from PIL import Image

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import evaluation_transform, photographs, training_transform

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CHINA, FLOWER = photographs()
UPRIGHT = FLOWER.transpose(Image.Transpose.ROTATE_90)
TINY = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 9, 3), dtype=np.uint8))


@pytest.mark.parametrize("image", [CHINA, FLOWER, UPRIGHT, TINY], ids=["china", "flower", "upright", "tiny"])
@pytest.mark.parametrize("size", ["32", "160", "224", "256", "320", "192x320", "320x192", "33x47"])
@pytest.mark.parametrize(("crop_fraction", "interpolation"), [(0.9, "bicubic"), (1.0, "bilinear"), (0.875, "nearest")])
def test_equal_to_timm(image, size, crop_fraction, interpolation):
    size = Size.parse(size)
    theirs = timm.data.create_transform(
        (3, size.height, size.width), crop_pct=crop_fraction, interpolation=interpolation, **IMAGENET
    )(image)
    preprocessing = Preprocessing(crop_fraction=crop_fraction, interpolation=interpolation, **IMAGENET)
    ours = evaluation_transform(preprocessing, size)(image)
    assert ours.dtype == torch.float32
    assert ours.shape == (3, size.height, size.width)
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


MOBILEVIT = Preprocessing(size="256", crop_fraction=256 / 288, interpolation="bilinear", channel_order="BGR")


def hugging_face(image: Image.Image, backend: str) -> torch.Tensor:
    """What apple/mobilevit-* do to a picture: shortest edge 288, crop 256, BGR, scaled to 0…1."""
    if backend == "pillow":
        from transformers.models.mobilevit.image_processing_pil_mobilevit import MobileViTImageProcessorPil as Processor
    else:
        from transformers import MobileViTImageProcessor as Processor
    processor = Processor(size={"shortest_edge": 288}, crop_size={"height": 256, "width": 256}, resample=2)
    return processor(image, return_tensors="pt")["pixel_values"][0]


@pytest.mark.parametrize("photograph", [CHINA, FLOWER], ids=["china", "flower"])
def test_equal_to_hugging_face(photograph):
    image = photograph.crop((0, 0, 639, 427))  # 430 wide after resizing: an even number of columns is cut off
    ours = evaluation_transform(MOBILEVIT, Size.parse("256"))(image)
    torch.testing.assert_close(ours, hugging_face(image, "pillow").float(), rtol=0, atol=1e-6)
    # Its other backend resizes tensors, which rounds a few values to the neighbouring level.
    assert (ours - hugging_face(image, "torchvision")).abs().max() < 1.5 / 255


def test_hugging_face_cuts_an_odd_remainder_one_column_further_left():
    """So the documented difference is all there is: 431 columns, 175 cut off; they start at 87, we (and timm) at 88."""
    theirs = hugging_face(CHINA, "pillow").float()
    ours = evaluation_transform(MOBILEVIT, Size.parse("256"))(CHINA)
    torch.testing.assert_close(ours[:, :, :-1], theirs[:, :, 1:], rtol=0, atol=1e-6)


def test_channel_order_scale_mean_and_std_by_hand():
    image = Image.new("RGB", (40, 30), (10, 20, 40))
    preprocessing = Preprocessing(channel_order="BGR", scale=0.5, mean=(1.0, 2.0, 3.0), std=(1.0, 2.0, 4.0))
    result = evaluation_transform(preprocessing, Size.parse("32"))(image)
    blue, green, red = (40 * 0.5 - 1) / 1, (20 * 0.5 - 2) / 2, (10 * 0.5 - 3) / 4
    assert result.flatten(1).unique(dim=1).tolist() == [[blue], [green], [red]]


def checkerboard(height: int, width: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("augment", ["light", "standard"])
@pytest.mark.parametrize("image", [TINY, checkerboard(28, 28), CHINA], ids=["tiny", "28", "photograph"])
@pytest.mark.parametrize("size", ["32", "96", "64x128"])
def test_augmentation_depends_on_seed_epoch_and_index_alone(augment, image, size):
    size = Size.parse(size)
    results = {}
    for seed, epoch, index in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 12, 3), (0, 1, 23)]:
        torch.manual_seed(len(results))  # global state must not matter
        transform = training_transform(Preprocessing(), size, augment, seed)
        results[seed, epoch, index] = transform(image, epoch, index)
        before = torch.get_rng_state()
        again = transform(image, epoch, index)
        assert torch.equal(before, torch.get_rng_state()), "the global generator is given back"
        assert torch.equal(results[seed, epoch, index], again)
        assert again.shape == (3, size.height, size.width)
        assert 0 <= again.min() <= again.max() <= 1
    assert len({result.numpy().tobytes() for result in results.values()}) == len(results)


def test_no_augmentation_is_evaluation():
    preprocessing = Preprocessing(crop_fraction=0.9, interpolation="bicubic", channel_order="BGR", **IMAGENET)
    size = Size.parse("64x96")
    ours = training_transform(preprocessing, size, "none", seed=3)(CHINA, 5, 6)
    assert torch.equal(ours, evaluation_transform(preprocessing, size)(CHINA))


def test_light_keeps_left_left_and_stays_near_what_evaluation_sees():
    """A ramp from left to right stays one: 20 % of shift and 15 % of scale bound how far each column can move."""
    ramp = Image.fromarray(np.tile(np.arange(0, 250, 2, dtype=np.uint8)[None, :, None], (125, 1, 3)))
    transform = training_transform(Preprocessing(), Size.parse("64"), "light", seed=0)
    middles, spans = [], []
    for index in range(200):
        row = transform(ramp, 0, index)[0, 32] * 255
        assert (row.diff() >= 0).all(), "never mirrored"
        middles.append(row[31:33].mean().item() / 250)
        spans.append((row[36] - row[27]).item() / 250 / (9 / 64))
    assert 0.37 < min(middles) < 0.42
    assert 0.58 < max(middles) < 0.63
    assert 0.82 < min(spans) < 0.9
    assert 1.1 < max(spans) < 1.18
    assert abs(np.mean(middles) - 0.5) < 0.02


def test_standard_mirrors_half_of_the_time():
    ramp = Image.fromarray(np.tile(np.arange(0, 250, 2, dtype=np.uint8)[None, :, None], (125, 1, 3)))
    transform = training_transform(Preprocessing(), Size.parse("64"), "standard", seed=0)
    mirrored = sum(bool(row[0] > row[-1]) for row in (transform(ramp, 0, index)[0, 32] for index in range(200)))
    assert 75 < mirrored < 125  # 3.5 standard deviations


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"interpolation": "lanczos"}, "nearest, bilinear, bicubic"),
        ({"channel_order": "GRB"}, "RGB or BGR"),
        ({"crop_fraction": 0.0}, "crop fraction"),
        ({"crop_fraction": 1.5}, "crop fraction"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
        ({"mean": (1.0,)}, "three numbers"),
    ],
)
def test_wrong_preprocessing(wrong, message):
    with pytest.raises(EdgeVitError, match=message):
        evaluation_transform(Preprocessing(**wrong), Size.parse("32"))


def test_unknown_augmentation():
    with pytest.raises(EdgeVitError, match="none, light, standard"):
        training_transform(Preprocessing(), Size.parse("32"), "heavy", 0)
