"""TFLite Metadata: what lets MediaPipe's and tflite-support's image classifiers run a file on a picture.

A flatbuffer of its own (identifier M001) in the model's metadata entry TFLITE_METADATA, and the class names as an
associated file. The format: https://www.tensorflow.org/lite/models/convert/metadata; its tables are written here by
their field numbers, since the package that has them pins an old protobuf.
"""

from __future__ import annotations

from collections.abc import Sequence

import flatbuffers

from converters.signature import Signature
from converters.tflite_file import TFLiteFile

ENTRY = "TFLITE_METADATA"
IDENTIFIER = b"M001"
LABELS_FILE = "labels.txt"
# The first version of the format that knows all fields used here.
PARSER_VERSION = "1.0.0"
_RGB = 1  # ColorSpaceType
_TENSOR_AXIS_LABELS = 2  # AssociatedFileType
_FEATURE_PROPERTIES, _IMAGE_PROPERTIES = 1, 2  # ContentProperties
_NORMALIZATION = 1  # ProcessUnitOptions


def describe_picture(file: TFLiteFile, signature: Signature, labels: Sequence[str], *, name: str) -> None:
    """Adds to `file` that its input is an RGB picture (1, H, W, 3) of bytes and its outputs are scores of `labels`.

    The normalisation that readers are told is (v − 0) / 1: the model normalises inside.
    """
    builder = flatbuffers.Builder(1024)
    inputs = [_image(builder, spec.name) for spec in signature.inputs]
    outputs = [
        _scores(builder, spec.name, labels if spec.meaning == "probabilities" else ()) for spec in signature.outputs
    ]
    subgraph = _table(builder, 10, {2: _vector(builder, inputs), 3: _vector(builder, outputs)})
    root = _table(
        builder,
        8,
        {
            0: builder.CreateString(name),
            3: _vector(builder, [subgraph]),
            7: builder.CreateString(PARSER_VERSION),
        },
    )
    builder.Finish(root, IDENTIFIER)
    file.set_metadata(ENTRY, bytes(builder.Output()))
    if labels:
        file.files[LABELS_FILE] = "".join(f"{label}\n" for label in labels).encode()


def _image(builder: flatbuffers.Builder, name: str) -> int:
    """TensorMetadata of the picture: ImageProperties, NormalizationOptions and Stats."""
    properties = _table(builder, 2, {}, bytes_={0: _RGB})
    content = _table(builder, 3, {1: properties}, bytes_={0: _IMAGE_PROPERTIES})
    mean, std = _floats(builder, [0.0]), _floats(builder, [1.0])
    options = _table(builder, 2, {0: mean, 1: std})
    unit = _table(builder, 2, {1: options}, bytes_={0: _NORMALIZATION})
    highest, lowest = _floats(builder, [255.0]), _floats(builder, [0.0])
    stats = _table(builder, 2, {0: highest, 1: lowest})
    fields = {0: builder.CreateString(name), 3: content, 4: _vector(builder, [unit]), 5: stats}
    return _table(builder, 7, fields)


def _scores(builder: flatbuffers.Builder, name: str, labels: Sequence[str]) -> int:
    """TensorMetadata of an output; of class scores with the file that names the classes."""
    content = _table(builder, 3, {1: _table(builder, 1, {})}, bytes_={0: _FEATURE_PROPERTIES})
    fields = {0: builder.CreateString(name), 3: content}
    if labels:
        file_name = builder.CreateString(LABELS_FILE)
        fields[6] = _vector(builder, [_table(builder, 5, {0: file_name}, bytes_={2: _TENSOR_AXIS_LABELS})])
    return _table(builder, 7, fields)


def _table(
    builder: flatbuffers.Builder, fields: int, offsets: dict[int, int], *, bytes_: dict[int, int] | None = None
) -> int:
    """A table of `fields` fields: offsets of what was built before, and single bytes, by field number."""
    builder.StartObject(fields)
    for number, offset in offsets.items():
        builder.PrependUOffsetTRelativeSlot(number, offset, 0)
    for number, value in (bytes_ or {}).items():
        builder.PrependUint8Slot(number, value, 0)
    return builder.EndObject()


def _vector(builder: flatbuffers.Builder, offsets: Sequence[int]) -> int:
    builder.StartVector(4, len(offsets), 4)
    for offset in reversed(offsets):
        builder.PrependUOffsetTRelative(offset)
    return builder.EndVector()


def _floats(builder: flatbuffers.Builder, values: Sequence[float]) -> int:
    builder.StartVector(4, len(values), 4)
    for value in reversed(values):
        builder.PrependFloat32(value)
    return builder.EndVector()
