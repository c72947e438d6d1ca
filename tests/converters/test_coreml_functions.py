"""What coremltools' front end makes of torch's functions, as our export hands them to it, against torch itself.

A wrong conversion in silence would show here. All functions stand in one module, each with an output of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from converters.coreml_program import trace, write
from converters.mil import Program
from converters.signature import Signature, Size, TensorSpec

INPUTS = {"a": (2, 3, 4), "b": (2, 3, 4), "image": (1, 4, 6, 7), "positive": (2, 3, 4), "unit": (2, 3, 4)}
FUNCTIONS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    **{f"unary {name}": ("a", getattr(torch, name)) for name in (
        "abs", "atan", "ceil", "cos", "cosh", "erf", "exp", "exp2", "floor", "neg", "relu", "round", "sigmoid",
        "sign", "sin", "sinh", "square", "tan", "tanh", "trunc", "frac", "expm1", "reciprocal")},
    **{f"unary {name}": ("positive", getattr(torch, name)) for name in (
        "log", "log2", "log10", "log1p", "rsqrt", "sqrt")},
    **{f"unary {name}": ("unit", getattr(torch, name)) for name in ("acos", "asin", "atanh")},
    **{f"binary {name}": ("ab", getattr(torch, name)) for name in (
        "add", "sub", "mul", "div", "maximum", "minimum", "remainder", "floor_divide", "atan2")},
    "pow": ("positive b", torch.pow),
    "rsub": ("a", lambda a: 3 - a),
    "add with alpha": ("ab", lambda a, b: torch.add(a, b, alpha=-2)),
    "sub with alpha": ("ab", lambda a, b: torch.sub(a, b, alpha=3)),
    "rounded division": ("ab", lambda a, b: torch.div(a, b, rounding_mode="floor")),
    "truncated division": ("ab", lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "gelu": ("a", F.gelu),
    "gelu tanh": ("a", lambda a: F.gelu(3 * a, approximate="tanh")),
    "elu": ("a", lambda a: F.elu(a, 0.7)),
    "celu": ("a", lambda a: F.celu(a, 0.7)),
    "selu": ("a", F.selu),
    "silu": ("a", F.silu),
    "mish": ("a", F.mish),
    "softplus": ("a", lambda a: F.softplus(a, beta=2.0)),
    "softplus past its threshold": ("a", lambda a: F.softplus(40 * a)),
    "softsign": ("a", F.softsign),
    "softshrink": ("a", F.softshrink),
    "tanhshrink": ("a", F.tanhshrink),
    "hardswish": ("a", lambda a: F.hardswish(4 * a)),
    "hardsigmoid": ("a", lambda a: F.hardsigmoid(4 * a)),
    "hardtanh": ("a", lambda a: F.hardtanh(a, -0.3, 0.6)),
    "leaky relu": ("a", lambda a: F.leaky_relu(a, 0.2)),
    "relu6": ("a", lambda a: F.relu6(8 * a)),
    "glu": ("a", F.glu),
    "logsigmoid": ("a", F.logsigmoid),
    "threshold": ("a", lambda a: F.threshold(a, 0.2, 0.7)),
    "clamp": ("a", lambda a: a.clamp(-0.4, 0.3)),
    "clamp below": ("a", lambda a: a.clamp(min=0.1)),
    "softmax": ("a", lambda a: a.softmax(1)),
    "log softmax": ("a", lambda a: a.log_softmax(-1)),
    "where": ("ab", lambda a, b: torch.where(a > b, a, -b)),
    "masked fill": ("ab", lambda a, b: a.masked_fill(b > 0, -1e9).softmax(-1)),
    "sum": ("a", lambda a: a.sum((0, 2))),
    "mean": ("a", lambda a: a.mean(-1, keepdim=True)),
    "amax": ("a", lambda a: a.amax((1, 2))),
    "std": ("a", lambda a: a.std(-1)),
    "var of the population": ("a", lambda a: a.var(1, unbiased=False)),
    "norm": ("a", lambda a: a.norm(dim=-1)),
    "normalize": ("a", lambda a: F.normalize(a, dim=1)),
    "logsumexp": ("a", lambda a: a.logsumexp(1)),
    "argmax": ("a", lambda a: a.argmax(1).float()),
    "topk": ("a", lambda a: a.topk(2, dim=1).values),
    "sort": ("a", lambda a: a.sort(-1, descending=True).values),
    "cumsum": ("a", lambda a: a.cumsum(1)),
    "tril": ("a", lambda a: a.tril(1)),
    "triu": ("a", lambda a: a.triu(1)),
    "flip": ("a", lambda a: a.flip(1)),
    "roll": ("a", lambda a: a.roll((1, -2), (1, 2))),
    "repeat": ("a", lambda a: a.repeat(2, 1, 3)),
    "repeat interleave": ("a", lambda a: a.repeat_interleave(2, 1)),
    "expand": ("a", lambda a: a[:, :1].expand(2, 5, 4) * 2),
    "gather": ("a", lambda a: a.gather(1, torch.tensor([[[2, 0, 1, 1]], [[0, 2, 2, 1]]]))),
    "index": ("a", lambda a: a[:, torch.tensor([2, 0])]),
    "index of two": ("a", lambda a: a[:, torch.tensor([2, 0]), torch.tensor([1, 3])]),
    "index of two apart": ("a", lambda a: a[torch.tensor([1, 0]), :, torch.tensor([1, 3])]),
    "index select": ("a", lambda a: a.index_select(2, torch.tensor([3, 1]))),
    "strided slice": ("a", lambda a: a[:, ::2, 1:-1]),
    "written slice": ("ab", lambda a, b: _written(a, b)),
    "stack and unbind": ("ab", lambda a, b: torch.stack((a, b), 1).unbind(2)[1]),
    "chunk": ("a", lambda a: a.chunk(2, -1)[1]),
    "split": ("a", lambda a: a.split([1, 2], 1)[1]),
    "unfold": ("image", lambda x: F.unfold(x, (2, 3), padding=1, stride=2)),
    "pad": ("image", lambda x: F.pad(x, (1, 2, 0, 1), value=0.5)),
    "reflecting pad": ("image", lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect")),
    "replicating pad": ("image", lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate")),
    "max pool": ("image", lambda x: F.max_pool2d(x, 3, 2, 1)),
    "max pool with ceil": ("image", lambda x: F.max_pool2d(x, 2, 2, ceil_mode=True)),
    "average pool": ("image", lambda x: F.avg_pool2d(x, 3, 2, 1)),
    "average pool without padding": ("image", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    "average pool with ceil": ("image", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    "global pools": ("image", lambda x: F.adaptive_avg_pool2d(x, 1) + F.adaptive_max_pool2d(x, 1)),
    "adaptive pool": ("image", lambda x: F.adaptive_avg_pool2d(x, (3, 7))),
    "uneven adaptive pool": ("image", lambda x: F.adaptive_avg_pool2d(x, (4, 3))),
    "pixel shuffle": ("image", lambda x: F.pixel_shuffle(x, 2)),
    "pixel unshuffle": ("image", lambda x: F.pixel_unshuffle(x[..., :6], 2)),
    "channel shuffle": ("image", lambda x: F.channel_shuffle(x, 2)),
    "nearest": ("image", lambda x: F.interpolate(x, scale_factor=2)),
    "nearest to a size": ("image", lambda x: F.interpolate(x, (9, 11))),
    "smaller nearest": ("image", lambda x: F.interpolate(x, (4, 3))),
    "bilinear": ("image", lambda x: F.interpolate(x, (9, 11), mode="bilinear")),
    "bilinear on corners": ("image", lambda x: F.interpolate(x, (9, 11), mode="bilinear", align_corners=True)),
    "smaller bilinear": ("image", lambda x: F.interpolate(x, (3, 4), mode="bilinear")),
    "bicubic": ("image", lambda x: F.interpolate(x, (9, 11), mode="bicubic")),
    "smaller bicubic on corners": ("image", lambda x: F.interpolate(x, (4, 3), mode="bicubic", align_corners=True)),
    "sampled": ("image", lambda x: F.grid_sample(x, 1.1 * x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)),
    "group norm": ("image", lambda x: F.group_norm(x, 2)),
    "instance norm": ("image", F.instance_norm),
    "layer norm": ("a", lambda a: F.layer_norm(a, (3, 4))),
    "local response norm": ("image", lambda x: F.local_response_norm(x, 3, alpha=0.5)),
    "rms norm": ("a", lambda a: F.rms_norm(a, (4,))),
    "matmul": ("ab", lambda a, b: a @ b.mT),
    "einsum": ("ab", lambda a, b: torch.einsum("bij,bkj->bik", a, b)),
    "baddbmm": ("ab", lambda a, b: torch.baddbmm(a @ b.mT, a, b.mT, beta=0.5, alpha=2.0)),
    "outer": ("a", lambda a: torch.outer(a[0, 0], a[1, 1])),
    "attention": ("ab", lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None])),
    "causal attention": ("ab", lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None], is_causal=True)),
    "scaled attention": ("ab", lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None], scale=0.2)),
    "masked attention": ("ab", lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None], MASK)),
    "arange": ("a", lambda a: a + torch.arange(4) * 2),
    "new ones": ("ab", lambda a, b: a + b.new_ones((3, 1)) * b.new_full((4,), 2.0)),
    "difference": ("a", lambda a: a.diff(dim=1)),
    "lstm cell": ("a", lambda a: torch.lstm_cell(a[0], (a[1], a[1]), CELL[:, :4], CELL[:, 4:])[0]),
    "gru cell": ("a", lambda a: torch.gru_cell(a[0], a[1], CELL[:12, :4], CELL[:12, 4:])),
    "linspace": ("a", lambda a: a + torch.linspace(-1, 1, 4)),
    "one hot": ("a", lambda a: F.one_hot(a.argmax(-1), 4).float()),
    "embedding": ("ab", lambda a, b: F.embedding(a.argmax(-1), b[0].T)),
    "comparison as numbers": ("ab", lambda a, b: (a > b).float() + (a == a).int()),
    "logic": ("ab", lambda a, b: ((a > 0) & ~(b > 0) | (a > b)).float()),
}  # fmt: skip
CELL = torch.linspace(0, 99, 128).sin().reshape(16, 8)  # weights for the input and for the state
MASK = torch.tensor([[True, False, True], [False, True, True], [True, True, False]])


def _written(a: Tensor, b: Tensor) -> Tensor:
    c = a.clone()
    c[:, 1, 1:3] = b[:, 0, :2]
    return c


def arguments(names: str) -> list[str]:
    return list(names) if names in ("a", "b", "ab") else names.split()


class Every(nn.Module):
    """All functions, on inputs in the order of INPUTS."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = list(names)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(INPUTS, inputs, strict=True))
        chosen = (FUNCTIONS[name] for name in self.names)
        return tuple(function(*(named[item] for item in arguments(given))) for given, function in chosen)


def examples() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {name: torch.randn(shape, generator=generator) for name, shape in INPUTS.items()}
    return found | {"positive": found["positive"].abs() + 0.1, "unit": found["unit"].tanh()}


def converted(names: list[str], path, target: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """By function: what the saved program gives, and what torch gives."""
    module, inputs = Every(names), examples()
    expected = [y.numpy() for y in module(*inputs.values())]
    signature = Signature(
        tuple(TensorSpec(name, shape) for name, shape in INPUTS.items()),
        tuple(TensorSpec(f"y{i}", y.shape) for i, y in enumerate(expected)),
    )
    write(trace(module, signature, Size(()), 1), path, target=target, half=False)
    found = Program(path).run({name: x.numpy() for name, x in inputs.items()})
    return {name: (found[f"y{i}"], expected[i]) for i, name in enumerate(names)}


@pytest.fixture(scope="module", params=["ios16", "ios18"])
def results(request, tmp_path_factory) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return converted(list(FUNCTIONS), tmp_path_factory.mktemp("all") / "all.mlpackage", request.param)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_torch_keeps_its_meaning(results, name):
    found, expected = results[name]
    assert expected.std() > 0
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
