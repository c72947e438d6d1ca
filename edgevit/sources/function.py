"""`python:MODULE:FUNCTION`: a module that a function of the user's returns, with example inputs."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from converters.errors import EdgeVitError, first_line
from converters.infer import infer_signature
from converters.signature import Signature
from edgevit.sources.library import examples_of
from edgevit.sources.source import Source, weights_sha256


def function_source(name: str) -> Source:
    """`name`: `MODULE:FUNCTION`, importable from the current folder.

    The function takes nothing and returns (module, example_inputs) or (module, example_inputs, signature): a
    `torch.nn.Module` with its weights, a tensor, tuple or dict of tensors as in `infer_signature`, and a
    `converters.signature.Signature` where that cannot be found by running.

    Raises EdgeVitError, with file and line, for what goes wrong in it.
    """
    module_name, _, function_name = name.partition(":")
    where = f"python:{name}"
    if not module_name or not function_name:
        raise EdgeVitError(f"{where}: write python:MODULE:FUNCTION, such as python:my_models:small")
    function = _find(where, module_name, function_name)
    try:
        result = function()
    except EdgeVitError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code raises whatever it likes
        raise _users_error(where, error) from error
    if not isinstance(result, tuple | list) or len(result) not in (2, 3):
        raise EdgeVitError(
            f"{where}: must return (module, example_inputs) or (module, example_inputs, signature), "
            f"not {_described(result)}"
        )
    module, examples = result[:2]
    try:
        found = infer_signature(module, examples)
    except EdgeVitError as error:
        raise EdgeVitError(f"{where}: {error}") from error
    signature = result[2] if len(result) == 3 else found
    if not isinstance(signature, Signature):
        raise EdgeVitError(f"{where}: the third thing must be a converters.signature.Signature")
    if len(signature.inputs) != len(found.inputs):
        raise EdgeVitError(
            f"{where}: its signature has {len(signature.inputs)} inputs, its example inputs are {len(found.inputs)}"
        )
    return Source(
        module=module.eval(),
        name=f"{module_name.rpartition('.')[2]}_{function_name}",
        signature=signature,
        preprocessing=None,
        labels=(),
        sha256=weights_sha256(module),
        examples=examples_of(signature, _in_order(examples, found)),
    )


def _find(where: str, module_name: str, function_name: str) -> Callable[[], Any]:
    folder = os.getcwd()
    if folder not in sys.path:  # stays: worker processes import the module again
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.split(".")[: error.name.count(".") + 1] == error.name.split("."):
            raise EdgeVitError(f"{where}: there is no module {module_name} to import from {folder}") from error
        raise _users_error(where, error) from error
    except (Exception, SystemExit) as error:  # as above
        raise _users_error(where, error) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise EdgeVitError(
            f"{where}: {module_name} has no function {function_name}; it has {', '.join(names) or 'none'}"
        )
    return function


def _users_error(where: str, error: BaseException) -> EdgeVitError:
    """One line, with the last place outside installed packages: that is where the user looks."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if "site-packages" not in f.filename and not _ours(f.filename) and f.filename[0] != "<"]
    place = ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}, line {error.lineno}: "
    elif theirs:
        place = f"{theirs[-1].filename}, line {theirs[-1].lineno}: "
    said = first_line(error)
    kind = type(error).__name__
    return EdgeVitError(f"{where}: {place}{kind}" + (f": {said}" if said != kind else ""))


def _ours(filename: str) -> bool:
    """Whether a frame is of this file or of the import machinery, which every error passes through."""
    return filename in (__file__, importlib.__file__)


def _in_order(examples: object, signature: Signature) -> list[Tensor]:
    if isinstance(examples, Tensor):
        return [examples]
    if isinstance(examples, Mapping):
        return [examples[spec.name] for spec in signature.inputs]
    return list(examples)  # type: ignore[call-overload]


def _described(result: object) -> str:
    if isinstance(result, nn.Module):
        return "a module alone"
    return f"{len(result)} things" if isinstance(result, tuple | list) else f"a {type(result).__name__}"
