"""Core ML's recurrent layers, step by step. Sequences are (S, N, I), states (N, H)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from converters.mil_table import Function, op

Step = Callable[[Tensor, tuple[Tensor, ...]], tuple[Tensor, ...]]  # x (N, I), states → new states, the first is h
_ACTIVATIONS: dict[str, Function] = {
    "linear": lambda x: x,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


@op(
    "x",
    "initial_h",
    "initial_c",
    "weight_ih",
    "weight_hh",
    "bias?",
    "weight_ih_back?",
    "weight_hh_back?",
    "bias_back?",
)
def lstm(
    *,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    cell_activation: str = "tanh",
    activation: str = "tanh",
) -> Function:
    """Gates in the order input, forget, output, cell. Two directions have their states side by side."""
    gate, cell_gate, out = map(_activation, (recurrent_activation, cell_activation, activation))

    def step(weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None) -> Step:
        def run(x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            h, c = states
            i, f, o, z = _linear(x, weight_ih, h, weight_hh, bias).chunk(4, -1)
            c = gate(f) * c + gate(i) * cell_gate(z)
            return gate(o) * out(c), c

        return run

    def run(
        x: Tensor,
        h: Tensor,
        c: Tensor,
        weight_ih: Tensor,
        weight_hh: Tensor,
        bias: Tensor | None,
        weight_ih_back: Tensor | None,
        weight_hh_back: Tensor | None,
        bias_back: Tensor | None,
    ) -> tuple[Tensor, ...]:
        forward = step(weight_ih, weight_hh, bias)
        if direction != "bidirectional" or weight_ih_back is None or weight_hh_back is None:
            return _sequence(x, (h, c), forward, direction, output_sequence)
        half = h.shape[-1] // 2
        one = _sequence(x, (h[:, :half], c[:, :half]), forward, "forward", output_sequence)
        back = step(weight_ih_back, weight_hh_back, bias_back)
        two = _sequence(x, (h[:, half:], c[:, half:]), back, "reverse", output_sequence)
        return tuple(torch.cat(pair, -1) for pair in zip(one, two, strict=True))

    return run


@op("x", "initial_h", "weight_ih", "weight_hh", "bias?", "input_bias?")
def gru(
    *,
    direction: str = "forward",
    output_sequence: bool = False,
    recurrent_activation: str = "sigmoid",
    activation: str = "tanh",
    reset_after: bool = False,
) -> Function:
    """Gates in the order reset, output, update. With `reset_after` the reset gate takes W_ho h + b_ho as a whole."""
    gate, out = _activation(recurrent_activation), _activation(activation)

    def run(
        x: Tensor, h: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None, input_bias: Tensor | None
    ) -> tuple[Tensor, ...]:
        hidden = h.shape[-1]
        inner = torch.zeros(3 * hidden) if bias is None else bias
        outer = torch.zeros(3 * hidden) if input_bias is None else input_bias

        def step(x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (h,) = states
            xr, xo, xz = (x @ weight_ih.T + outer).chunk(3, -1)
            br, bo, bz = inner.chunk(3)
            wr, wo, wz = weight_hh.chunk(3)
            r, z = gate(xr + h @ wr.T + br), gate(xz + h @ wz.T + bz)
            o = out(xo + (r * (h @ wo.T + bo) if reset_after else (r * h) @ wo.T + bo))
            return ((1 - z) * o + z * h,)

        return _sequence(x, (h,), step, direction, output_sequence)

    return run


@op("x", "initial_h", "weight_ih", "weight_hh", "bias?")
def rnn(*, direction: str = "forward", output_sequence: bool = False, activation: str = "tanh") -> Function:
    out = _activation(activation)

    def run(x: Tensor, h: Tensor, weight_ih: Tensor, weight_hh: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        def step(x: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (out(_linear(x, weight_ih, states[0], weight_hh, bias)),)

        return _sequence(x, (h,), step, direction, output_sequence)

    return run


def _activation(name: str) -> Function:
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"activation {name!r}")
    return _ACTIVATIONS[name]


def _linear(x: Tensor, weight_ih: Tensor, h: Tensor, weight_hh: Tensor, bias: Tensor | None) -> Tensor:
    y = x @ weight_ih.T + h @ weight_hh.T
    return y if bias is None else y + bias


def _sequence(
    x: Tensor, states: tuple[Tensor, ...], step: Step, direction: str, output_sequence: bool
) -> tuple[Tensor, ...]:
    """Every h (or the last alone, as a sequence of one), then the last states."""
    if direction not in ("forward", "reverse"):
        raise NotImplementedError(f"direction {direction!r}")
    outputs = []
    for row in x if direction == "forward" else x.flip(0):
        states = step(row, states)
        outputs.append(states[0])
    if not output_sequence:
        outputs = outputs[-1:]
    elif direction == "reverse":
        outputs.reverse()
    return (torch.stack(outputs), *states)
