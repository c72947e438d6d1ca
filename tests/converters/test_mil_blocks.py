"""Programs with nested blocks, as coremltools' own builder writes them, against the same in Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 (its own documentation's name)
from coremltools.converters.mil.mil import types

from converters.mil import Program

VECTOR, NUMBER = mb.TensorSpec(shape=(3,)), mb.TensorSpec(shape=(1,), dtype=types.int32)


def saved(body: Callable, path: Path, *inputs: mb.TensorSpec) -> Program:
    program = mb.program(input_specs=list(inputs), opset_version=ct.target.iOS16)(body)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=ct.target.iOS16,
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(path))
    return Program(path)


def scalar(n):
    return mb.squeeze(x=n, axes=[0])


def test_a_condition_takes_one_of_two_blocks(tmp_path):
    def body(x, n):
        scaled = mb.mul(x=x, y=2.0)  # both blocks see what stands outside
        chosen, other = mb.cond(
            pred=mb.greater(x=scalar(n), y=0),
            _true_fn=lambda: (mb.add(x=scaled, y=10.0), mb.sub(x=x, y=1.0)),
            _false_fn=lambda: (mb.mul(x=scaled, y=mb.add(x=x, y=1.0)), mb.identity(x=scaled)),
        )
        return mb.add(x=chosen, y=scaled, name="y"), mb.identity(x=other, name="z")

    program = saved(body, tmp_path / "cond.mlpackage", VECTOR, NUMBER)
    x = np.float32([1, -2, 3.5])
    for n in (3, 0, 1, -1):
        found = program.run({"x": x, "n": np.int32([n])})
        expected = (2 * x + 10 + 2 * x, x - 1) if n > 0 else (2 * x * (x + 1) + 2 * x, 2 * x)
        assert [found["y"].tolist(), found["z"].tolist()] == [item.tolist() for item in expected]


def test_conditions_nest(tmp_path):
    def body(x, n):
        inner = lambda: mb.cond(  # noqa: E731
            pred=mb.less(x=scalar(n), y=5), _true_fn=lambda: mb.add(x=x, y=5.0), _false_fn=lambda: mb.add(x=x, y=50.0)
        )
        chosen = mb.cond(pred=mb.greater(x=scalar(n), y=0), _true_fn=inner, _false_fn=lambda: mb.identity(x=x))
        return mb.mul(x=chosen, y=-1.0, name="y")

    program = saved(body, tmp_path / "nested.mlpackage", VECTOR, NUMBER)
    x = np.float32([1, -2, 3.5])
    for n, offset in ((-3, 0), (2, 5), (9, 50)):
        assert program.run({"x": x, "n": np.int32([n])})["y"].tolist() == (-(x + offset)).tolist()


def loop(x, n):
    """`n` times: x, total ← x · 0.5 + 1, total + x. Swapped, and with values of outside read inside."""
    step = mb.mul(x=x, y=0.25)

    def condition(i, a, total):
        return mb.less(x=i, y=scalar(n))

    def turn(i, a, total):
        return mb.add(x=i, y=1), mb.add(x=mb.mul(x=a, y=0.5), y=step), mb.add(x=total, y=a)

    i, a, total = mb.while_loop(_cond=condition, _body=turn, loop_vars=(0, x, mb.mul(x=x, y=0.0)))
    return mb.identity(x=a, name="a"), mb.identity(x=total, name="total"), mb.expand_dims(x=i, axes=[0], name="turns")


def looped(x: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray, int]:
    a, total, step = x, 0 * x, x * np.float32(0.25)
    for _ in range(n):
        a, total = a * np.float32(0.5) + step, total + a
    return a, total, max(n, 0)


def test_a_loop_runs_as_long_as_its_condition_holds(tmp_path):
    program = saved(loop, tmp_path / "loop.mlpackage", VECTOR, NUMBER)
    x = np.float32([1, -2, 3.5])
    for n in (0, 1, 2, 7, -1):
        found = program.run({"x": x, "n": np.int32([n])})
        a, total, turns = looped(x, n)
        np.testing.assert_allclose(found["a"], a, rtol=1e-6)
        np.testing.assert_allclose(found["total"], total, rtol=1e-6)
        assert found["turns"] == [turns]


def test_a_loops_ops_are_seen_once_a_turn_and_its_range_is_the_largest(tmp_path):
    program = saved(loop, tmp_path / "loop.mlpackage", VECTOR, NUMBER)
    x, n = np.float32([1, -2, 3.5]), 4
    inputs = {"x": x, "n": np.int32([n])}
    kinds = [kind for _, kind, _ in program.values(inputs)]
    assert kinds.count("less") == n + 1
    halves = [array for _, kind, array in program.values(inputs) if kind == "mul"]
    assert len(halves) == 2 + n  # two outside the loop
    largest = max(abs(looped(x, turn)[0]).max() for turn in range(1, n + 1))
    sums = [name for name, kind, array in program.values(inputs) if kind == "add" and array.dtype == np.float32]
    assert program.ranges(inputs)[sums[0]] == np.float32(largest)


def test_loops_nest_and_variables_change_places(tmp_path):
    """Fibonacci's numbers by swapping, in a loop that counts in a loop: F(2n) of x's own start."""

    def body(x, n):
        def outer(i, a, b):
            _j, a, b = mb.while_loop(
                _cond=lambda j, a, b: mb.less(x=j, y=2),
                _body=lambda j, a, b: (mb.add(x=j, y=1), mb.identity(x=b), mb.add(x=a, y=b)),
                loop_vars=(0, a, b),
            )
            return mb.add(x=i, y=1), a, b

        _, a, b = mb.while_loop(
            _cond=lambda i, a, b: mb.less(x=i, y=scalar(n)), _body=outer, loop_vars=(0, mb.identity(x=x), x)
        )
        return mb.identity(x=a, name="a"), mb.identity(x=b, name="b")

    program = saved(body, tmp_path / "fibonacci.mlpackage", VECTOR, NUMBER)
    x = np.float32([1, 2, -1])
    for n in (0, 1, 5):
        a = b = x
        for _ in range(2 * n):
            a, b = b, a + b
        found = program.run({"x": x, "n": np.int32([n])})
        assert (found["a"].tolist(), found["b"].tolist()) == (a.tolist(), b.tolist())
