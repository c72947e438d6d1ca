"""First half of tools/check_task_metadata: exports a picture file and classifies a photograph with our own session.

Writes picture.tflite, photograph.png (already of the model's size) and expected.json (label and score, best first).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

import converters
from converters.artifact import Preprocessing
from converters.run import load
from converters.signature import Signature, Size
from edgevit.data.images import evaluation_transform, photographs
from edgevit.models.registry import create_model

SIZE = Size.image(128, 128)
CLASSES = 20


def main(folder: Path) -> None:
    torch.manual_seed(0)
    # One channel darker than the rest and another order: a reader that normalised again, or swapped, would show.
    preprocessing = Preprocessing(size="128", mean=(0.48, 0.45, 0.40), std=(0.23, 0.22, 0.25), channel_order="BGR")
    transform = evaluation_transform(preprocessing, SIZE)
    images = torch.stack([transform(image) for image in photographs()])
    model = lively(create_model("mobilevit_xxs", num_classes=CLASSES), images)
    labels = [f"class number {number}" for number in range(CLASSES)]
    (artifact,) = converters.export(
        model,
        Signature.image_classifier(CLASSES),
        name="picture",
        out=folder,
        formats=("tflite",),
        sizes=(SIZE,),
        input="image",
        labels=labels,
        preprocessing=preprocessing,
        sample_inputs=lambda _size, count: {"image": np.resize(images.numpy(), (count, *images.shape[1:]))},
    )
    photograph = photographs()[0].convert("RGB").resize((SIZE.width, SIZE.height))
    photograph.save(folder / "photograph.png")
    outputs = load(artifact.path).run({"image": np.asarray(photograph)[None]})
    scores = outputs["probabilities"][0]
    expected = [(labels[index], float(scores[index])) for index in np.argsort(-scores)[:5]]
    artifact.path.rename(folder / "picture.tflite")
    (folder / "expected.json").write_text(json.dumps(expected))


def lively(model: torch.nn.Module, images: torch.Tensor) -> torch.nn.Module:
    """Random weights whose logits differ between pictures: BatchNorm's statistics are those of `images`."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(layer.weight, 0.8, 1.2)
            layer.momentum = None
        elif isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.kaiming_normal_(layer.weight, nonlinearity="linear")
    with torch.no_grad():
        model.train()(images)
    return model.eval()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
