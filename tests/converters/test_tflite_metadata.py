"""TFLite Metadata as any reader finds it: a flatbuffer walked by its offsets, and the labels as a zip at the end."""

from __future__ import annotations

import io
import struct
import zipfile

import numpy as np
import pytest
import torch
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter
from export_models import lively_small, pictures

from converters import tflite
from converters.artifact import Preprocessing
from converters.errors import EdgeVitError
from converters.picture import PictureInput
from converters.quiet import quiet
from converters.signature import Signature, Size
from converters.tflite_file import TFLiteFile

SIZE = Size.parse("64")
LABELS = ["cat", "dog", "Käfer", "bird", "fish", "horse", "owl"]


class Table:
    """A flatbuffer's table, read by field number."""

    def __init__(self, data: bytes, at: int) -> None:
        self.data, self.at = data, at
        self.fields = at - struct.unpack_from("<i", data, at)[0]
        self.count = (struct.unpack_from("<H", data, self.fields)[0] - 4) // 2

    def place(self, number: int) -> int | None:
        offset = struct.unpack_from("<H", self.data, self.fields + 4 + 2 * number)[0] if number < self.count else 0
        return self.at + offset if offset else None

    def byte(self, number: int) -> int:
        return self.data[self.place(number)]

    def follow(self, number: int) -> int:
        place = self.place(number)
        return place + struct.unpack_from("<I", self.data, place)[0]

    def table(self, number: int) -> Table:
        return Table(self.data, self.follow(number))

    def string(self, number: int) -> str:
        start = self.follow(number)
        return self.data[start + 4 : start + 4 + struct.unpack_from("<I", self.data, start)[0]].decode()

    def floats(self, number: int) -> list[float]:
        start = self.follow(number)
        return list(struct.unpack_from(f"<{struct.unpack_from('<I', self.data, start)[0]}f", self.data, start + 4))

    def tables(self, number: int) -> list[Table]:
        start = self.follow(number)
        places = (start + 4 + 4 * i for i in range(struct.unpack_from("<I", self.data, start)[0]))
        return [Table(self.data, place + struct.unpack_from("<I", self.data, place)[0]) for place in places]


@pytest.fixture(scope="module")
def picture():
    return PictureInput(
        lively_small(),
        Preprocessing(size="64", mean=(0.1, 0.2, 0.3), channel_order="BGR"),
        Signature.image_classifier(7),
    )


@pytest.fixture(scope="module")
def path(picture, tmp_path_factory):
    """A picture file in half precision, with the project's own metadata put in twice after conversion."""
    path = tmp_path_factory.mktemp("picture") / "pets.tflite"
    with quiet():
        tflite.convert(
            picture.eval(), picture.signature, (SIZE,), path, precision="fp16", batch=1, samples={}, labels=LABELS
        )
    for text in ("draft", "final"):
        tflite.embed(path, text)
    return path


@pytest.fixture(scope="module")
def root(path) -> Table:
    model = schema.Model.GetRootAs(path.read_bytes(), 0)
    entries = {model.Metadata(i).Name(): model.Metadata(i).Buffer() for i in range(model.MetadataLength())}
    assert b"EDGEVIT_METADATA" in entries
    data = model.Buffers(entries[b"TFLITE_METADATA"]).DataAsNumpy().tobytes()
    assert data[4:8] == b"M001"
    return Table(data, struct.unpack_from("<I", data, 0)[0])


def test_the_input_is_an_rgb_picture_that_the_model_normalises_itself(root):
    assert root.string(0) == "pets"
    (subgraph,) = root.tables(3)
    (image,) = subgraph.tables(2)
    assert image.string(0) == "image"
    content = image.table(3)
    assert content.byte(0) == 2  # ImageProperties
    assert content.table(1).byte(0) == 1  # RGB
    (unit,) = image.tables(4)
    assert unit.byte(0) == 1  # NormalizationOptions
    assert (unit.table(1).floats(0), unit.table(1).floats(1)) == ([0.0], [1.0])
    assert (image.table(5).floats(0), image.table(5).floats(1)) == ([255.0], [0.0])


def test_the_output_is_scores_and_its_labels_are_in_the_zip(root, path):
    (scores,) = root.tables(3)[0].tables(3)
    assert scores.string(0) == "probabilities"
    assert scores.table(3).byte(0) == 1  # FeatureProperties
    (labels,) = scores.tables(6)
    assert (labels.string(0), labels.byte(2)) == ("labels.txt", 2)  # TENSOR_AXIS_LABELS
    with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
        assert archive.testzip() is None
        assert [(item.filename, item.compress_type) for item in archive.infolist()] == [("labels.txt", 0)]
        assert archive.read("labels.txt").decode().splitlines() == LABELS


def test_our_own_metadata_came_through(path):
    assert tflite.read(path) == "final"


def test_it_takes_bytes_and_gives_probabilities(picture, path):
    interpreter = Interpreter(model_path=str(path))
    interpreter.allocate_tensors()
    (details,) = interpreter.get_input_details()
    assert (list(details["shape"]), details["dtype"]) == ([1, 64, 64, 3], np.uint8)
    image = (255 * np.clip(pictures(SIZE, 1)["image"], 0, 1)).astype(np.uint8).transpose(0, 2, 3, 1).copy()
    interpreter.set_tensor(details["index"], image)
    interpreter.invoke()
    (scores,) = (interpreter.get_tensor(item["index"]) for item in interpreter.get_output_details())
    with torch.no_grad():
        (expected,) = picture(torch.from_numpy(image))
    np.testing.assert_allclose(scores, expected.numpy(), atol=5e-3)
    assert abs(scores.sum() - 1) < 1e-5


def test_without_labels_there_is_no_zip(picture, tmp_path):
    path = tmp_path / "plain.tflite"
    with quiet():
        tflite.convert(picture, picture.signature, (SIZE,), path, precision="fp32", batch=1, samples={})
    assert not zipfile.is_zipfile(path)
    assert tflite.read(path) is None


@pytest.mark.parametrize("kind", ["large", "encrypted", "method"])
def test_a_zip_that_may_not_be_unpacked_is_one_line(kind):
    """A label file of 100 MB takes 100 kB when compressed; no reader of the format knows compression."""
    stream = io.BytesIO(b"\0\0\0\0")
    with zipfile.ZipFile(stream, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("labels.txt", b"\0" * (100_000_000 if kind == "large" else 100))
    content = bytearray(stream.getvalue())
    for signature, flags, method in ((b"PK\1\2", 8, 10), (b"PK\3\4", 6, 8)):
        place = content.index(signature)
        if kind == "encrypted":
            content[place + flags] |= 1
        if kind == "method":
            content[place + method] = 99
    with pytest.raises(EdgeVitError, match=r"x\.tflite: a damaged TFLite model"):
        TFLiteFile.parse(_smallest() + bytes(content), name="x.tflite")


def _smallest() -> bytes:
    """A TFLite file of one empty subgraph."""
    model = schema.ModelT()
    model.version, model.subgraphs = 3, [schema.SubGraphT()]
    return TFLiteFile(model, {}).to_bytes()
