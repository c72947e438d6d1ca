"""What a training reaches with its default options. Minutes long."""

import pytest

from converters.signature import Size
from edgevit.data import catalogue
from edgevit.data.images import load_images
from edgevit.evaluation import evaluate
from edgevit.training.config import TrainConfig
from edgevit.training.loop import train

SIZES = Size.parse_list("32,64,96")


def accuracy_at_64(run):
    [row] = evaluate(run.path, sizes=[Size.image(64, 64)])
    return row.metric.value


@pytest.mark.slow
def test_digits(tmp_path):
    run = train(TrainConfig.of("mobilevit_xxs", "digits", SIZES), tmp_path / "run")
    assert accuracy_at_64(run) >= 0.95


@pytest.mark.slow
@pytest.mark.skipif(
    not catalogue.is_cached(catalogue.find("fashion-mnist")),
    reason="Fashion-MNIST is not on this machine; fetch it with: edgevit data get fashion-mnist",
)
def test_fashion_mnist_for_300_cpu_seconds(tmp_path):
    assert len(load_images("fashion-mnist", "test")) == 10_000
    run = train(TrainConfig.of("mobilevit_xxs", "fashion-mnist", SIZES, max_cpu_seconds=300.0), tmp_path / "run")
    assert accuracy_at_64(run) >= 0.84
