"""The data sets themselves: content, splits, hashes, and the torch data set that workers read."""

import doctest
import hashlib
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.data.images import ImageDataset, load_images, photographs
from edgevit.data.multi_scale import MultiScaleBatchSampler

SIZES = Size.parse_list("32,48")


def test_digits_are_scikit_learns_split_by_content():
    train, test = load_images("digits", "train"), load_images("digits", "test")
    assert len(train) + len(test) == 1797
    assert 0.18 < len(test) / 1797 < 0.22
    assert train.classes == test.classes == tuple("0123456789")
    source = load_digits()
    levels = (source.images * 255 / 16).round().astype(int).reshape(1797, 64).tolist()
    expected = sorted(zip(levels, source.target, strict=True))
    pictures = [(images.image(i), images.label(i)) for images in (train, test) for i in range(len(images))]
    assert all(image.mode == "RGB" and image.size == (8, 8) for image, _ in pictures)
    channels = [(np.asarray(image).reshape(64, 3), label) for image, label in pictures]
    assert all((pixels == pixels[:, :1]).all() for pixels, _ in channels)
    assert sorted((pixels[:, 0].tolist(), label) for pixels, label in channels) == expected
    contents = [{images.image(i).tobytes() for i in range(len(images))} for images in (train, test)]
    assert not contents[0] & contents[1], "no picture on both sides"
    for images in (train, test):  # every class is in both, none rare
        assert np.bincount(images.labels, minlength=10).min() / len(images) > 0.06


def test_digits_never_move():
    """Accuracies are stored by these hashes: a change of split, order or scaling must show here."""
    assert (len(load_images("digits", "train")), len(load_images("digits", "test"))) == (1426, 371)
    assert load_images("digits", "train").sha256 == "797d631a134c6aa8fec5c944683f9e2edc68774d78a8a92eae16ebb697c7b4e0"
    assert load_images("digits", "test").sha256 == "2fff458c20f67f99cf4558bac638ee413c1def9a41df3bcf466b0ee0e5bf123e"


def test_the_example_in_the_documentation():
    page = Path(__file__).parents[3] / "docs" / "data.md"
    outcome = doctest.testfile(str(page), module_relative=False)
    assert outcome.attempted >= 4
    assert outcome.failed == 0


def test_split_of_digits_by_hand():
    test = load_images("digits", "test")
    for picture in test.pictures[:20]:
        assert int(hashlib.sha256(picture.tobytes()).hexdigest()[:16], 16) % 5 == 0


def test_photographs():
    china, flower = photographs()
    assert china.size == flower.size == (640, 427)
    assert china.mode == flower.mode == "RGB"
    assert np.asarray(china).std() > 40 < np.asarray(flower).std()


@pytest.mark.parametrize(
    ("data", "split", "message"),
    [
        ("digit", "train", "did you mean digits"),
        ("no/such/folder", "train", "no data set or folder"),
        ("digits", "val", "choose from train, test"),
    ],
)
def test_wrong_names_are_one_clear_line(data, split, message):
    with pytest.raises(EdgeVitError, match=message) as caught:
        load_images(data, split)
    assert "\n" not in str(caught.value)


def test_fashion_mnist_that_was_not_fetched_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEVIT_DATA", str(tmp_path))
    with pytest.raises(EdgeVitError, match="run: edgevit data get fashion-mnist"):
        load_images("fashion-mnist", "train")


def epoch_of(dataset: ImageDataset, num_workers: int, epochs: tuple[int, ...] = (0,), **loader) -> list[dict]:
    """For each epoch: (size, index) → the tensor's bytes and label."""
    sampler = MultiScaleBatchSampler(len(dataset), SIZES, batch_size=16, seed=1)

    class Tagged(torch.utils.data.Dataset):
        def __getitem__(self, address):
            return (*dataset[address], str(address[0]), address[1])

    batches = DataLoader(Tagged(), batch_sampler=sampler, num_workers=num_workers, **loader)
    results = []
    for epoch in epochs:
        sampler.set_epoch(epoch)
        dataset.set_epoch(epoch)
        seen = {}
        for images, labels, sizes, indices in batches:
            assert images.dtype == torch.float32
            assert labels.dtype == torch.int64
            for image, label, size, index in zip(images, labels.tolist(), sizes, indices.tolist(), strict=True):
                seen[size, index] = (image.numpy().tobytes(), label)
        results.append(seen)
    return results


def test_pictures_are_the_same_however_many_workers_and_persistent_ones_follow_the_epoch():
    dataset = ImageDataset(load_images("digits", "test"), Preprocessing(), augment="light", seed=4)
    alone = epoch_of(dataset, 0, epochs=(0, 1, 2))
    assert epoch_of(dataset, 2, epochs=(0, 1, 2), persistent_workers=True) == alone
    assert epoch_of(dataset, 2, epochs=(2,)) == alone[2:]
    again = alone[0].keys() & alone[1].keys()
    assert len(again) > 50
    assert all(alone[0][key] != alone[1][key] for key in again), "another epoch, another augmentation"


def test_worker_processes_that_are_started_afresh_can_have_the_data_set():
    dataset = ImageDataset(load_images("digits", "test"), Preprocessing(), augment="standard", seed=4)
    loader = DataLoader(
        dataset, batch_sampler=[[(SIZES[0], 3), (SIZES[0], 5)]], num_workers=1, multiprocessing_context="spawn"
    )
    dataset.set_epoch(7)
    [(images, labels)] = list(loader)
    assert torch.equal(images, torch.stack([dataset[SIZES[0], 3][0], dataset[SIZES[0], 5][0]]))
    assert labels.tolist() == [dataset.images.label(3), dataset.images.label(5)]


def test_without_augmentation_the_epoch_changes_nothing():
    dataset = ImageDataset(load_images("digits", "test"), Preprocessing())
    before = dataset[SIZES[0], 0][0]
    dataset.set_epoch(3)
    assert torch.equal(before, dataset[SIZES[0], 0][0])


def test_wrong_augmentation_is_refused_before_any_worker_starts():
    with pytest.raises(EdgeVitError, match="augmentation 'heavy'"):
        ImageDataset(load_images("digits", "test"), Preprocessing(), augment="heavy")


def test_image_sets_can_be_sent_to_other_processes():
    images = load_images("digits", "test")
    assert pickle.loads(pickle.dumps(images)).sha256 == images.sha256
