"""Data of one's own: folders of pictures and folders of IDX files, whole and damaged."""

import gzip
import hashlib
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import MNIST, ImageFolder

from converters.errors import EdgeVitError
from edgevit.data.images import load_images

RANDOM = np.random.default_rng(0)


def write_pictures(folder: Path, count: int, suffix: str = ".png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        pixels = RANDOM.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}{suffix}")


def contents(folder: Path, split: str) -> dict[bytes, str]:
    """Pixels of each picture → its class's name."""
    images = load_images(str(folder), split)
    return {images.image(i).tobytes(): images.classes[images.label(i)] for i in range(len(images))}


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_train_and_test_folders_are_taken_as_they_are(tmp_path, held_out):
    for split, count in (("train", 3), (held_out, 2)):
        for name in ("cat", "dog"):
            write_pictures(tmp_path / split / name, count)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not a picture")
    (tmp_path / "train" / ".cache").mkdir()
    for split, folder in (("train", "train"), ("test", held_out)):
        images = load_images(str(tmp_path), split)
        shutil.rmtree(tmp_path / "train" / ".cache", ignore_errors=True)  # torchvision takes it for a class
        theirs = ImageFolder(str(tmp_path / folder))
        assert list(images.classes) == theirs.classes
        assert len(images) == len(theirs)
        for index, (image, label) in enumerate(theirs):
            assert images.image(index).tobytes() == image.tobytes()
            assert images.label(index) == label


def test_class_folders_alone_are_split_by_content(tmp_path):
    write_pictures(tmp_path / "cat", 60)
    write_pictures(tmp_path / "dog", 60)
    shutil.copy(tmp_path / "cat" / "0.png", tmp_path / "cat" / "copy-of-0.png")
    train, test = contents(tmp_path, "train"), contents(tmp_path, "test")
    assert len(train) + len(test) == 120
    assert not train.keys() & test.keys(), "a copy is on the side of its original"
    assert 10 <= len(test) <= 40
    before = load_images(str(tmp_path), "test").sha256

    moved = tmp_path.parent / f"{tmp_path.name}-moved"
    shutil.copytree(tmp_path, moved)
    assert load_images(str(moved), "test").sha256 == before, "the place does not matter"
    write_pictures(moved / "cow", 20)
    larger = contents(moved, "test")
    assert test.items() <= larger.items(), "adding pictures moves none"
    assert not larger.keys() & train.keys()
    assert load_images(str(moved), "test").sha256 != before


def test_a_class_called_test_is_a_class(tmp_path):
    write_pictures(tmp_path / "test", 30)
    write_pictures(tmp_path / "train", 30)
    assert load_images(str(tmp_path), "train").classes == ("test", "train")


def test_one_changed_byte_or_name_changes_the_hash(tmp_path):
    for split in ("train", "test"):
        write_pictures(tmp_path / split / "cat", 2)
    first = load_images(str(tmp_path), "test").sha256
    assert load_images(str(tmp_path), "test").sha256 == first
    assert load_images(str(tmp_path), "train").sha256 != first
    target = tmp_path / "test" / "cat" / "1.png"
    target.write_bytes(target.read_bytes() + b"\0")
    second = load_images(str(tmp_path), "test").sha256
    target.rename(target.with_name("2.png"))
    assert len({first, second, load_images(str(tmp_path), "test").sha256}) == 3


def test_photographs_are_turned_upright_and_made_rgb(tmp_path):
    for split in ("train", "test"):
        write_pictures(tmp_path / split / "cat", 1)
    red_left = np.zeros((20, 40, 3), np.uint8)
    red_left[:, :20, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held so that the picture has to be turned by 90° to the right
    Image.fromarray(red_left).save(tmp_path / "test" / "cat" / "0.png", exif=exif)
    upright = np.asarray(load_images(str(tmp_path), "test").image(0))
    assert upright.shape == (40, 20, 3)
    assert (upright[:20, :, 0] == 255).all()
    assert (upright[20:] == 0).all()
    Image.new("LA", (5, 5), (9, 128)).save(tmp_path / "test" / "cat" / "0.png")
    assert load_images(str(tmp_path), "test").image(0).mode == "RGB"


def make_empty(root: Path) -> tuple[str, str]:
    return "train", "no pictures"


def make_empty_class(root: Path) -> tuple[str, str]:
    write_pictures(root / "cat", 3)
    (root / "dog").mkdir()
    return "test", "dog: no pictures in it"


def make_strange_class(root: Path) -> tuple[str, str]:
    write_pictures(root / "train" / "cat", 3)
    write_pictures(root / "test" / "dog", 3)
    return "test", "test/dog: no class of that name"


def make_file(root: Path) -> tuple[str, str]:
    root.rmdir()
    root.write_text("not a folder")
    return "test", "no such folder"


def make_only_test(root: Path) -> tuple[str, str]:
    write_pictures(root / "val" / "cat", 3)
    return "train", "no train folder beside val"


def make_too_few(root: Path) -> tuple[str, str]:
    write_pictures(root / "cat", 1)
    in_test = int(hashlib.sha256((root / "cat" / "0.png").read_bytes()).hexdigest()[:16], 16) % 5 == 0
    return "train" if in_test else "test", "too few pictures to split"


@pytest.mark.parametrize(
    "make", [make_empty, make_empty_class, make_strange_class, make_file, make_only_test, make_too_few]
)
def test_folders_that_cannot_be_used(tmp_path, make):
    root = tmp_path / "data"
    root.mkdir()
    split, message = make(root)
    with pytest.raises(EdgeVitError, match=message) as caught:
        load_images(str(root), split)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:60], lambda data: b"GIF89a" + data[6:]])
def test_an_unreadable_picture_is_named(tmp_path, damage):
    for split in ("train", "test"):
        write_pictures(tmp_path / split / "cat", 2)
    bad = tmp_path / "test" / "cat" / "1.png"
    bad.write_bytes(damage(bad.read_bytes()))
    images = load_images(str(tmp_path), "test")
    images.image(0)
    with pytest.raises(EdgeVitError, match=r"1\.png: not a readable picture"):
        images.image(1)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(params=["", ".gz"])
def idx_folder(tmp_path, request) -> Path:
    """12 + 5 pictures of 4 × 6, as MNIST's files are named and built."""
    folder = tmp_path / "MNIST" / "raw"  # where torchvision looks
    folder.mkdir(parents=True)
    for split, count in (("train", 12), ("t10k", 5)):
        images = RANDOM.integers(0, 256, (count, 4, 6), dtype=np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 3
        for stem, array in ((f"{split}-images-idx3-ubyte", images), (f"{split}-labels-idx1-ubyte", labels)):
            (folder / stem).write_bytes(idx(array))
            (folder / (stem + ".gz")).write_bytes(gzip.compress(idx(array)))
    for name in list(folder.iterdir()):
        if request.param == ".gz" and name.suffix != ".gz":
            continue
        if request.param == "" and name.suffix == ".gz":
            name.unlink()
    return folder


@pytest.mark.parametrize("split", ["train", "test"])
def test_idx_is_read_as_torchvision_reads_it(idx_folder, split):
    images = load_images(str(idx_folder), split)
    theirs = MNIST(str(idx_folder.parent.parent), train=split == "train")
    assert len(images) == len(theirs) == {"train": 12, "test": 5}[split]
    assert images.classes == ("0", "1", "2")
    for index, (image, label) in enumerate(theirs):
        assert images.image(index).tobytes() == image.convert("RGB").tobytes()
        assert images.label(index) == label


def damaged(data: bytes, how: str) -> bytes:
    return {
        "cut off": data[:-3],
        "too long": data + b"\0",
        "only a header": data[:10],
        "another type": data[:2] + b"\x0d" + data[3:],
        "another rank": data[:3] + b"\x02" + data[4:],
        "absurd counts": data[:4] + b"\xff" * 12 + data[16:],
        "no pictures": data[:4] + b"\0" * 4 + data[8:],
        "text": b"<html>404</html>" * 10,
    }[how]


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        *("cut off", "too long", "only a header", "another type", "another rank"),
        *("absurd counts", "no pictures", "text"),
    ],
)
def test_damaged_idx_files_are_named(tmp_path, how, zipped):
    data = damaged(idx(np.ones((3, 4, 4), np.uint8)), how)
    name = "train-images-idx3-ubyte" + (".gz" if zipped else "")
    (tmp_path / name).write_bytes(gzip.compress(data) if zipped else data)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(3, np.uint8)))
    with pytest.raises(EdgeVitError, match=name):
        load_images(str(tmp_path), "train")


@pytest.mark.parametrize("keep", [5, 30, -9])
def test_a_damaged_gzip_file_is_named(tmp_path, keep):
    data = gzip.compress(idx(RANDOM.integers(0, 256, (3, 4, 4), dtype=np.uint8)))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(data[:keep])
    with pytest.raises(EdgeVitError, match=r"train-images-idx3-ubyte\.gz"):
        load_images(str(tmp_path), "train")


def test_idx_files_that_do_not_belong_together(tmp_path):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx(np.ones((3, 4, 4), np.uint8)))
    with pytest.raises(EdgeVitError, match="train-labels-idx1-ubyte is missing"):
        load_images(str(tmp_path), "train")
    with pytest.raises(EdgeVitError, match="t10k-images-idx3-ubyte is missing"):
        load_images(str(tmp_path), "test")
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(4, np.uint8)))
    with pytest.raises(EdgeVitError, match="3 train images but 4 labels"):
        load_images(str(tmp_path), "train")
