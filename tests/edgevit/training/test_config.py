"""Options have their data set's defaults, survive config.toml, and are refused in one line."""

import tomllib

import pytest

from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.run_folder import to_toml
from edgevit.training.config import TrainConfig

SIZES = Size.parse_list("32,64,96")


def test_defaults_are_the_data_sets_and_the_middle_size():
    config = TrainConfig.of("mobilevit_xxs", "digits", SIZES, epochs=7, lr=None)
    assert (config.epochs, config.batch_size, config.lr) == (7, 32, 2e-3)
    assert config.base_size == Size.image(64, 64)
    assert TrainConfig.of("mobilevit_s", "somewhere", SIZES).epochs == 300  # the paper's


def test_a_folder_is_found_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    assert TrainConfig.of("mobilevit_xxs", "photos", SIZES).data == str(tmp_path / "photos")


@pytest.mark.parametrize("options", [{}, {"init": "hf:a/b", "max_cpu_seconds": 1.5, "base_size": Size.image(32, 64)}])
def test_config_toml_gives_the_same_training_back(options):
    config = TrainConfig.of("mobilevit_xxs", "digits", SIZES, **options)
    table = tomllib.loads(to_toml(config.to_toml() | {"classes": ["0"], "preprocessing": {"size": "64"}}))
    assert TrainConfig.from_toml(table) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "--epochs 0: must be more than 0"),
        ({"lr": -1.0}, "--lr -1.0"),
        ({"label_smoothing": 1.0}, "--label-smoothing"),
        ({"seed": -1}, "--seed -1"),
        ({"precision": "int8"}, "--precision int8.*no, bf16, fp16"),
    ],
)
def test_an_option_out_of_range_is_named(options, message):
    with pytest.raises(EdgeVitError, match=message):
        TrainConfig.of("mobilevit_xxs", "digits", SIZES, **options)


def test_resuming_names_what_differs_and_only_that():
    earlier = TrainConfig.of("mobilevit_xxs", "digits", SIZES)
    TrainConfig.of("mobilevit_xxs", "digits", SIZES, workers=3, threads=1).check_resumes(earlier)
    with pytest.raises(EdgeVitError, match=r"--lr is 0.1, was 0.002$"):
        TrainConfig.of("mobilevit_xxs", "digits", SIZES, lr=0.1).check_resumes(earlier)
    with pytest.raises(EdgeVitError, match="--sizes"):
        TrainConfig.of("mobilevit_xxs", "digits", SIZES[:2], base_size=SIZES[1]).check_resumes(earlier)
