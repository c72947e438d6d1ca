"""The data sets that this project knows by name, where they come from, and how one is fetched, checked and cached."""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from converters.artifact import written_beside
from converters.errors import EdgeVitError
from edgevit.data.idx import read_idx

WAYS = ("auto", "apt", "torchvision")


@dataclass(frozen=True)
class DataSet:
    """A data set known by name."""

    name: str
    what: str
    train_and_test: str  # how many pictures
    licence: str
    source: str
    classes: tuple[str, ...]
    debian_package: str = ""
    files: dict[str, str] = field(default_factory=dict)  # IDX file → SHA-256 of its unpacked bytes; empty: embedded

    @property
    def embedded(self) -> bool:
        """Comes with an installed package: nothing to fetch."""
        return not self.files


DATA_SETS = (
    DataSet(
        name="digits",
        what="handwritten digits, 8 x 8 grey, 10 classes",
        train_and_test="1,426 + 371",
        licence="CC BY 4.0 (UCI: Optical Recognition of Handwritten Digits; E. Alpaydin, C. Kaynak, 1998)",
        source="scikit-learn's sklearn.datasets.load_digits",
        classes=tuple("0123456789"),
    ),
    DataSet(
        name="fashion-mnist",
        what="articles of clothing, 28 x 28 grey, 10 classes",
        train_and_test="60,000 + 10,000",
        licence="MIT (Zalando SE, 2017; arXiv 1708.07747)",
        source="https://github.com/zalandoresearch/fashion-mnist",
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        debian_package="dataset-fashion-mnist",
        files={
            "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
)


def find(name: str) -> DataSet:
    """The data set of that name. Raises EdgeVitError naming those there are."""
    for data_set in DATA_SETS:
        if data_set.name == name:
            return data_set
    raise EdgeVitError(f"data set '{name}': choose from {', '.join(item.name for item in DATA_SETS)}")


def cache_folder() -> Path:
    """$EDGEVIT_DATA, or ~/.cache/edgevit."""
    return Path(os.environ.get("EDGEVIT_DATA") or "~/.cache/edgevit").expanduser()


def is_cached(data_set: DataSet) -> bool:
    """Whether it can be loaded now, without fetching."""
    folder = cache_folder() / data_set.name
    return all((folder / (name + ".gz")).is_file() for name in data_set.files)


def cached_folder(name: str) -> Path:
    """Where a fetched data set lies. Raises EdgeVitError with the command that fetches it when it does not."""
    if not is_cached(find(name)):
        raise EdgeVitError(f"data set {name} is not on this machine; run: edgevit data get {name}")
    return cache_folder() / name


def get(name: str, via: str = "auto", progress: Callable[[str], None] = lambda line: None) -> Path | None:
    """Fetches data set `name` into the cache, if it is not there, and returns its folder; None for an embedded one.

    `via`: "apt" downloads and unpacks a Debian package (nothing is installed), "torchvision" uses its downloader, and
    "auto" tries the first, then the second. Each file's SHA-256 is checked before anything is put into the cache.

    Raises EdgeVitError for an unknown name, when no way works, and for files other than those expected.
    """
    data_set = find(name)
    if via not in WAYS:
        raise EdgeVitError(f"way to fetch '{via}': choose from {', '.join(WAYS)}")
    if data_set.embedded:
        return None
    if is_cached(data_set):
        return cached_folder(name)
    return fetch(data_set, via, progress)


def fetch(data_set: DataSet, via: str, progress: Callable[[str], None]) -> Path:
    """Fetches `data_set` whether or not it is cached; see `get`."""
    ways = {"apt": _via_apt, "torchvision": _via_torchvision}
    failures = []
    for way in [via] if via != "auto" else ways:
        with tempfile.TemporaryDirectory(prefix="edgevit-data-") as scratch:
            progress(f"fetching {data_set.name} with {way}")
            try:
                ways[way](data_set, Path(scratch))
            except EdgeVitError as error:
                failures.append(f"{way}: {error}")
                continue
            return _check_and_cache(data_set, Path(scratch), progress)
    raise EdgeVitError(f"could not fetch {data_set.name}; " + "; ".join(failures))


def classes_by_labels(labels: np.ndarray) -> tuple[str, ...]:
    """Class names of an IDX folder: a known set's, if its labels (N,) uint8 are that set's; else "0", "1", …"""
    content = struct.pack(">BBBBI", 0, 0, 8, 1, len(labels)) + labels.tobytes()
    digest = hashlib.sha256(content).hexdigest()
    for data_set in DATA_SETS:
        if digest in data_set.files.values():
            return data_set.classes
    return tuple(str(number) for number in range(int(labels.max()) + 1))


def _check_and_cache(data_set: DataSet, scratch: Path, progress: Callable[[str], None]) -> Path:
    folder = cache_folder() / data_set.name
    with written_beside(folder) as draft:
        draft.mkdir()
        for name, expected in data_set.files.items():
            found = next(scratch.rglob(name + ".gz"), None)
            if found is None:
                raise EdgeVitError(f"{data_set.name}: what was fetched holds no {name}.gz")
            if _idx_sha256(found) != expected:
                raise EdgeVitError(f"{data_set.name}: {name}.gz is not the file expected (its SHA-256 differs)")
            shutil.copyfile(found, draft / found.name)
        (draft / "LICENCE.txt").write_text(f"{data_set.name}: {data_set.licence}\n{data_set.source}\n")
    progress(f"checked the SHA-256 of {len(data_set.files)} files")
    return folder


def _idx_sha256(path: Path) -> str:
    """Of the unpacked bytes: the same images come in gzip files that differ in their headers."""
    array = read_idx(path, ndim=3 if "idx3" in path.name else 1)
    digest = hashlib.sha256(struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape))
    digest.update(array.tobytes())
    return digest.hexdigest()


def _via_apt(data_set: DataSet, scratch: Path) -> None:
    """Downloads the package as a file and unpacks it; needs no rights and installs nothing."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise EdgeVitError(f"no {tool} here (it is Debian's)")
    try:
        _run(["apt-get", "download", data_set.debian_package], scratch, time_limit_s=900)
    except EdgeVitError as error:
        raise EdgeVitError(f"{error} (`apt-get update`, as root, may be due)") from error
    package = next(scratch.glob("*.deb"), None)
    if package is None:
        raise EdgeVitError("apt-get left no package")
    _run(["dpkg-deb", "-x", package.name, "unpacked"], scratch, time_limit_s=120)


def _via_torchvision(data_set: DataSet, scratch: Path) -> None:
    """In a process of its own, since the downloader knows no time limit."""
    if data_set.name != "fashion-mnist":
        raise EdgeVitError("torchvision does not carry it")
    code = "from torchvision.datasets import FashionMNIST; FashionMNIST('.', download=True)"
    _run([sys.executable, "-c", code], scratch, time_limit_s=900)


def _run(command: list[str], folder: Path, time_limit_s: float) -> None:
    """Raises EdgeVitError with the last line that the command said when it fails, or runs out of time."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=time_limit_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EdgeVitError(str(error)) from error
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()]
        raise EdgeVitError(said[-1].strip() if said else f"exit code {done.returncode}")
