"""What the tests of the Core ML evaluator's ops share: a case, and running all cases of a file in one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813 (its own documentation's name)
from coremltools.converters.mil.mil import Function, types
from coremltools.converters.mil.mil import Program as MilProgram

from converters.mil import Program

RNG = np.random.default_rng(0)
OPSETS = {"ios16": ct.target.iOS16, "ios17": ct.target.iOS17, "ios18": ct.target.iOS18}
INPUT_TYPES = {"float32": types.fp32, "int32": types.int32}


@dataclass(frozen=True)
class Case:
    """`tensors` are the program's inputs (a list for `values`), `constants` the op's other arguments."""

    op: str
    tensors: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    expected: Callable[..., np.ndarray] | None = None  # of the tensors; None: coremltools' value inference
    opset: str = "ios16"

    def __str__(self) -> str:
        plain = {name: value for name, value in self.constants.items() if not isinstance(value, np.ndarray)}
        return " ".join([self.op, *(f"{name}={value}" for name, value in plain.items())])


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-3, 4, size=shape).astype(np.int32)


def listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def saved_program(cases: dict[str, Case], opset: str, folder: Any) -> Program:
    """One program with an input for each tensor of each case, and an output `CASE_I` for each result.

    Single numbers go in as (1,), and truth values go in and out as fp32, since programs take and give nothing else.
    """
    fed = {
        f"{key}_{name}_{i}": array
        for key, case in cases.items()
        for name, value in case.tensors.items()
        for i, array in enumerate(listed(value))
    }
    specs = {
        name: mb.placeholder(array.shape or (1,), INPUT_TYPES.get(array.dtype.name, types.fp32))
        for name, array in fed.items()
    }
    with Function(specs, opset_version=OPSETS[opset]) as function:
        outputs = []
        for key, case in cases.items():
            arguments = dict(case.constants)
            for name, value in case.tensors.items():
                given = [function.inputs[f"{key}_{name}_{i}"] for i in range(len(listed(value)))]
                if not listed(value)[0].shape:
                    given = [mb.squeeze(x=var, axes=[0]) for var in given]
                if listed(value)[0].dtype == bool:
                    given = [mb.cast(x=var, dtype="bool") for var in given]
                arguments[name] = given if isinstance(value, list) else given[0]
            for i, var in enumerate(listed(getattr(mb, case.op)(**arguments))):
                dtype = "fp32" if var.dtype in (types.bool, types.fp16) else "int32" if types.is_int(var.dtype) else ""
                outputs.append(mb.cast(x=var, dtype=dtype or "fp32", name=f"{key}_{i}"))
        function.set_outputs(outputs)
    program = MilProgram()
    program.add_function("main", function)
    model = ct.convert(
        program,
        convert_to="mlprogram",
        minimum_deployment_target=OPSETS[opset],
        compute_precision=ct.precision.FLOAT32,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    path = folder / f"{opset}.mlpackage"
    model.save(str(path))
    return Program(path)


def value_inference(case: Case) -> list[np.ndarray]:
    """What coremltools' numpy implementation of the op gives for constant inputs."""
    with Function({}, opset_version=OPSETS[case.opset]):
        tensors = {  # copies, since the inference of some ops works in place
            name: [array.copy() for array in value] if isinstance(value, list) else value.copy()
            for name, value in case.tensors.items()
        }
        results = [var.val for var in listed(getattr(mb, case.op)(**tensors, **case.constants))]
    assert all(value is not None for value in results), f"{case.op} has no value inference: state what is expected"
    return results


def computed(cases: Sequence[Case], folder: Path) -> dict[str, np.ndarray]:
    """Every case's outputs under `c{index}_{output}`, as the saved programs compute them."""
    found: dict[str, np.ndarray] = {}
    for opset in OPSETS:
        chosen = {f"c{i}": case for i, case in enumerate(cases) if case.opset == opset}
        if not chosen:
            continue
        fed = {
            f"{key}_{name}_{i}": np.atleast_1d(array.astype("float32") if array.dtype == bool else array)
            for key, case in chosen.items()
            for name, value in case.tensors.items()
            for i, array in enumerate(listed(value))
        }
        found |= saved_program(chosen, opset, folder).run(fed)
    return found


def check(case: Case, index: int, results: dict[str, np.ndarray]) -> None:
    """Compares a case's outputs with its `expected`, else with coremltools' own implementation of the op."""
    if case.expected is None:
        expected = value_inference(case)
    else:
        constants = {name: case.constants[name] for name in ("weight", "bias") if name in case.constants}
        expected = listed(case.expected(*case.tensors.values(), **constants))
    names = [name for name in results if name.startswith(f"c{index}_")]
    assert len(names) == len(expected)
    for i, array in enumerate(expected):
        found = results[f"c{index}_{i}"]
        assert found.shape == np.shape(array)
        varies = np.std(np.float64(array)) > 0 or np.size(array) == 1 or case.op.startswith("fill")
        assert varies, "a case whose output is constant proves little"
        np.testing.assert_allclose(found, np.float64(array), rtol=1e-5, atol=2e-6)
