"""Second half of tools/check_task_metadata: the same photograph through tflite-support and MediaPipe.

Runs in their environment, without this project. Exits with 1 when a reader's five best classes are others than ours,
or a score is off by more than 0.002.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TOLERANCE = 2e-3


def tflite_support(model: str, photograph: str) -> list[tuple[str, float]]:
    from tflite_support.task import core, processor, vision

    options = vision.ImageClassifierOptions(
        core.BaseOptions(file_name=model), processor.ClassificationOptions(max_results=5)
    )
    classifier = vision.ImageClassifier.create_from_options(options)
    result = classifier.classify(vision.TensorImage.create_from_file(photograph))
    return [(item.category_name, item.score) for item in result.classifications[0].categories]


def mediapipe(model: str, photograph: str) -> list[tuple[str, float]]:
    import mediapipe
    from mediapipe.tasks.python import BaseOptions, vision

    options = vision.ImageClassifierOptions(base_options=BaseOptions(model_asset_path=model), max_results=5)
    with vision.ImageClassifier.create_from_options(options) as classifier:
        result = classifier.classify(mediapipe.Image.create_from_file(photograph))
    return [(item.category_name, item.score) for item in result.classifications[0].categories]


def main(folder: Path) -> None:
    expected = [(label, score) for label, score in json.loads((folder / "expected.json").read_text())]
    files = str(folder / "picture.tflite"), str(folder / "photograph.png")
    print("edgevit       ", shown(expected))
    wrong = False
    for name, reader in (("tflite-support", tflite_support), ("mediapipe", mediapipe)):
        found = reader(*files)
        labels_agree = [label for label, _ in found] == [label for label, _ in expected]
        apart = max(abs(a - b) for (_, a), (_, b) in zip(found, expected, strict=False))
        wrong |= not labels_agree or apart > TOLERANCE
        print(f"{name:14s}", shown(found), f"scores within {apart:.1e}" if labels_agree else "OTHER CLASSES")
    sys.exit(int(wrong))


def shown(results: list[tuple[str, float]]) -> str:
    return ", ".join(f"{label} {score:.4f}" for label, score in results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
