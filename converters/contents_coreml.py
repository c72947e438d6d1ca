"""What a Core ML package holds: its functions with nested blocks, its weights each once, and all of its files."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from converters.artifact import METADATA_KEY, artifact_files
from converters.contents import Contents, Function, Node, Shape, Value, Weight
from converters.coreml import MAIN, parse_specification, specification_file
from converters.errors import EdgeVitError, first_line
from converters.quiet import quiet

with quiet():
    from coremltools.proto import FeatureTypes_pb2, MIL_pb2

BLOB_HEADER, BLOB_SENTINEL = struct.Struct("<IIQQ"), 0xDEADBEEF
SPECIFICATIONS = {6: "iOS 15", 7: "iOS 16", 8: "iOS 17", 9: "iOS 18"}
# `p_module_stem_weight_to_fp16`: how coremltools writes the name of a parameter; dots are lost.
_PARAMETER = re.compile(r"(?:p_|b_)?(?:(?:named|module)_)*(.+?)_(?:weight|bias)(?:_.*)?")


def read(path: Path) -> Contents:
    """Raises EdgeVitError when `path` is no Core ML package with an ML program, or its weights were cut short."""
    _check_manifest(path)
    spec = parse_specification(specification_file(path), path)
    try:
        return _contents(path, spec)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise EdgeVitError(f"{path}: a damaged Core ML package ({first_line(error)})") from error


def _contents(path: Path, spec: Any) -> Contents:
    description = spec.description
    described = {item.name: item for item in description.functions} or {MAIN: description}
    weights: dict[object, Weight] = {}
    default = description.defaultFunctionName or MAIN
    order = [default, *described, *spec.mlProgram.functions]  # a protobuf map has none
    functions = []
    for name in dict.fromkeys(name for name in order if name in spec.mlProgram.functions):
        item = spec.mlProgram.functions[name]
        block = item.block_specializations.get(item.opset)
        if block is None:
            raise EdgeVitError(f"{path}: a damaged Core ML package: function '{name}' has no block")
        features = described.get(name) or (description if len(spec.mlProgram.functions) == 1 else None)
        functions.append(_function(name, item, block, features))
        for operation in _operations(block):
            _collect(operation, weights, path)
    properties = dict(description.metadata.userDefined)
    version = spec.specificationVersion
    return Contents(
        path=path,
        format="coreml",
        producer=f"coremltools {properties.get('com.github.apple.coremltools.version', '')}".strip(),
        functions=tuple(functions),
        weights=tuple(weights.values()),
        files=tuple(artifact_files(path)),
        artifact_text=properties.pop(METADATA_KEY, None),
        metadata=properties,
        labels=_labels(spec),
        target=f"specification {version} ({SPECIFICATIONS.get(version, 'newer than iOS 18')})",
    )


def _check_manifest(path: Path) -> None:
    try:
        items = json.loads((path / "Manifest.json").read_text())["itemInfoEntries"]
    except FileNotFoundError as error:
        raise EdgeVitError(f"{path}: not a Core ML package: it has no Manifest.json") from error
    except (ValueError, KeyError, TypeError) as error:
        raise EdgeVitError(f"{path}: a damaged Core ML package: Manifest.json cannot be read") from error
    if not items:
        raise EdgeVitError(f"{path}: a damaged Core ML package: Manifest.json names no files")


def _function(name: str, function: Any, block: Any, features: Any) -> Function:
    types = {item.name: _typed(item) for item in function.inputs}
    constants: set[str] = set()
    nodes = []
    for operation in _operations(block):
        outputs = tuple(_typed(item, operation.type == "const") for item in operation.outputs)
        types |= {value.name: value for value in outputs}
        if operation.type == "const":
            constants |= {value.name for value in outputs}
            continue
        taken = [binding.name for given in operation.inputs.values() for binding in given.arguments]
        inputs = tuple(types[taken_name] for taken_name in taken if taken_name in types)
        if operation.type.startswith("constexpr_"):
            constants |= {value.name for value in outputs}
        layer = next((layer_of(value.name) for value in inputs if value.name in constants and layer_of(value.name)), "")
        label = outputs[0].name if outputs else operation.type
        nodes.append(Node(operation.type, label, inputs, outputs, layer))
    states = tuple(_feature(item) for item in features.state) if features is not None else ()
    if features is None:
        inputs, outputs = tuple(types[item.name] for item in function.inputs), tuple(types[n] for n in block.outputs)
    else:
        inputs, outputs = (tuple(_feature(item) for item in side) for side in (features.input, features.output))
    return Function(name, inputs, outputs, tuple(nodes), states)


def layer_of(name: str) -> str:
    """`p_module_stem_weight_to_fp16` → `stem`; "" for names that are no parameter's."""
    match = _PARAMETER.fullmatch(name)
    return match[1] if match else ""


def _operations(block: Any) -> Iterator[Any]:
    for operation in block.operations:
        yield operation
        for inner in operation.blocks:
            yield from _operations(inner)


def _typed(named: Any, constant: bool = False) -> Value:
    kind = named.type.WhichOneof("type")
    if kind == "stateType":
        return Value(named.name, *_tensor(named.type.stateType.wrappedType.tensorType), note="state")
    if kind != "tensorType":
        return Value(named.name, None, kind or "", constant)
    return Value(named.name, *_tensor(named.type.tensorType), constant)


def _tensor(tensor: Any) -> tuple[Shape, str]:
    shape = tuple(
        item.constant.size if item.WhichOneof("dimension") == "constant" else None for item in tensor.dimensions
    )
    return shape, MIL_pb2.DataType.Name(tensor.dataType).lower()


def _feature(item: Any) -> Value:
    """An input, output or state as the app sees it."""
    kind = item.type.WhichOneof("Type")
    if kind == "imageType":
        image = item.type.imageType
        colour = FeatureTypes_pb2.ImageFeatureType.ColorSpace.Name(image.colorSpace)
        return Value(item.name, (image.height, image.width), "uint8", note=f"image {colour}")
    if kind in ("multiArrayType", "stateType"):
        array = item.type.multiArrayType if kind == "multiArrayType" else item.type.stateType.arrayType
        dtype = FeatureTypes_pb2.ArrayFeatureType.ArrayDataType.Name(array.dataType).lower()
        flexible = array.WhichOneof("ShapeFlexibility")
        note = {"enumeratedShapes": "enumerated shapes", "shapeRange": "range of shapes"}.get(flexible or "", "")
        shape: Shape = tuple(array.shape)
        if flexible == "shapeRange":
            ranges = [(size.lowerBound, size.upperBound) for size in array.shapeRange.sizeRanges]
            shape = tuple(low if low == high else None for low, high in ranges)
        return Value(item.name, shape, dtype, note=note)
    return Value(item.name, None, (kind or "").removesuffix("Type"))


def _labels(spec: Any) -> tuple[str, ...]:
    """The class labels that the program's classify op names."""
    for function in spec.mlProgram.functions.values():
        for block in function.block_specializations.values():
            constants = {op.outputs[0].name: op for op in block.operations if op.type == "const" and op.outputs}
            for operation in block.operations:
                if operation.type == "classify":
                    binding = operation.inputs["classes"].arguments[0]
                    value = (
                        binding.value
                        if binding.WhichOneof("binding") == "value"
                        else (constants[binding.name].attributes["val"] if binding.name in constants else None)
                    )
                    if value is not None:
                        return tuple(value.immediateValue.tensor.strings.values)
    return ()


def _collect(operation: Any, weights: dict[object, Weight], path: Path) -> None:
    """Adds the numeric constants of an op: those in the weight file by place, those in the program by content."""
    values = [(operation.outputs[0].name, operation.attributes["val"])] if operation.type == "const" else []
    if operation.type.startswith("constexpr_"):
        values = [(f"{operation.outputs[0].name}.{key}", value) for key, value in operation.attributes.items()]
        values = [(key, value) for key, value in values if not key.endswith(".name")]
    values += [
        (f"{operation.type}.{argument}", binding.value)
        for argument, given in operation.inputs.items()
        for binding in given.arguments
        if binding.WhichOneof("binding") == "value"
    ]
    compression = operation.type if operation.type.startswith("constexpr_") else ""
    for name, value in values:
        if value.type.WhichOneof("type") != "tensorType":
            continue
        shape, dtype = _tensor(value.type.tensorType)
        if dtype in ("string", "bool"):
            continue
        count = 1
        for length in shape:
            count *= length or 0
        if value.WhichOneof("value") == "blobFileValue":
            blob = value.blobFileValue
            key: object = (blob.fileName, blob.offset)
            if key not in weights:
                _check_blob(path, blob.fileName, blob.offset)
        else:
            key = hashlib.sha256(value.SerializeToString()).digest()
        weights.setdefault(key, Weight(name, dtype, count, compression))


def _check_blob(path: Path, name: str, offset: int) -> None:
    """Raises EdgeVitError when the weight file does not hold the blob whole. A name's folder is never followed."""
    file = path / "Data" / "com.apple.CoreML" / "weights" / Path(name).name
    if not file.is_file():
        raise EdgeVitError(f"{path}: a damaged Core ML package: its weights {Path(name).name} are missing")
    size = file.stat().st_size
    with file.open("rb") as stream:
        stream.seek(min(offset, size))
        header = stream.read(BLOB_HEADER.size)
    if len(header) == BLOB_HEADER.size:
        sentinel, _, length, start = BLOB_HEADER.unpack(header)
        if sentinel == BLOB_SENTINEL and start + length <= size:
            return
    raise EdgeVitError(f"{path}: a damaged Core ML package: its weights {Path(name).name} were cut short")
