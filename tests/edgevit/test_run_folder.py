"""A run folder keeps its config exactly, and says in one line when a path is not one."""

import math
import string
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.signature import Size
from edgevit.run_folder import RunFolder, to_toml

CONFIG = {
    "model": "mobilevit_xxs",
    "num_classes": 2,
    "classes": ['a "quoted" one', "zwölf\n🦊"],
    "data": "digits",
    "sizes": ["32", "192x320"],
    "base_size": "32",
    "seed": 3,
    "learning_rate": 1e-05,
    "ema": True,
    "preprocessing": {
        "size": "32",
        "crop_fraction": 0.875,
        "interpolation": "bilinear",
        "channel_order": "RGB",
        "scale": 1 / 255,
        "mean": [0.5, 0.5, 0.5],
        "std": [0.25, 0.25, 0.25],
    },
}

keys = st.text(string.ascii_lowercase + "_", min_size=1)
text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | text
values = scalars | st.lists(scalars)


@given(st.dictionaries(keys, values), st.dictionaries(keys.map(str.upper), st.dictionaries(keys, values)))
def test_what_is_written_is_what_the_standard_library_reads(flat, tables):
    assert tomllib.loads(to_toml(flat | tables)) == flat | tables


def test_none_is_left_out_and_an_object_is_refused():
    assert tomllib.loads(to_toml({"a": None, "b": math.inf})) == {"b": math.inf}
    with pytest.raises(TypeError):
        to_toml({"a": object()})


def test_config_survives_the_folder(tmp_path):
    RunFolder.create(tmp_path / "run", CONFIG)
    run = RunFolder.open(tmp_path / "run")
    assert run.config == CONFIG
    assert run.sizes == (Size.image(32, 32), Size.image(192, 320))
    assert run.preprocessing == Preprocessing("32", 0.875, mean=(0.5,) * 3, std=(0.25,) * 3)
    assert run.weights_path == tmp_path / "run" / "model.safetensors"
    assert run.artifacts.is_dir()
    assert run.metrics() == []
    assert sorted(item.name for item in run.path.iterdir()) == ["artifacts", "config.toml"]


def test_a_second_run_does_not_overwrite_the_first(tmp_path):
    RunFolder.create(tmp_path, CONFIG)
    with pytest.raises(EdgeVitError, match=r"--resume.*--out"):
        RunFolder.create(tmp_path, CONFIG | {"seed": 4})
    assert RunFolder.open(tmp_path).config["seed"] == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "not a run folder"), ("model = ", "cannot be read"), ('model = "x"', "lacks num_classes")],
)
def test_what_is_not_a_run_is_said_in_one_line(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.toml").write_text(content)
    with pytest.raises(EdgeVitError, match=message) as error:
        RunFolder.open(tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_folder_and_a_file_in_its_place(tmp_path):
    with pytest.raises(EdgeVitError, match="no such run folder"):
        RunFolder.open(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(EdgeVitError, match="a file"):
        RunFolder.create(tmp_path / "file", CONFIG)
