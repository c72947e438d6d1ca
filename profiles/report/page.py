"""The HTML page and its Markdown twin, from the same sections, choices and table."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from profiles.report import charts, text
from profiles.report.choose import Choice
from profiles.report.data import Row, Section

FRONT = "The line is the Pareto front: nothing measured here is both faster and more accurate than a file on it."


@dataclass(frozen=True)
class Entry:
    """A device's section with what was chosen in it."""

    section: Section
    choice: Choice

    @property
    def heading(self) -> str:
        batch = f", batch {self.section.batch}" if self.section.batch != 1 else ""
        return f"{self.section.device_name}{batch}"

    @property
    def notes(self) -> list[str]:
        """What a reader must know before believing the sentence."""
        return [
            note for note in (_busy(self), _failures(self), _unranked(self), _resolution(self), _untimed(self)) if note
        ]

    def standing(self, row: Row) -> str:
        """The last column: `ship`, `front`, or how the measurement went."""
        if row is self.choice.row:
            return "ship"
        return "front" if row in self.choice.front else text.STATUS[row.status]

    def cells(self, row: Row) -> list[tuple[str, text.Column]]:
        """A row's cells up to the last column; timings that do not exist or do not count are left out."""
        return [(column.value(row), column) for column in text.COLUMNS if row.is_timed or not column.is_timing]

    @property
    def checkpoint(self) -> str:
        return ", ".join(f"{text.percent(item.value)} % at {size}" for size, item in self.section.checkpoint)


def render_html(title: str, entries: Sequence[Entry], commands: Sequence[str]) -> str:
    """One self-contained page: styles and charts inline, no script, nothing fetched."""
    drawn = [_charts(entry, f"device-{index + 1}") for index, entry in enumerate(entries)]
    return _template().render(title=title, entries=list(zip(entries, drawn, strict=True)), commands=commands, text=text)


def render_markdown(title: str, entries: Sequence[Entry], commands: Sequence[str]) -> str:
    """The page's words and table, without the charts."""
    lines = [f"# {escape_markdown(title)}", ""]
    for entry in entries:
        section, choice = entry.section, entry.choice
        if len(entries) > 1:
            lines += [f"## {escape_markdown(entry.heading)}", ""]
        lines += [f"**{escape_markdown(choice.sentence)}**", "", escape_markdown(choice.rule), ""]
        lines += [f"- {escape_markdown(note)}" for note in entry.notes] + [""]
        if section.data:
            lines += [f"Accuracy on {escape_markdown(section.data)}; Δ against the checkpoint at the same size.", ""]
        if entry.checkpoint:
            lines += [f"Checkpoint: {escape_markdown(entry.checkpoint)}.", ""]
        lines += [*_markdown_table(entry), ""]
        lines += ["### Machine and protocol", "", f"- device: {escape_markdown(section.device_id)}"]
        if section.os_build:
            lines.append(f"- OS build: {escape_markdown(section.os_build)}")
        lines += [f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in section.circumstances]
        lines += [f"- measurement protocol: version {section.protocol_version}, batch {section.batch}", ""]
    if len(entries) > 1:
        lines += [text.NEVER_TOGETHER, ""]
    lines += ["## How to reproduce", ""] + [f"    {command}" for command in commands]
    return "\n".join(lines) + "\n"


def escape_markdown(words: str) -> str:
    """Words as they are, whatever Markdown or HTML they may hold; an underscore inside a word means nothing."""
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    words = re.sub(r"([\\`*\[\]|~#!])", r"\\\1", words)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", words)


def _markdown_table(entry: Entry) -> list[str]:
    titles = [column.title for column in text.COLUMNS] + ["Status"]
    marks = ["---:" if column.is_figure else "---" for column in text.COLUMNS] + ["---"]
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(marks)}|"]
    for row in entry.section.rows:
        cells = [escape_markdown(words) for words, _ in entry.cells(row)]
        missing = [text.NOTHING] * (len(text.COLUMNS) - len(cells))
        status = ": ".join(filter(None, (entry.standing(row) if row.status != "not_run" else "", text.reason(row))))
        lines.append(f"| {' | '.join(cells + missing + [escape_markdown(status)])} |")
    return lines


@dataclass(frozen=True)
class _Drawing:
    """A chart in its two widths, with a heading, what it shows in words, and a legend (a sample and a name each)."""

    heading: str
    finding: str
    pictures: tuple[Markup, ...]
    legend: tuple[tuple[Markup, str], ...]


def _charts(entry: Entry, name: str) -> list[_Drawing]:
    """The section's charts. One without data is left out."""
    rows, styles = entry.section.rows, charts.make_styles(entry.section.rows)
    ranked, timed = [row for row in rows if row.is_ranked], [row for row in rows if row.is_timed]
    counted = [row for row in timed if row.ms_per_gflop]

    def draw(heading: str, finding: str, chart: Callable[[str], str], shown: list[Row]) -> _Drawing:
        drawn = {charts.series_of(row) for row in shown}
        legend = tuple((Markup(charts.legend_key(s)), s.label) for series, s in styles.items() if series in drawn)
        return _Drawing(heading, finding, tuple(Markup(chart(kind)) for kind in charts.WIDTHS), legend)

    drawings = []
    if ranked:
        chart = partial(charts.accuracy_chart, ranked, entry.choice, styles, name=f"{name}-accuracy")
        drawings.append(draw("Accuracy against latency", FRONT, chart, ranked))
    if timed:
        chart = partial(charts.size_chart, timed, styles, name=f"{name}-size")
        drawings.append(draw("Latency by size", _growth(timed), chart, timed))
    if counted:
        chart = partial(charts.flops_chart, counted, styles, name=f"{name}-flops")
        drawings.append(draw("FLOPs against latency", _misprediction(counted), chart, counted))
    return drawings


def _growth(rows: Sequence[Row]) -> str:
    """What the fastest series pays for its largest size."""
    lines: dict[object, list[Row]] = {}
    for row in rows:
        lines.setdefault(charts.series_of(row), []).append(row)
    line = min(lines.values(), key=lambda line: (-len(line), _latency(line[0])))
    first, last = min(line, key=_latency), max(line, key=_latency)
    bars = "Bars are 95 % intervals of the median over fresh processes."
    if first is last:
        return bars
    spent = f"{text.milliseconds_of(first)} at {first.size} and {text.milliseconds_of(last)} at {last.size}"
    ratio = text.times(_latency(last) / _latency(first))
    return f"{first.file} on {text.threads(first.threads)} takes {spent}: {ratio}. {bars}"


def _misprediction(rows: Sequence[Row]) -> str:
    """How far a forecast from FLOPs alone would be off, on the fewest threads."""
    fewest = min(row.threads for row in rows)
    single = sorted((row for row in rows if row.threads == fewest), key=lambda row: row.ms_per_gflop or 0)
    low, high = single[0], single[-1]
    cheap, dear = low.ms_per_gflop or 1.0, high.ms_per_gflop or 1.0
    if low is high:
        return f"A GFLOP costs {text.number(cheap)} ms."
    return (
        f"On {text.threads(fewest)} a GFLOP costs from {text.number(cheap)} ms ({low.file} at {low.size}) to "
        f"{text.number(dear)} ms ({high.file} at {high.size}): a forecast from FLOPs alone is off by up to "
        f"{text.times(dear / cheap)}. Along a dotted line a GFLOP costs the same."
    )


def _busy(entry: Entry) -> str:
    timed = [row for row in entry.section.rows if row.is_timed and row.wall_per_cpu is not None]
    busy = [row for row in timed if row.was_busy]
    if not timed:
        return ""
    worst = max(row.wall_per_cpu or 0.0 for row in timed)
    if not busy:
        return f"The machine was quiet: wall over CPU time was at most {text.number(worst)}."
    return (
        f"The machine was busy: {len(busy)} of {len(timed)} measurements waited for a core (wall over CPU time up to "
        f"{text.number(worst)}; near 1 or below when quiet), so latencies are too high. Measure again on a quiet one."
    )


def _failures(entry: Entry) -> str:
    rows = entry.section.rows
    wrong = sum(row.status == "wrong_on_device" for row in rows)
    failed = sum(row.status == "failed" for row in rows)
    parts = [f"{failed} failed"] if failed else []
    parts += [f"{wrong} gave a wrong output on this device and cannot be recommended"] if wrong else []
    return f"{' and '.join(parts)}; the table says why." if parts else ""


def _unranked(entry: Entry) -> str:
    missing = [row for row in entry.section.rows if row.is_timed and not row.accuracy]
    if not missing or not entry.choice.front:
        return ""
    verb = "has" if len(missing) == 1 else "have"
    return f"{text.counted(len(missing), 'timed row')} {verb} no accuracy yet: in the table, but not ranked."


def _resolution(entry: Entry) -> str:
    """How small a difference the held-out images can show, by the interval's own half width."""
    ranked = [
        row.accuracy for row in entry.section.rows if row.is_ranked and row.accuracy and row.accuracy.interval.is_known
    ]
    if not ranked:
        return ""
    half = max(50 * (item.interval.high - item.interval.low) for item in ranked)
    n = min(item.n for item in ranked)
    return f"Accuracy is known to within ±{half:.1f} points (n={n:,}); smaller differences are not evidence."


def _untimed(entry: Entry) -> str:
    rows = [row for row in entry.section.rows if row.status == "not_run"]
    reasons = dict.fromkeys(f"{text.format_name(row.format)}: {text.reason(row)}" for row in rows)
    return f"{'; '.join(reasons)}." if reasons else ""


def _latency(row: Row) -> float:
    assert row.latency_ms
    return row.latency_ms.value


def _breakable(name: str) -> Markup:
    """A file name that may wrap after `_`, `-` and `.` in a narrow column."""
    return Markup("").join(escape(part) + Markup("<wbr>") * bool(part) for part in re.split(r"(?<=[_.-])", name))


def _unbroken(words: str) -> str:
    """Keeps a figure and its unit on one line."""
    return re.sub(r"(?<=\d) (?=(?:ms|MB|%|points?|threads?)(?!\w))|(?<=%) (?=CI)", "\N{NO-BREAK SPACE}", words)


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("profiles.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"breakable": _breakable, "unbroken": _unbroken}
    return environment.get_template("template.html.j2")
