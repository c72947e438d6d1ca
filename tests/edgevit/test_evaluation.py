"""Accuracy is scikit-learn's for the same model, the interval scipy's, and an artifact's is its module's."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from scipy.stats import binomtest
from sklearn.linear_model import LogisticRegression
from torch import nn

import converters
from converters.artifact import Preprocessing, artifact_sha256
from converters.errors import EdgeVitError
from converters.run import Port, Session, open_artifact
from converters.signature import Signature, Size
from edgevit.cli import main
from edgevit.data.images import evaluation_transform, load_images
from edgevit.evaluation import accuracy_key, evaluate, evaluate_artifact, evaluate_module, subset, wilson
from edgevit.models.registry import create_model
from edgevit.run_folder import RunFolder
from edgevit.sources import load_source
from edgevit.training.config import TrainConfig
from profiles.store import Store

SIZE = Size.image(8, 8)
PREPROCESSING = Preprocessing(size="8", mean=(0.5,) * 3, std=(0.25,) * 3)


@pytest.fixture(scope="module")
def digits():
    return load_images("digits", "test")


def pixels(images):
    transform = evaluation_transform(PREPROCESSING, SIZE)
    return np.stack([transform(images.image(i)).numpy().ravel() for i in range(len(images))])


@pytest.fixture(scope="module")
def regression(digits):
    """Scikit-learn's logistic regression on raw pixels, its accuracy by its own reckoning, and the same as a module."""
    train = load_images("digits", "train")
    fitted = LogisticRegression(max_iter=300).fit(pixels(train), train.labels)
    linear = nn.Linear(192, 10)
    linear.load_state_dict({"weight": torch.tensor(fitted.coef_), "bias": torch.tensor(fitted.intercept_)})
    return nn.Sequential(nn.Flatten(), linear).eval(), fitted.score(pixels(digits), digits.labels)


def samples_of(digits):
    def sample_inputs(size, n):
        transform = evaluation_transform(PREPROCESSING, size)
        return {"image": np.stack([transform(digits.image(i)).numpy() for i in range(n)])}

    return sample_inputs


@pytest.fixture(scope="module")
def artifact(regression, digits, tmp_path_factory):
    """The regression as an ONNX file."""
    [artifact] = converters.export(
        regression[0],
        Signature.image_classifier(10, multiple_of=8),
        name="regression",
        out=tmp_path_factory.mktemp("exports"),
        formats=("onnx",),
        sizes=(SIZE,),
        sample_inputs=samples_of(digits),
        preprocessing=PREPROCESSING,
        labels=digits.classes,
    )
    return artifact


@pytest.mark.parametrize(("correct", "n"), [(0, 10), (10, 10), (7, 10), (349, 371), (8400, 10000)])
def test_the_interval_is_scipys(correct, n):
    expected = binomtest(correct, n).proportion_ci(method="wilson")
    assert wilson(correct, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_the_interval_holds_the_proportion_at_both_ends():
    for n in range(1, 2001):
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0


def test_a_modules_accuracy_is_scikit_learns(regression, digits):
    module, score = regression
    metric = evaluate_module(module, digits, SIZE, PREPROCESSING)
    assert metric.value == pytest.approx(score, abs=1e-12)
    assert 0.8 < metric.value < 1  # so that a stub would not pass
    assert metric.n == len(digits)
    assert (metric.low, metric.high) == wilson(round(score * len(digits)), len(digits))


def test_dropout_and_batch_norm_are_in_evaluation_mode_and_the_mode_is_given_back(digits):
    class Model(nn.Module):
        def forward(self, image):
            assert not self.training
            assert not torch.is_grad_enabled()
            return nn.functional.one_hot(torch.zeros(len(image), dtype=torch.int64), 10).float()

    model = Model().train()
    metric = evaluate_module(model, digits, SIZE, PREPROCESSING)
    assert model.training
    assert metric.value == pytest.approx((digits.labels == 0).mean())


def test_logits_that_are_not_numbers_are_wrong(digits):
    class NotANumber(nn.Module):
        def forward(self, image):
            return torch.full((len(image), 10), torch.nan)

    assert evaluate_module(NotANumber(), digits, SIZE, PREPROCESSING, 50).value == 0


def test_other_classes_are_refused(digits):
    with pytest.raises(EdgeVitError, match="10 classes"):
        evaluate_module(nn.Sequential(nn.Flatten(), nn.Linear(192, 7)), digits, SIZE, PREPROCESSING, 5)


def test_a_limit_takes_a_fixed_subset():
    assert subset(100) == subset(100, 100) == range(100)
    few, more = subset(10_000, 200), subset(10_000, 2000)
    assert list(few) == list(subset(10_000, 200))
    assert len(set(few)) == 200
    assert set(few) < set(more)
    assert 4000 < np.mean(more) < 6000  # from all over, not the first
    with pytest.raises(EdgeVitError, match="--limit 0"):
        subset(10, 0)


def test_the_key_says_what_was_measured(digits):
    key = accuracy_key("abc", SIZE, digits, PREPROCESSING, 100)
    assert (key.artifact_sha256, key.size, key.split, key.crop) == ("abc", "8", "test[:100]", 1.0)
    assert key.data_sha256 == digits.sha256
    everything = accuracy_key("abc", SIZE, digits, PREPROCESSING)
    assert everything.split == "test"
    assert everything == accuracy_key("abc", SIZE, digits, PREPROCESSING, len(digits))


@pytest.mark.parametrize("limit", [None, 70])
def test_an_artifacts_accuracy_is_its_modules(regression, artifact, digits, limit):
    module, _ = regression
    metric = evaluate_artifact(artifact, digits, SIZE, limit)
    assert metric == evaluate_module(module, digits, SIZE, PREPROCESSING, limit)
    assert metric == evaluate_artifact(artifact.path, digits, SIZE, limit)


def test_a_file_that_takes_pictures_is_given_pictures(regression, artifact, digits, tmp_path):
    module, _ = regression
    [takes_pictures] = converters.export(
        module,
        artifact.metadata.signature,
        name="regression",
        out=tmp_path,
        formats=["onnx"],
        sizes=[SIZE],
        input="image",
        sample_inputs=samples_of(digits),
        preprocessing=PREPROCESSING,
    )
    metric = evaluate_artifact(takes_pictures, digits, SIZE, 70)
    assert metric == evaluate_module(module, digits, SIZE, PREPROCESSING, 70)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_fixed_batch_is_filled_up_and_the_filling_not_counted(regression, artifact, digits, batch, monkeypatch):
    module, _ = regression
    shapes = []

    def call(inputs):
        shapes.append(inputs["image"].shape)
        with torch.inference_mode():
            return {"logits": module(torch.from_numpy(inputs["image"])).numpy()}

    def load(path, *, size, threads):
        ports = (Port("image", (batch, 3, 8, 8)),), (Port("logits", (batch, 10)),)
        return Session(path, "onnxruntime", *ports, open_artifact(path).metadata, call)

    monkeypatch.setattr("converters.run.load", load)
    assert evaluate_artifact(artifact, digits, SIZE, 51) == evaluate_module(module, digits, SIZE, PREPROCESSING, 51)
    assert set(shapes) == {(batch, 3, 8, 8)}


def test_an_artifact_of_other_classes_is_refused(artifact, digits):
    with pytest.raises(EdgeVitError, match=r"its classes are 0, 1, 2 … \(10\); those of digits are"):
        evaluate_artifact(artifact, replace(digits, classes=tuple("abcdefghij")), SIZE)


@pytest.fixture
def run(artifact, digits, tmp_path):
    """A run folder whose model was not trained, with the regression among its artifacts."""
    config = TrainConfig.of("mobilevit_xxs", "digits", Size.parse_list("32")).to_toml()
    about = {"num_classes": 10, "classes": list(digits.classes), "preprocessing": vars(Preprocessing(size="32"))}
    run = RunFolder.create(tmp_path / "run", config | about)
    save_file(create_model("mobilevit_xxs", 10).state_dict(), run.weights_path)
    (run.artifacts / "regression.onnx").write_bytes(artifact.path.read_bytes())
    return run


def test_a_runs_accuracy_is_kept_in_its_database(run, digits):
    [row] = evaluate(run.path, limit=40)
    source = load_source(run.path)
    assert row.metric == evaluate_module(source.module, digits, run.sizes[0], source.preprocessing, 40)
    key = accuracy_key(source.sha256, run.sizes[0], digits, source.preprocessing, 40)
    assert Store(run.db_path).metrics() == [(key, "digits", row.metric)]


def test_an_artifact_in_a_run_takes_its_data_and_all_its_sizes(run, regression):
    [row] = evaluate(run.artifacts / "regression.onnx")
    assert row.metric.value == pytest.approx(regression[1], abs=1e-12)
    assert row.key.artifact_sha256 == artifact_sha256(run.artifacts / "regression.onnx")
    assert Store(run.db_path).metric(row.key) == row.metric


def test_the_command_prints_a_line_a_size_or_json(run, artifact, regression):
    file = str(run.artifacts / "regression.onnx")
    plain = CliRunner().invoke(main, ["evaluate", file])
    assert plain.exit_code == 0, plain.output
    assert f"8\t{regression[1]:.2%}\t" in plain.output
    [row] = json.loads(CliRunner().invoke(main, ["evaluate", file, "--json", "--limit", "30"]).output)
    assert (row["size"], row["n"], row["split"], row["data"]) == ("8", 30, "test[:30]", "digits")
    assert row["low"] < row["value"] <= row["high"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{artifact}"], "say which images with --data"),
        (["{artifact}", "--data", "digits", "--sizes", "12"], "nearest: 8 or 16"),
        (["absent"], "absent"),
        (["absent.onnx"], "no such file"),
        (["mobilevit_xxs"], "without weights"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(artifact, arguments, message):
    arguments = [argument.format(artifact=artifact.path) for argument in arguments]
    result = CliRunner().invoke(main, ["evaluate", *arguments])
    assert result.exit_code == 2, result.output
    assert message in result.output
    assert result.output.count("\n") == 1
