"""What a person reads: one HTML page, and its Markdown twin, from a store of measurements."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from converters.artifact import written_beside
from converters.errors import EdgeVitError
from profiles.report.choose import choose
from profiles.report.data import read_sections
from profiles.report.page import Entry, render_html, render_markdown
from profiles.store import Store


@dataclass(frozen=True)
class Report:
    """Both texts, and the sentences that say what to ship, one a device."""

    html: str
    markdown: str
    sentences: tuple[str, ...]


def make_report(
    store: Store, *, title: str | None = None, budget_ms: float | None = None, commands: Sequence[str] = ()
) -> Report:
    """The report of everything in `store`, as text.

    `budget_ms` is the latency to stay within; `commands` are shown under "How to reproduce". Raises EdgeVitError when
    the store is empty or the budget is not a positive number.
    """
    if budget_ms is not None and not 0 < budget_ms < float("inf"):
        raise EdgeVitError(f"budget of {budget_ms} ms: write a positive number of milliseconds, such as 20")
    entries = [Entry(section, choose(section, budget_ms)) for section in read_sections(store)]
    title = title or _title(entries)
    commands = [*(commands or _commands(store)), *_profile_commands(entries)]
    return Report(
        render_html(title, entries, commands),
        render_markdown(title, entries, commands),
        tuple(entry.choice.sentence for entry in entries),
    )


def write_report(
    store: Store,
    out_html: Path,
    *,
    title: str | None = None,
    budget_ms: float | None = None,
    commands: Sequence[str] = (),
) -> tuple[Path, Path]:
    """Writes `make_report` to `out_html` and to a `.md` file beside it, and returns both paths.

    Raises EdgeVitError when the store is empty or a file cannot be written; then neither file is left half-written.
    """
    return save_report(make_report(store, title=title, budget_ms=budget_ms, commands=commands), out_html)


def save_report(report: Report, out_html: Path) -> tuple[Path, Path]:
    """Writes a made report: `out_html`, and the Markdown twin of the same stem."""
    out_markdown = out_html.with_suffix(".md")
    if out_html.suffix.lower() not in (".html", ".htm"):
        raise EdgeVitError(f"{out_html}: the report is a page; name it .html (its Markdown twin is written beside it)")
    for path in (out_html, out_markdown):
        if path.is_dir():
            raise EdgeVitError(f"{path}: a folder; name a file, such as {path.with_name('report.html')}")
    with written_beside(out_html) as html, written_beside(out_markdown) as markdown:
        html.write_text(report.html, encoding="utf-8")
        markdown.write_text(report.markdown, encoding="utf-8")
    return out_html, out_markdown


def _title(entries: Sequence[Entry]) -> str:
    models = dict.fromkeys(model for entry in entries for model in entry.section.models)
    devices = dict.fromkeys(entry.section.device_name for entry in entries)
    where = next(iter(devices)) if len(devices) == 1 else f"{len(devices)} devices"
    return f"{', '.join(models)} on {where}"


def _commands(store: Store) -> list[str]:
    run = shlex.quote(str(store.path.parent))
    return [f"edgevit sweep {run}", f"edgevit report {run}"]


def _profile_commands(entries: Sequence[Entry]) -> list[str]:
    """The picked figure measured again, alone."""
    commands = []
    for entry in entries:
        if (row := entry.choice.row) and entry.section.is_this_machine:
            size = ["--size", row.size] if row.size != "fixed" else []
            commands.append(shlex.join(["edgevit", "profile", row.path, *size, "--threads", str(row.threads)]))
    return commands
