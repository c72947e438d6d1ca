"""Each conversion takes seconds, so each is done once and its files are shared; tests copy what they damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from export_models import Small, lively_small, pictures

import converters
from converters.artifact import Artifact, Preprocessing
from converters.signature import Size

SIZES = Size.parse_list("64,96")


@pytest.fixture(scope="session")
def small() -> Small:
    return lively_small()


@pytest.fixture(scope="session")
def small_files(small, tmp_path_factory) -> dict[str, Artifact]:
    """`small` at 64 and 96 in every format; Core ML as one package with two functions."""
    artifacts = converters.export(
        small,
        small.signature,
        name="small",
        out=tmp_path_factory.mktemp("small"),
        sizes=SIZES,
        target="ios18",
        sample_inputs=pictures,
        preprocessing=Preprocessing(size="64", mean=(0.1, 0.2, 0.3)),
        labels=[f"class {number}" for number in range(7)],
        source_sha256="ab" * 32,
    )
    return {artifact.metadata.format: artifact for artifact in artifacts}


@pytest.fixture
def paths(small_files) -> dict[str, Path]:
    return {form: artifact.path for form, artifact in small_files.items()}
