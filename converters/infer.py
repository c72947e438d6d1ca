"""The signature of a module that nobody described: found by running it on its examples and on others like them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from converters.errors import EdgeVitError, first_line
from converters.signature import Dim, Meaning, Signature, TensorSpec
from converters.wrap import flat_outputs

# Steps by which a picture may grow, the first that the module takes. Coarse ones come first: a network whose maps
# halve five times is exported with fewer special cases at multiples of 32. 14 and 7 are patches of vision transformers.
STEPS = (32, 16, 8, 4, 2, 1, 14, 7)
FAR = 64  # pixels, about: by which a picture must be able to grow
SAME_ROW = 1e-3  # of the output's largest value: how far a row may move when another example joins the batch

Tensors = dict[str, Tensor]


def infer_signature(
    module: nn.Module,
    example_inputs: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    meanings: Mapping[str, Meaning] | None = None,
    dynamic: bool = True,
) -> Signature:
    """Names, shapes, dtypes and meaning of what `module` (put into eval mode) takes and returns.

    `example_inputs` are forward's first arguments: a tensor, a sequence, or a dict by name. Inputs are called as in
    forward; outputs by the keys of a dict, else `output` or `output_0`, …, nested ones as in `converters.wrap`. A
    floating-point (N, 3, H, W) is an image, integers (N, L) are tokens, booleans and what is called a mask are masks;
    the only (N, C) of an image model is called `logits`. `meanings` says otherwise, by name.

    The first dimension is the batch where the module gives every example the same result in a larger batch. An image's
    `height` and `width` can change where the module runs at other sizes, square and not, in multiples of the first of
    STEPS that it takes; else their range is the example's size alone. Tokens without an image have a dimension
    `tokens` where other lengths run. With `dynamic` False all sizes are the example's.

    Raises EdgeVitError for what is no module, one of 16-bit numbers, inputs that are no tensors or that it cannot take,
    and for outputs without a tensor.
    """
    if not isinstance(module, nn.Module):
        raise EdgeVitError(f"a torch.nn.Module is needed, not a {type(module).__name__}")
    if name := _short({**dict(module.named_parameters()), **dict(module.named_buffers())}):
        raise EdgeVitError(f"the module holds {name}; call .float() on it: precision is chosen when a file is written")
    inputs = _by_name(module, example_inputs)
    if name := _short(inputs):
        raise EdgeVitError(f"the example inputs hold {name}; call .float() on it: files take float32")
    probe = _Probe(module.eval(), inputs, {name: _input_meaning(name, x) for name, x in inputs.items()})
    try:
        outputs = flat_outputs(probe.call(inputs))
    except Exception as error:  # a stranger's module raises whatever it likes
        raise EdgeVitError(f"the module fails on the example inputs: {first_line(error)}") from error
    if not outputs:
        raise EdgeVitError("the module returns no tensor on the example inputs, so there is nothing to export")
    if strange := [name for name, x in (inputs | outputs).items() if x.is_complex()]:
        raise EdgeVitError(f"'{strange[0]}' is complex, which no format has; take its real and imaginary parts")
    if name := _short(outputs):
        raise EdgeVitError(f"the module returns {name}; call .float() on it: files give float32")
    symbols = _Symbols.none(inputs, outputs)
    if probe.batched(outputs):
        symbols = symbols.batch()
    if probe.image is not None:
        symbols = _image_symbols(probe, symbols, dynamic)
    elif probe.tokens is not None and dynamic:
        symbols = _token_symbols(probe, symbols)
    return _described(probe, symbols, outputs, dict(meanings or {}))


@dataclass(frozen=True)
class _Symbols:
    """Shapes by name, in which symbolic dimensions have replaced numbers one by one."""

    inputs: dict[str, tuple[int | str, ...]]
    outputs: dict[str, tuple[int | str, ...]]
    dims: tuple[Dim, ...] = ()

    @classmethod
    def none(cls, inputs: Tensors, outputs: Tensors) -> _Symbols:
        def shapes(tensors: Tensors) -> dict[str, tuple[int | str, ...]]:
            return {name: tuple(x.shape) for name, x in tensors.items()}

        return cls(shapes(inputs), shapes(outputs))

    def batch(self) -> _Symbols:
        inputs, outputs = (
            {name: ("batch", *shape[1:]) for name, shape in shapes.items()} for shapes in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)


@dataclass(frozen=True)
class _Probe:
    """The module with its example inputs, run on variants of them."""

    module: nn.Module
    inputs: Tensors
    meanings: dict[str, Meaning]

    @property
    def image(self) -> Tensor | None:
        return next((self.inputs[name] for name, meaning in self.meanings.items() if meaning == "image"), None)

    @property
    def tokens(self) -> Tensor | None:
        return next((self.inputs[name] for name, meaning in self.meanings.items() if meaning == "tokens"), None)

    def call(self, inputs: Tensors) -> object:
        with torch.inference_mode():
            return self.module(*inputs.values())

    def shapes(self, inputs: Tensors) -> dict[str, tuple[int, ...]] | None:
        """Of the outputs; None where the module fails, or returns what is not finite."""
        try:
            outputs = flat_outputs(self.call(inputs))
        except Exception:  # whatever it raises, the answer is that it cannot take these
            return None
        finite = all(bool(y.isfinite().all()) for y in outputs.values() if y.is_floating_point())
        return {name: tuple(y.shape) for name, y in outputs.items()} if finite else None

    def batched(self, outputs: Tensors) -> bool:
        """Whether a larger batch, with other examples in it, leaves the first examples' results as they are."""
        tensors = [*self.inputs.values(), *outputs.values()]
        if any(x.ndim == 0 for x in tensors) or len({len(x) for x in tensors}) != 1:
            return False
        count = len(tensors[0])
        try:
            larger = flat_outputs(self.call({name: torch.cat([x, x.flip(-1)]) for name, x in self.inputs.items()}))
        except Exception:  # as above
            return False
        return larger.keys() == outputs.keys() and all(
            larger[name].shape == (2 * count, *y.shape[1:]) and _close(larger[name][:count], y)
            for name, y in outputs.items()
        )

    def sized(self, height: int, width: int) -> Tensors:
        """The inputs with the image, and what has its height and width, resized."""
        return {
            name: _resized(x, height, width) if axes else x
            for (name, x), axes in zip(self.inputs.items(), self.picture_like, strict=True)
        }

    @property
    def picture_like(self) -> list[bool]:
        """For each input, whether it ends in the image's height and width."""
        sides = self.image.shape[-2:] if self.image is not None else None
        return [x.ndim >= 3 and x.shape[-2:] == sides for x in self.inputs.values()]

    def lengthened(self, length: int) -> Tensors:
        """The inputs with `length` tokens, and what has as many, repeated or cut."""
        return {
            name: x.index_select(1, torch.arange(length) % x.shape[1]) if like else x
            for (name, x), like in zip(self.inputs.items(), self.token_like, strict=True)
        }

    @property
    def token_like(self) -> list[bool]:
        """For each input, whether its second dimension is that of the tokens."""
        length = self.tokens.shape[1] if self.tokens is not None else None
        return [x.ndim >= 2 and x.shape[1] == length for x in self.inputs.values()]


def _by_name(module: nn.Module, example_inputs: object) -> Tensors:
    """The examples by the names of forward's first arguments, in their order."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_ended = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    examples = (example_inputs,) if isinstance(example_inputs, Tensor) else example_inputs
    if isinstance(examples, Mapping):
        found = {str(name): x for name, x in examples.items()}
        expected = names[: len(found)]
        if open_ended and not names:
            expected = list(found)
        if set(found) != set(expected):
            raise EdgeVitError(
                f"the example inputs are {', '.join(found) or 'none'}, forward's first arguments are "
                f"{', '.join(expected) or 'none'}; give these, or wrap the module so that it takes what you have"
            )
        found = {name: found[name] for name in expected}
    elif isinstance(examples, Sequence) and not isinstance(examples, str):
        if open_ended:
            names += [f"input_{number}" for number in range(len(names), len(examples))]
        if len(examples) > len(names):
            raise EdgeVitError(f"{len(examples)} example inputs, but forward takes {len(names)}")
        found = dict(zip(names, examples, strict=False))
    else:
        raise EdgeVitError(f"example inputs are tensors, in a tuple or a dict, not a {type(examples).__name__}")
    if not found:
        raise EdgeVitError("at least one example input is needed")
    for name, x in found.items():
        if not isinstance(x, Tensor):
            raise EdgeVitError(f"example input '{name}' must be a tensor, not a {type(x).__name__}")
    return found


def _image_symbols(probe: _Probe, symbols: _Symbols, dynamic: bool) -> _Symbols:
    """Height and width, in the inputs always; in the outputs where they may change."""
    image = cast(Tensor, probe.image)
    height, width = image.shape[-2:]
    inputs = {
        name: (*shape[:-2], "height", "width") if like else shape
        for (name, shape), like in zip(symbols.inputs.items(), probe.picture_like, strict=True)
    }
    for step in STEPS if dynamic else ():
        if height % step or width % step:
            continue
        # A step that is smaller than a patch may change nothing, so a larger one must do too.
        far = step * -(-FAR // step)
        found = [_at(probe, symbols, height + more, width + 2 * more) for more in dict.fromkeys((step, far))]
        named = found[0]
        if named is None or any(other != named for other in found):
            continue
        smallest = _smallest(probe, step, min(height, width))
        dims = tuple(Dim(name, minimum=smallest, multiple_of=step) for name in ("height", "width"))
        return replace(symbols, inputs=inputs, outputs=named, dims=dims)
    dims = (Dim("height", height, height), Dim("width", width, width))
    return replace(symbols, inputs=inputs, dims=dims)


def _at(probe: _Probe, symbols: _Symbols, height: int, width: int) -> dict[str, tuple[int | str, ...]] | None:
    """Shapes of the outputs where they follow the picture's sides, which differ, so that it is clear which is which."""
    return _changed(symbols.outputs, probe.shapes(probe.sized(height, width)), {height: "height", width: "width"})


def _smallest(probe: _Probe, step: int, largest: int) -> int:
    """The smallest square that the module takes: one step, two, four, … or the example's own."""
    side = step
    while side < largest:
        if probe.shapes(probe.sized(side, side)) is not None:
            return side
        side *= 2
    return largest


def _token_symbols(probe: _Probe, symbols: _Symbols) -> _Symbols:
    """A dimension `tokens` where another length runs; its range is what was seen to run."""
    length = cast(Tensor, probe.tokens).shape[1]
    shorter, longer = length // 2, 2 * length
    found = {n: _changed(symbols.outputs, probe.shapes(probe.lengthened(n)), {n: "tokens"}) for n in (shorter, longer)}
    named = found[longer] or found[shorter]
    if shorter < 1 or named is None:
        return symbols
    inputs = {
        name: (shape[0], "tokens", *shape[2:]) if like else shape
        for (name, shape), like in zip(symbols.inputs.items(), probe.token_like, strict=True)
    }
    dim = Dim("tokens", 1 if found[shorter] else length, None if found[longer] else length)
    return replace(symbols, inputs=inputs, outputs=named, dims=(dim,))


def _changed(
    before: dict[str, tuple[int | str, ...]], after: dict[str, tuple[int, ...]] | None, names: dict[int, str]
) -> dict[str, tuple[int | str, ...]] | None:
    """`before` with every number that is another one `after` replaced by its name; None where it has none.

    A map that has a quarter of the picture's height has no name, so such a model keeps one size.
    """
    if after is None or after.keys() != before.keys():
        return None
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name, old in before.items():
        if len(old) != len(after[name]):
            return None
        pairs = list(zip(old, after[name], strict=True))
        if any(isinstance(was, int) and was != now and now not in names for was, now in pairs):
            return None
        shapes[name] = tuple(was if isinstance(was, str) or was == now else names[now] for was, now in pairs)
    return shapes


def _described(probe: _Probe, symbols: _Symbols, outputs: Tensors, meanings: dict[str, Meaning]) -> Signature:
    inputs = [
        TensorSpec(name, shape, _dtype(probe.inputs[name]), meanings.pop(name, probe.meanings[name]))
        for name, shape in symbols.inputs.items()
    ]
    described = []
    for name, shape in symbols.outputs.items():
        meaning = _output_meaning(name, outputs[name], alone=len(outputs) == 1 and probe.image is not None)
        called = "logits" if meaning == "logits" and name == "output" else name
        described.append(TensorSpec(called, shape, _dtype(outputs[name]), meanings.pop(called, meaning)))
    if meanings:
        known = ", ".join(spec.name for spec in (*inputs, *described))
        raise EdgeVitError(f"meanings: there is no input or output '{next(iter(meanings))}'; there are {known}")
    if wrong := next((s for s in (*inputs, *described) if s.meaning not in get_args(Meaning)), None):
        raise EdgeVitError(f"meaning '{wrong.meaning}' of {wrong.name}: choose from {', '.join(get_args(Meaning))}")
    return Signature(tuple(inputs), tuple(described), symbols.dims)


def _input_meaning(name: str, x: Tensor) -> Meaning:
    if x.dtype == torch.bool or "mask" in name:
        return "mask"
    if x.is_floating_point():
        return "image" if x.ndim == 4 and x.shape[1] == 3 else "values"
    return "tokens" if x.ndim == 2 else "values"


def _output_meaning(name: str, y: Tensor, *, alone: bool) -> Meaning:
    if y.dtype == torch.bool:
        return "mask"
    if y.is_floating_point():
        if (alone and y.ndim == 2) or (re.search(r"(^|_)logits$", name) and y.ndim in (2, 3)):
            return "logits"
        if "box" in name and y.shape[-1:] == (4,):
            return "boxes"
    return "values"


def _resized(x: Tensor, height: int, width: int) -> Tensor:
    """(…, H, W) of any dtype at another size."""
    if x.is_floating_point():
        return interpolate(x, (height, width), mode="bilinear") if x.ndim == 4 else _nearest(x, height, width)
    return _nearest(x, height, width)


def _nearest(x: Tensor, height: int, width: int) -> Tensor:
    rows, columns = (torch.arange(n) * old // n for n, old in zip((height, width), x.shape[-2:], strict=True))
    return x[..., rows, :][..., columns]


def _close(a: Tensor, b: Tensor) -> bool:
    if not b.is_floating_point() or not b.numel():
        return bool((a == b).all())
    return bool(((a - b).abs() <= SAME_ROW * b.abs().max()).all())


def _short(tensors: Tensors) -> str:
    """The first floating-point tensor of fewer than 32 bits, with its dtype; "" where there is none."""
    short = ((name, x) for name, x in tensors.items() if x.is_floating_point() and x.element_size() < 4)
    return next((f"'{name}' in {_dtype(x)}" for name, x in short), "")


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
