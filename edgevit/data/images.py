"""Pictures with labels: the data sets, a folder of one's own, and the torch data set that training reads."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data import catalogue
from edgevit.data.folder import in_test_split, list_folder
from edgevit.data.idx import holds_idx, read_idx_split
from edgevit.data.transforms import AUGMENTATIONS, evaluation_transform, training_transform

__all__ = [
    "AUGMENTATIONS",
    "ImageDataset",
    "ImageSet",
    "evaluation_transform",
    "load_images",
    "photographs",
    "training_transform",
]

SPLITS = ("train", "test")


@dataclass(frozen=True, eq=False)
class ImageSet:
    """One split of a data set, in a fixed order. `pictures` are in memory, or files that are read when asked for."""

    name: str
    split: str  # "train" | "test"
    classes: tuple[str, ...]
    licence: str
    augment: str  # the augmentation that suits these pictures; see `training_transform`
    labels: np.ndarray  # (N,) int64, numbers of `classes`
    pictures: np.ndarray | tuple[Path, ...]  # (N, H, W) uint8 grey, or N files

    def __len__(self) -> int:
        return len(self.pictures)

    def image(self, index: int) -> Image.Image:
        """Picture `index`, RGB, upright as its camera says. Raises EdgeVitError naming a file that cannot be read."""
        picture = self.pictures[index]
        if isinstance(picture, np.ndarray):
            return Image.fromarray(picture).convert("RGB")
        try:
            with Image.open(picture) as image:
                return ImageOps.exif_transpose(image).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise EdgeVitError(f"{picture}: not a readable picture ({error}); repair or remove it") from error

    def label(self, index: int) -> int:
        return int(self.labels[index])

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the split's content: pictures (of files, each one's class and name, and its bytes) and labels."""
        digest = hashlib.sha256(repr((len(self), self.classes)).encode())
        digest.update(self.labels.astype("<i8").tobytes())
        if isinstance(self.pictures, np.ndarray):
            digest.update(repr(self.pictures.shape).encode() + self.pictures.tobytes())
        else:
            for path, label in zip(self.pictures, self.labels, strict=True):
                digest.update(f"{self.classes[label]}/{path.name}".encode() + b"\0")
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def load_images(data: str, split: str) -> ImageSet:
    """`data`: "digits", "fashion-mnist", or a folder; `split`: "train" or "test".

    A folder holds IDX files under MNIST's names, or one folder of pictures per class (`edgevit.data.folder` says how
    it is split). Splits depend on content alone, so they are the same on every machine.

    Raises EdgeVitError for an unknown name, a set that was not fetched yet, and files that are missing or damaged.
    """
    if split not in SPLITS:
        raise EdgeVitError(f"split '{split}': choose from {', '.join(SPLITS)}")
    if data == "digits":
        return _digits(split)
    if data == "fashion-mnist":
        return _idx(catalogue.cached_folder(data), split, catalogue.find(data))
    folder = Path(data).expanduser()
    if not folder.exists():
        near = difflib.get_close_matches(data, [item.name for item in catalogue.DATA_SETS], n=1)
        meant = f"; did you mean {near[0]}?" if near else "; `edgevit data list` shows the known sets"
        raise EdgeVitError(f"data '{data}': no data set or folder of that name{meant}")
    if folder.is_dir() and holds_idx(folder):
        return _idx(folder, split, None)
    classes, pictures = list_folder(folder, split)
    return ImageSet(
        name=folder.resolve().name,
        split=split,
        classes=classes,
        licence="not stated",
        augment="standard",
        labels=np.array([label for _, label in pictures], np.int64),
        pictures=tuple(path for path, _ in pictures),
    )


class ImageDataset(Dataset[tuple[Tensor, int]]):
    """`dataset[size, index]` → ((3, H, W) float32 at `size`, label); `MultiScaleBatchSampler` yields such addresses.

    With `augment`, a picture depends on (seed, epoch, index, size) and nothing else. `set_epoch` reaches worker
    processes too, persistent ones included, since the epoch lies in shared memory: call it before iterating over the
    loader, when no batch of the epoch before is still being prefetched. Without `augment` (None) pictures are as in
    evaluation, and the epoch changes nothing.
    """

    def __init__(
        self, images: ImageSet, preprocessing: Preprocessing, *, augment: str | None = None, seed: int = 0
    ) -> None:
        self.images = images
        self.preprocessing = preprocessing
        self.augment = augment or "none"
        self.seed = seed
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._transforms: dict[Size, Callable[[Image.Image, int, int], Tensor]] = {}
        training_transform(preprocessing, Size.image(32, 32), self.augment, seed)  # refuse wrong arguments here

    def set_epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, address: tuple[Size, int]) -> tuple[Tensor, int]:
        size, index = address
        if size not in self._transforms:
            self._transforms[size] = training_transform(self.preprocessing, size, self.augment, self.seed)
        image = self.images.image(index)
        return self._transforms[size](image, int(self._epoch), index), self.images.label(index)


def photographs() -> list[Image.Image]:
    """Two photographs, RGB 640 × 427, that come with scikit-learn: a temple in China, and a flower (CC-BY)."""
    from sklearn.datasets import load_sample_images

    return [Image.fromarray(image) for image in load_sample_images().images]


def _digits(split: str) -> ImageSet:
    """Scikit-learn's 1,797 handwritten digits of 8 × 8; its 0…16 become 0…255. A fifth is held out, by content."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = np.round(digits.images * (255 / 16)).astype(np.uint8)
    held_out = np.array([in_test_split(hashlib.sha256(picture.tobytes()).digest()) for picture in pictures])
    chosen = held_out if split == "test" else ~held_out
    return ImageSet(
        name="digits",
        split=split,
        classes=tuple(str(digit) for digit in range(10)),
        licence=catalogue.find("digits").licence,
        augment="light",
        labels=digits.target[chosen].astype(np.int64),
        pictures=pictures[chosen],
    )


def _idx(folder: Path, split: str, known: catalogue.DataSet | None) -> ImageSet:
    pictures, labels = read_idx_split(folder, split)
    classes = known.classes if known else catalogue.classes_by_labels(labels)
    if int(labels.max()) >= len(classes):
        raise EdgeVitError(f"{folder}: label {labels.max()} but only {len(classes)} classes; fetch the files again")
    return ImageSet(
        name=known.name if known else folder.resolve().name,
        split=split,
        classes=classes,
        licence=known.licence if known else "not stated",
        augment="light",
        labels=labels.astype(np.int64),
        pictures=pictures,
    )
