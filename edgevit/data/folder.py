"""A folder of pictures, one folder per class; with train/ and test/ (or val/) inside, or split by content."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS, make_dataset

from converters.errors import EdgeVitError

SPLIT_FOLDERS = {"train": ("train",), "test": ("test", "val")}


def list_folder(root: Path, split: str) -> tuple[tuple[str, ...], list[tuple[Path, int]]]:
    """Classes, and (file, class number) of every picture of `split` ("train" or "test"), in a fixed order.

    - `root/train/CLASS/*` and `root/test/CLASS/*` (or, without a `test`, `root/val/CLASS/*`): taken as they are.
    - `root/CLASS/*`, or `train` alone: about a fifth is held out for `test`, decided by the SHA-256 of each file, so
      that copies of a picture are always on the same side and adding pictures moves none.

    Raises EdgeVitError for a folder that is missing or empty, a class without pictures, or a class that only the test
    folder knows.
    """
    if not root.is_dir():
        raise EdgeVitError(f"{root}: no such folder")
    folders = {name: _split_folder(root, name) for name in SPLIT_FOLDERS}
    chosen, train = folders[split], folders["train"]
    if chosen is None and train is None and folders["test"] is not None:
        raise EdgeVitError(f"{root}: has pictures to test with but no train folder beside {folders['test'].name}")
    if folders["test"] is not None:
        assert chosen is not None
        classes = _classes(train or chosen)
        if unknown := set(_classes(chosen)) - set(classes):
            raise EdgeVitError(f"{chosen / min(unknown)}: no class of that name in {train}")
        return classes, _pictures(chosen, classes)
    source = train or root
    classes = _classes(source)
    held_out = split == "test"
    pictures = [item for item in _pictures(source, classes) if in_test_split(_sha256(item[0])) == held_out]
    if not pictures:
        raise EdgeVitError(f"{source}: too few pictures to split; put some into {root}/train and {root}/test")
    return classes, pictures


def in_test_split(sha256: bytes) -> bool:
    """Whether content with this SHA-256 belongs to the fifth that is held out."""
    return int.from_bytes(sha256[:8], "big") % 5 == 0


def _split_folder(root: Path, split: str) -> Path | None:
    """`root/train` and so on, if it holds class folders; a *class* named "test" holds pictures instead."""
    for name in SPLIT_FOLDERS[split]:
        if (root / name).is_dir() and _class_folders(root / name):
            return root / name
    return None


def _class_folders(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir() if item.is_dir() and not item.name.startswith((".", "__")))


def _classes(folder: Path) -> tuple[str, ...]:
    classes = _class_folders(folder)
    if not classes:
        raise EdgeVitError(f"{folder}: no pictures; expected one folder per class, such as {folder}/cat/1.jpg")
    return tuple(classes)


def _pictures(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    numbers = {name: classes.index(name) for name in _class_folders(folder)}
    found = make_dataset(str(folder), numbers, IMG_EXTENSIONS, allow_empty=True)
    with_pictures = {number for _, number in found}
    for name, number in numbers.items():
        if number not in with_pictures:
            raise EdgeVitError(f"{folder / name}: no pictures in it ({' '.join(IMG_EXTENSIONS)}); remove or fill it")
    return [(Path(path), number) for path, number in found]


def _sha256(path: Path) -> bytes:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()
