"""Where a file may fall off an accelerator: warnings with the layer and the source of each rule, never verdicts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from converters.contents import Contents, read_contents

SHOWN = 3  # names on a finding's line; `layers` holds them all


@dataclass(frozen=True)
class Finding:
    """One rule's complaint about one file. `layers` are PyTorch modules' paths where the file's names carry them."""

    rule: str
    message: str
    layers: tuple[str, ...]
    source: str  # where the rule comes from: an address, a package and its version, or "observed: …"
    severity: str = "warning"

    @property
    def line(self) -> str:
        if not self.layers:
            return f"{self.rule}: {self.message}"
        shown = ", ".join(self.layers[:SHOWN])
        more = f" and {len(self.layers) - SHOWN} more" if len(self.layers) > SHOWN else ""
        return f"{self.rule}: {self.message}: {shown}{more}"


def lint(path: Path | str) -> list[Finding]:
    """Findings for any `.onnx`, `.tflite` or `.mlpackage`, one per rule and message. Runs nothing.

    Raises EdgeVitError as `read_contents` does. docs/lint.md explains each rule.
    """
    return lint_contents(read_contents(path))


def lint_contents(contents: Contents) -> list[Finding]:
    """The findings for a file that was read already."""
    from converters.lint_rules import RULES

    findings = []
    for rule in RULES:
        if contents.format not in rule.formats:
            continue
        layers: dict[str, list[str]] = defaultdict(list)
        for message, layer in rule.check(contents):
            if layer and layer not in layers[message]:
                layers[message].append(layer)
            layers[message]  # a message without a layer counts too
        findings += [Finding(rule.name, message, tuple(names), rule.source) for message, names in layers.items()]
    return findings
