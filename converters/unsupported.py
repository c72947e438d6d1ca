"""What a converter could not convert, in one line: the operation, the module that calls it, and the user's own line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import torch

from converters.errors import EdgeVitError, first_line

_TORCH = str(Path(torch.__file__).parent)
_CONVERTERS = str(Path(__file__).parent)
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]+(?:\n\s+([^\n]+))?')
# Where the exceptions of torch.export come from.
_TRACERS = ("torch._dynamo", "torch._export", "torch.export", "torch.fx.experimental")
# What torch.export says of a dimension that was meant to be symbolic and is a number in the module.
_BAKED = re.compile(
    r"marked (?:\d+\*)?(\w+) as dynamic but your code specialized it to be a constant|[Nn]ot all values of (\w+) ?="
)
# What the MLIR passes say of an operation that they know and TFLite does not.
_LEGALIZE = re.compile(r"failed to legalize operation '([^']+)'")


def unsupported(error: BaseException, form: str) -> EdgeVitError | None:
    """One line for an exception out of torch.export or a converter to `form`; None where it is about no operation.

    The operation is the graph node that was being converted when `error` was raised; the module and the source line
    are those that torch.export recorded with it.
    """
    causes = list(_chain(error))
    if any(isinstance(cause, OSError | MemoryError) for cause in causes):
        return None
    for cause in reversed(causes):
        node = _node_of(cause.__traceback__)
        if node is not None:
            return EdgeVitError(f"{form} cannot convert {_operation(node)}{_where(node)}; {_REMEDY}")
        if (match := _LEGALIZE.search(str(cause))) is not None:
            return EdgeVitError(f"{form} cannot convert {match[1]}{_named_in(str(cause))}; {_REMEDY}")
        if type(cause).__module__.startswith(_TRACERS):
            return untraceable(cause)
    return None


def untraceable(error: BaseException) -> EdgeVitError:
    """One line for a module that torch.export cannot trace: what it says, and the user's line that it happened in."""
    if isinstance(error, EdgeVitError):
        return error
    line = _source(str(error)) or _line_of(error.__traceback__)
    if (match := _BAKED.search(str(error))) is not None:
        return baked(next(name for name in match.groups() if name), line)
    return EdgeVitError(f"torch.export cannot trace the module: {_plain(error)}{line}")


def baked(name: str, line: str = "") -> EdgeVitError:
    """For a dimension of that name that is a number in the module where a file should take any."""
    remedy = "--batch 1" if name == "batch" else "--static, or with one size"
    return EdgeVitError(
        f"the module works for a single {name.removesuffix('_units')} only{line}; export it with {remedy}"
    )


def own_path(path: str) -> str:
    """A submodule's path in the user's model: the converters' wrappers call what they wrap `module`."""
    while path == "module" or path.startswith("module."):
        path = path.removeprefix("module").removeprefix(".")
    return path


def refuse_large(module: torch.nn.Module, form: str) -> None:
    """Raises EdgeVitError for more weights than one file of `form` holds; their formats count in 32 bits."""
    size_bytes = sum(tensor.numel() * tensor.element_size() for tensor in (*module.parameters(), *module.buffers()))
    if size_bytes > LARGEST_BYTES:
        raise EdgeVitError(
            f"{form}: weights of {size_bytes / 2**30:.1f} GiB; one file holds {LARGEST_BYTES / 2**30:.1f} GiB"
        )


LARGEST_BYTES = 2**31 - 2**26  # what protobuf and flatbuffers can address, less room for the graph
_REMEDY = "replace it in the model, or leave this format out"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what caused it, outermost first."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or current.__context__


def _node_of(traceback: TracebackType | None) -> torch.fx.Node | None:
    """The node that the deepest frame of a converter was working on: converters keep it in a local of that name."""
    found = None
    while traceback is not None:
        node = traceback.tb_frame.f_locals.get("node")
        if isinstance(node, torch.fx.Node) and node.op == "call_function":
            found = node
        traceback = traceback.tb_next
    return found


def _operation(node: torch.fx.Node) -> str:
    """`aten.median.dim`, whatever torch prints in front of it."""
    return str(node.target).removeprefix("torch.ops.")


def _where(node: torch.fx.Node) -> str:
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    path = own_path(modules[-1]) if modules else ""
    inside = f" in module '{path}'" if path else ""
    return inside + _source(node.meta.get("stack_trace") or "")


def _source(text: str) -> str:
    """The last line of the user's own in a printed stack trace: `, called at model.py:31 (torch.median(x))`."""
    for file, line, code in reversed(_FRAME.findall(text)):
        if not file.startswith((_TORCH, _CONVERTERS)):
            return f", called at {file}:{line}" + (f" ({code.strip()})" if code else "")
    return ""


def _line_of(traceback: TracebackType | None) -> str:
    """As `_source`, from a live traceback."""
    found = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith((_TORCH, _CONVERTERS, "<")) and "litert_torch" not in file:
            found = f", called at {file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return found


def _named_in(message: str) -> str:
    """The source line in an MLIR location, where the message has one: `"/path/model.py":31:0`."""
    match = re.search(r'"([^"]+\.py)":(\d+)', message)
    return f", called at {match[1]}:{match[2]}" if match else ""


def _plain(error: BaseException) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", first_line(error)).rstrip(". ")
