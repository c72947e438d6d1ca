"""A run folder: config.toml  model.safetensors  state/  metrics.jsonl  artifacts/  runs.db  report.html."""

from __future__ import annotations

import contextlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.artifact import Preprocessing, written_beside
from converters.errors import EdgeVitError
from converters.signature import Size

REQUIRED = ("model", "num_classes", "classes", "data", "sizes", "base_size", "preprocessing", "seed")


@dataclass(frozen=True)
class RunFolder:
    """What one training run left on disk, and the names that every command finds it by.

    `config` is config.toml as a dict: model, num_classes, classes, data, data_sha256, sizes, base_size, preprocessing
    (a table), seed, and every other option of the training.
    """

    path: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """Reads config.toml. Raises EdgeVitError when `path` is not a run folder or its config is damaged."""
        path = Path(path)
        if not path.is_dir():
            raise EdgeVitError(f"{path}: no such run folder; `edgevit train … --out {path}` makes one")
        if not (path / "config.toml").is_file():
            raise EdgeVitError(f"{path}: not a run folder (it has no config.toml)")
        config = _read(path / "config.toml")
        if missing := [name for name in REQUIRED if name not in config]:
            raise EdgeVitError(f"{path / 'config.toml'}: lacks {', '.join(missing)}; a training writes these")
        return cls(path, config)

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any]) -> RunFolder:
        """Writes config.toml, last of all when `path` is new. Raises EdgeVitError when a run stands there already."""
        path = Path(path)
        if cls.stands_at(path):
            raise EdgeVitError(f"{path}: holds a run already; go on with --resume, or give another --out")
        if path.exists() and not path.is_dir():
            raise EdgeVitError(f"{path}: a file; --out is a folder")
        try:
            (path / "artifacts").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EdgeVitError(f"{path}: cannot write there ({error.strerror})") from error
        with written_beside(path / "config.toml") as draft:
            draft.write_text(to_toml(config), encoding="utf-8")
        return cls(path, _read(path / "config.toml"))

    def discard(self) -> None:
        """Removes what `create` wrote; the folder too, where nothing else lies in it."""
        (self.path / "config.toml").unlink()
        for folder in (self.artifacts, self.path):
            with contextlib.suppress(OSError):  # not empty, or never made
                folder.rmdir()

    @staticmethod
    def stands_at(path: Path | str) -> bool:
        return (Path(path) / "config.toml").is_file()

    @property
    def weights_path(self) -> Path:
        """The weights that are evaluated and exported (averaged over the training)."""
        return self.path / "model.safetensors"

    @property
    def state(self) -> Path:
        """What `--resume` needs: raw weights, optimiser, schedule, sampler and random generators."""
        return self.path / "state"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def artifacts(self) -> Path:
        return self.path / "artifacts"

    @property
    def db_path(self) -> Path:
        return self.path / "runs.db"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(Size.parse(size) for size in self.config["sizes"])

    @property
    def base_size(self) -> Size:
        return Size.parse(self.config["base_size"])

    @property
    def preprocessing(self) -> Preprocessing:
        try:
            return Preprocessing.from_json(self.config["preprocessing"])
        except (KeyError, TypeError, ValueError) as error:
            raise EdgeVitError(f"{self.path / 'config.toml'}: damaged [preprocessing] ({error})") from error

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.config["classes"])

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, one an epoch, oldest first."""
        if not self.metrics_path.exists():
            return []
        return [json.loads(line) for line in self.metrics_path.read_text(encoding="utf-8").splitlines()]


def to_toml(config: Mapping[str, Any]) -> str:
    """TOML of scalars, lists of scalars and one level of tables; keys whose value is None are left out.

    The standard library reads TOML but does not write it, and this is all of it that a config needs.
    """
    scalars = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
    tables = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    lines = _lines(scalars)
    for name, table in tables.items():
        lines += ["", f"[{name}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {_value(value)}" for key, value in table.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):  # a JSON string is a TOML string, but for DEL; \ud83d pairs are not, so keep UTF-8
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    raise TypeError(f"{type(value).__name__} does not go into a config")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EdgeVitError(f"{path}: cannot be read ({error})") from error
