"""Every option of a training, with its default by data set, and its place in config.toml."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from converters.errors import EdgeVitError
from converters.signature import Size

PRECISIONS = ("no", "bf16", "fp16")

# Small sets need other lengths than the paper's 300 epochs of ImageNet; docs/training.md says what these reach.
RECIPES: dict[str, dict[str, Any]] = {
    "digits": {"epochs": 30, "batch_size": 32, "warmup_steps": 50, "dropout": 0.0, "workers": 0},
    # A few passes over 60,000 images fit too little rather than too much, so nothing makes them harder.
    "fashion-mnist": {
        "epochs": 5,
        "batch_size": 32,
        "warmup_steps": 100,
        "augment": "none",
        "dropout": 0.0,
        "workers": 0,
    },
}

PAPER_SIZES = "160,192,256,288,320"  # arXiv 2110.02178, section 3.2
SMALL_SIZES = "32,64,96"  # for the sets of small pictures above

# What may differ when a run is resumed: it changes how fast the run goes, not what it computes.
FREE_ON_RESUME = ("workers", "threads", "checkpoint_minutes")


@dataclass(frozen=True)
class TrainConfig:
    """One training. Defaults are MobileViT's ImageNet recipe (arXiv 2110.02178, section 4.1).

    `batch_size` is each process's at `base_size`; a step at another size takes as many images as cost the same.
    The learning rate rises from `warmup_lr` to `lr` in `warmup_steps`, then falls along a cosine to `min_lr`.
    `max_steps` and `max_cpu_seconds` (of the main process, evaluation in between included) end a training early, with
    the cosine drawn in so that it has come down by then. `init` names weights to start from, of which the classifier is
    left out where it has another number of classes. `augment` "auto" is what suits the data set, `dropout` None what
    the model's paper takes. `evaluate_every` counts epochs; None is five times in a training; the last epoch always is.
    """

    model: str
    data: str
    sizes: tuple[Size, ...]
    base_size: Size
    batch_size: int = 128
    epochs: int = 300
    lr: float = 2e-3
    warmup_lr: float = 2e-4
    min_lr: float = 2e-4
    warmup_steps: int = 3000
    weight_decay: float = 0.01
    label_smoothing: float = 0.1
    ema_decay: float = 0.9995
    dropout: float | None = None
    augment: str = "auto"
    seed: int = 0
    precision: str = "no"
    init: str | None = None
    max_steps: int | None = None
    max_cpu_seconds: float | None = None
    evaluate_every: int | None = None
    workers: int = min(4, os.cpu_count() or 1)
    threads: int | None = None
    checkpoint_minutes: float = 10.0

    @classmethod
    def of(cls, model: str, data: str, sizes: tuple[Size, ...], **options: Any) -> TrainConfig:
        """The config with `data`'s own defaults; an option that is None keeps its default, `base_size` the middle size.

        Raises EdgeVitError for an option out of range.
        """
        given = {name: value for name, value in options.items() if value is not None}
        base_size = given.pop("base_size", None) or middle(sizes)
        config = cls(model, locate(data), sizes, base_size, **(RECIPES.get(data, {}) | given))
        config.check()
        return config

    @classmethod
    def from_toml(cls, table: Mapping[str, Any]) -> TrainConfig:
        """From a run folder's config, of which it takes what is a training's option."""
        known = {field.name: table[field.name] for field in fields(cls) if field.name in table}
        known["sizes"] = tuple(Size.parse(size) for size in table["sizes"])
        known["base_size"] = Size.parse(table["base_size"])
        return cls(**known)

    def to_toml(self) -> dict[str, Any]:
        table = asdict(self)
        return table | {"sizes": [str(size) for size in self.sizes], "base_size": str(self.base_size)}

    def check(self) -> None:
        positive = ("batch_size", "epochs", "lr", "max_steps", "max_cpu_seconds", "evaluate_every", "threads")
        for name in positive:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise EdgeVitError(f"{option(name)} {value}: must be more than 0")
        for name in ("warmup_steps", "weight_decay", "seed", "workers", "warmup_lr", "min_lr"):
            if (value := getattr(self, name)) < 0:
                raise EdgeVitError(f"{option(name)} {value}: must be at least 0")
        for name in ("label_smoothing", "ema_decay", "dropout"):
            if (value := getattr(self, name)) is not None and not 0 <= value < 1:
                raise EdgeVitError(f"{option(name)} {value}: must be at least 0 and below 1")
        if self.precision not in PRECISIONS:
            raise EdgeVitError(f"--precision {self.precision}: must be one of {', '.join(PRECISIONS)}")

    def check_resumes(self, earlier: TrainConfig) -> None:
        """Raises EdgeVitError, naming each option that differs, unless this config continues `earlier`."""
        ours, theirs = self.to_toml(), earlier.to_toml()
        differing = [
            f"{option(name)} is {ours[name]}, was {theirs[name]}"
            for name in ours
            if name not in FREE_ON_RESUME and ours[name] != theirs[name]
        ]
        if differing:
            raise EdgeVitError(f"cannot resume with other options: {'; '.join(differing)}")


def locate(data: str) -> str:
    """The absolute path of a folder given by a relative one, so that the run finds it from anywhere; else the name."""
    folder = Path(data).expanduser()
    return data if data in RECIPES or not folder.is_dir() else str(folder.resolve())


def default_sizes(data: str) -> tuple[Size, ...]:
    """Sizes that suit `data` where none are given."""
    return Size.parse_list(SMALL_SIZES if data in RECIPES else PAPER_SIZES)


def middle(sizes: tuple[Size, ...]) -> Size:
    """The size in the middle in order of area; of two, the smaller, as the sampler has it."""
    return sorted(set(sizes), key=lambda size: (size.height * size.width, size.height))[(len(set(sizes)) - 1) // 2]


def option(name: str) -> str:
    """The name of a config's field on the command line."""
    return {"model": "MODEL"}.get(name, "--" + name.replace("_", "-"))
