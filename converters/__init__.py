"""Any `nn.Module` and its signature in; ONNX, TFLite and Core ML files out, each run and compared before it is named.

Importing this package imports nothing heavy: `converters.export` loads its module when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from converters.pipeline import export

__all__ = ["export"]


def __getattr__(name: str) -> Any:
    if name == "export":
        from converters.pipeline import export

        return export
    raise AttributeError(f"module 'converters' has no attribute '{name}'")
