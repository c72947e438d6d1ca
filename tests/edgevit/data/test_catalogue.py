"""`edgevit data list | get`: fetching with a package manager that is played by a script, checking, caching."""

import dataclasses
import gzip
import hashlib
import json
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from converters.errors import EdgeVitError
from edgevit.cli import main
from edgevit.data import catalogue
from edgevit.data.images import load_images


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def contents() -> dict[str, bytes]:
    """A miniature of the set: the four files, unpacked."""
    random = np.random.default_rng(0)
    files = {}
    for split, count in (("train", 20), ("t10k", 10)):
        files[f"{split}-images-idx3-ubyte"] = idx(random.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[f"{split}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


@pytest.fixture
def debian(tmp_path, monkeypatch, contents) -> Path:
    """apt-get and dpkg-deb as scripts: the "package" is a file, and unpacking copies the folder `debian/files`."""
    root = tmp_path / "debian"
    (root / "bin").mkdir(parents=True)
    (root / "files" / "usr" / "share").mkdir(parents=True)
    for name, data in contents.items():
        (root / "files" / "usr" / "share" / (name + ".gz")).write_bytes(gzip.compress(data))
    scripts = {
        "apt-get": "assert sys.argv[1:] == ['download', 'dataset-fashion-mnist']\n"
        "open('dataset-fashion-mnist_1.deb', 'w').close()",
        "dpkg-deb": "assert sys.argv[1:] == ['-x', 'dataset-fashion-mnist_1.deb', 'unpacked']\n"
        f"shutil.copytree({str(root / 'files')!r}, 'unpacked')",
    }
    for name, code in scripts.items():
        write_script(root / "bin" / name, code)
    monkeypatch.setenv("PATH", str(root / "bin"))
    monkeypatch.setenv("EDGEVIT_DATA", str(tmp_path / "cache"))
    known = catalogue.find("fashion-mnist")
    small = dataclasses.replace(
        known, files={name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    )
    monkeypatch.setattr(catalogue, "DATA_SETS", (catalogue.find("digits"), small))
    return root


def write_script(path: Path, code: str) -> None:
    path.write_text(f"#!{sys.executable}\nimport shutil, sys\n{code}\n")
    path.chmod(0o755)


def edgevit(*arguments: str):
    return CliRunner().invoke(main, ["data", *arguments])


def test_get_fetches_checks_and_caches(debian, contents):
    result = edgevit("get", "fashion-mnist", "--via", "apt")
    assert result.exit_code == 0, result.output
    assert "MIT" in result.output
    cache = catalogue.cache_folder() / "fashion-mnist"
    assert str(cache) in result.output
    assert {path.name for path in cache.parent.iterdir()} == {"fashion-mnist"}, "nothing temporary is left"
    assert {name: gzip.decompress((cache / (name + ".gz")).read_bytes()) for name in contents} == contents
    assert "MIT" in (cache / "LICENCE.txt").read_text()

    images = load_images("fashion-mnist", "test")
    assert len(images) == 10
    assert images.classes[0] == "T-shirt/top"
    assert images.licence.startswith("MIT")
    assert images.classes[9] == "Ankle boot"
    # The same files in a folder of one's own are the same data.
    assert load_images(str(cache), "test").sha256 == images.sha256
    assert load_images("fashion-mnist", "train").sha256 != images.sha256

    write_script(debian / "bin" / "apt-get", "sys.exit('must not be asked again')")
    assert edgevit("get", "fashion-mnist").exit_code == 0


def test_a_file_that_differs_is_refused_and_nothing_is_kept(debian, contents):
    name = "t10k-labels-idx1-ubyte"
    wrong = contents[name][:-1] + b"\x01"
    (debian / "files" / "usr" / "share" / (name + ".gz")).write_bytes(gzip.compress(wrong))
    result = edgevit("get", "fashion-mnist", "--via", "apt")
    assert result.exit_code == 2
    assert f"{name}.gz is not the file expected" in result.output
    assert list(catalogue.cache_folder().iterdir()) == []


def test_a_missing_file_is_named(debian):
    (debian / "files" / "usr" / "share" / "train-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(EdgeVitError, match=r"holds no train-labels-idx1-ubyte\.gz"):
        catalogue.get("fashion-mnist", "apt")


def test_a_failing_package_manager_is_quoted_in_one_line(debian):
    write_script(debian / "bin" / "apt-get", "sys.exit('E: Unable to locate package dataset-fashion-mnist')")
    with pytest.raises(EdgeVitError, match=r"apt: E: Unable to locate package .*apt-get update") as caught:
        catalogue.get("fashion-mnist", "apt")
    assert "\n" not in str(caught.value)


def test_auto_falls_back_to_torchvision(debian, monkeypatch):
    (debian / "bin" / "apt-get").unlink()
    commands = []

    def run(command, folder, time_limit_s):
        commands.append(command)
        for path in (debian / "files").rglob("*.gz"):
            os.link(path, folder / path.name)

    monkeypatch.setattr(catalogue, "_run", run)
    assert catalogue.get("fashion-mnist") == catalogue.cached_folder("fashion-mnist")
    assert len(commands) == 1
    assert "torchvision" in commands[0][-1]


def test_when_no_way_works_each_reason_is_told(debian, monkeypatch):
    (debian / "bin" / "apt-get").unlink()
    monkeypatch.setattr(catalogue.sys, "executable", "/no/python")
    with pytest.raises(EdgeVitError, match=r"apt: no apt-get here.*torchvision: .*/no/python"):
        catalogue.get("fashion-mnist")


def test_a_command_that_hangs_is_ended(tmp_path):
    with pytest.raises(EdgeVitError, match="timed out"):
        catalogue._run([sys.executable, "-c", "while True: pass"], tmp_path, 0.01)


def test_nothing_can_be_asked_on_the_terminal(tmp_path):
    with pytest.raises(EdgeVitError, match="EOF"):
        catalogue._run([sys.executable, "-c", "input()"], tmp_path, 60)


def test_list_says_what_is_here(debian):
    assert [row["here"] for row in json.loads(edgevit("list", "--json").output)] == ["installed", "no"]
    assert edgevit("get", "fashion-mnist", "--via", "apt").exit_code == 0
    assert [row["here"] for row in json.loads(edgevit("list", "--json").output)] == ["installed", "cached"]
    plain = edgevit("list").output.splitlines()
    assert [line.split("\t")[0] for line in plain] == ["digits", "fashion-mnist"]
    assert "MIT" in plain[1]


def test_digits_need_no_fetching():
    result = edgevit("get", "digits")
    assert result.exit_code == 0
    assert "nothing to fetch" in result.output
    assert catalogue.find("digits").train_and_test == " + ".join(
        f"{len(load_images('digits', split)):,}" for split in ("train", "test")
    )


def test_unknown_names_list_the_known():
    result = edgevit("get", "fashion")
    assert result.exit_code == 2
    assert "choose from digits, fashion-mnist" in result.output


@pytest.mark.slow
@pytest.mark.skipif(not catalogue.is_cached(catalogue.find("fashion-mnist")), reason="edgevit data get fashion-mnist")
def test_fashion_mnist_is_the_published_one():
    train, test = load_images("fashion-mnist", "train"), load_images("fashion-mnist", "test")
    assert (len(train), len(test)) == (60_000, 10_000)
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    # Mean and deviation of the training pixels, as published with many models of this set: 0.2860, 0.3530.
    pixels = train.pictures / np.float32(255)
    assert pixels.mean() == pytest.approx(0.2860, abs=1e-4)
    assert pixels.std() == pytest.approx(0.3530, abs=1e-4)
