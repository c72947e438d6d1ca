"""The page and its Markdown twin: complete, self-contained, escaped, well-formed, free of NaN."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from markdown_it import MarkdownIt
from report_store import CORE_ML_REASON, N, add_accuracy, artifact, cell, make_store, sha256, summary, timed

from converters.errors import EdgeVitError
from edgevit.cli import main
from profiles.report import make_report, write_report
from profiles.report.data import read_sections
from profiles.report.scales import Box, linear, logarithmic, place_label, text_box
from profiles.store import AccuracyKey, Measurement, Metric, Store

VOID = {"meta", "wbr", "br", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Tags with attributes, words of tables by row, and whether every element is closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.rows, self.open, self.cells = [], [], [], None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, words):
        if {"td", "th"} & set(self.open) and "small" not in self.open:
            self.rows[-1][-1] += words


def markdown_rows(markdown):
    """Cells of every table row, as a CommonMark parser with tables reads them."""
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    rows = []
    for index, token in enumerate(tokens):
        if token.type == "tr_open":
            rows.append([])
        elif token.type in ("td_open", "th_open"):
            children = tokens[index + 1].children
            assert {child.type for child in children} <= {"text", "text_special"}, "Markdown in a cell"
            rows[-1].append("".join(child.content for child in children))
    return rows


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("db") / "runs.db")


@pytest.fixture(scope="module")
def report(store):
    return make_report(store)


@pytest.fixture(scope="module")
def page(report):
    return Page(report.html)


def svgs(html):
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def test_every_row_is_in_both_twins_with_the_same_words(store, report, page):
    rows = [row for section in read_sections(store) for row in section.rows]
    html, markdown = (
        [row for row in found if row[0] != "File"] for found in (page.rows, markdown_rows(report.markdown))
    )
    assert len(html) == len(markdown) == len(rows) == 21
    for row, in_html, in_markdown in zip(rows, html, markdown, strict=True):
        assert in_html[:5] == in_markdown[:5]
        assert in_html[0] == row.file
        assert in_html[3] == row.size
        if row.is_timed:
            assert in_html == in_markdown
        else:
            assert row.reason in in_html
            assert row.reason in in_markdown[-1]
            assert "ms" not in in_html[8]


def test_an_untimed_core_ml_row_shows_its_accuracy_and_why(report, page):
    row = next(row for row in page.rows if row[0] == "mobilevit_xxs-64.mlpackage")
    assert row[6:] == ["98.1 (96.0–99.1)", "0.0", CORE_ML_REASON, "not timed"]
    assert f"| {CORE_ML_REASON} |" in report.markdown


def test_a_wrong_output_shows_no_latency(page):
    row = next(row for row in page.rows if row[0] == "mobilevit_xxs-int8.tflite")
    assert row[-2:] == ["golden output missed by 3.1 std", "wrong on device"]
    assert "0.0100" not in " ".join(row)


def test_nothing_is_fetched_and_nothing_runs(report, page):
    for tag, attributes in page.tags:
        assert tag not in ("script", "link", "iframe", "object", "embed", "img", "base")
        for name, value in attributes.items():
            assert not name.startswith("on")
            assert name not in ("src", "srcset", "action", "data") or not value
            assert name not in ("href", "xlink:href") or value.startswith("#")
    assert "http" not in report.html
    assert "url(" not in report.html
    assert "@import" not in report.html


def test_the_page_is_closed_and_its_ids_are_unique(page):
    assert page.open == []
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert ("html", {"lang": "en"}) in page.tags
    assert [tag for tag, _ in page.tags].count("h1") == 1


def test_charts_are_well_formed_described_and_inside_their_frame(report):
    charts = [svg for svg in svgs(report.html) if svg.get("role") == "img"]
    assert len(charts) == 12  # three charts, two widths, two devices
    for svg in charts:
        _, _, width, height = map(float, svg.get("viewBox").split())
        names = svg.get("aria-labelledby").split()
        assert [child.get("id") for child in list(svg)[:2]] == names
        assert all(child.text for child in list(svg)[:2])
        for words in svg.iter("text"):
            box = text_box(words.text, float(words.get("x")), float(words.get("y")), words.get("text-anchor"))
            assert box.is_inside(Box(-4, 0, width + 4, height)), words.text


def test_labels_never_overlap(report):
    for svg in svgs(report.html):
        boxes = [
            text_box(words.text, float(words.get("x")), float(words.get("y")), words.get("text-anchor"))
            for words in svg.iter("text")
            if words.get("class").split()[0] in ("label", "cost", "tick")
        ]
        assert not any(a.hits(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_a_mark_stands_where_its_figures_say(report):
    """The y axis read back from its ticks gives each mark's accuracy."""
    svg = next(svg for svg in svgs(report.html) if "Accuracy against" in (svg.findtext("title") or ""))
    ticks = [
        (float(t.text), float(t.get("y")) - 4)
        for t in svg.iter("text")
        if t.get("text-anchor") == "end" and t.get("class") == "tick"
    ]
    (low, y_low), (high, y_high) = ticks[0], ticks[-1]
    assert low < high
    assert y_low > y_high  # more accurate is further up
    shown = 0
    for group in svg.iter("g"):
        share = float(re.search(r": ([\d.]+) %", group.findtext("title"))[1])
        y = _middle(group.findall("path")[-1].get("d"))
        assert low + (y - y_low) / (y_high - y_low) * (high - low) == pytest.approx(share, abs=0.3)
        shown += 1
    assert shown == 12


def _middle(path):
    if "a5" in path:  # a circle starts at its left
        return float(path.split("a")[0].split()[1])
    ys = [float(pair.split()[1]) for pair in path[1:-1].split("L")]
    return sum(ys) / len(ys)


def test_names_from_files_are_escaped_everywhere(tmp_path):
    nasty = "<script>alert(1)</script>|*x*_y_`z`\"'&amp;[a](b)\n\x00\u202e.onnx"
    store = Store(tmp_path / "runs.db")
    timed(store, nasty, "64", "onnx", 2.0, machine={"cpu": "<img src=x onerror=alert(1)>"})
    add_accuracy(store, sha256(nasty), "64", 350)
    report = make_report(store)
    page = Page(report.html)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    clean = nasty.replace("\n", "\ufffd").replace("\x00", "\ufffd").replace("\u202e", "\ufffd")
    assert page.rows[-1][0] == clean
    assert markdown_rows(report.markdown)[-1][0] == clean
    assert len(markdown_rows(report.markdown)[-1]) == len(markdown_rows(report.markdown)[0])
    assert "<script>" not in MarkdownIt("commonmark").enable("table").render(report.markdown)
    assert all(svgs(report.html))


def test_no_nan_and_no_none_whatever_the_runner_left_out(tmp_path):
    store = Store(tmp_path / "runs.db")
    holes = summary(2.0) | {
        "p99_ms": float("nan"),
        "median_high_ms": float("inf"),
        "wall_per_cpu": None,
        "load_ms": "x",
    }
    store.add_measurement(
        Measurement(cell("a.onnx", "64", "onnx"), "ok", artifact("a.onnx", "64", "onnx"), "", [], holes)
    )
    store.add_measurement(Measurement(cell("b.onnx", "64", "onnx"), "ok", {}, "", [], {"median_ms": float("nan")}))
    store.add_measurement(
        Measurement(cell("c.onnx", "fixed", "onnx"), "ok", {"flops": None}, "", [], {"median_ms": 1.0})
    )
    report = make_report(store)
    words = report.markdown + re.sub(r"<style>.*</style>", "", report.html, flags=re.DOTALL)
    assert not re.search(r"\b(nan|inf|None|null)\b", words, re.IGNORECASE)


def test_a_busy_machine_is_named_and_a_quiet_one_too(tmp_path, report):
    store = Store(tmp_path / "runs.db")
    timed(store, "a.onnx", "64", "onnx", 2.0, busy=2.31)
    timed(store, "a.onnx", "96", "onnx", 4.0, busy=1.0)
    busy = make_report(store)
    for words in (busy.html, busy.markdown):
        assert "The machine was busy: 1 of 2 measurements waited for a core" in words
        assert "2.31" in words
    assert "The machine was quiet: wall over CPU time was at most 1.01" in report.markdown


def test_only_figures_on_one_set_of_images_are_compared(tmp_path):
    """Two files on the full split, one of them also on a small subset where it looks perfect."""
    store = Store(tmp_path / "runs.db")
    for name, correct in (("a.onnx", 300), ("b.onnx", 340)):
        timed(store, name, "64", "onnx", 2.0)
        add_accuracy(store, sha256(name), "64", correct)
    add_accuracy(store, sha256("a.onnx"), "64", N, split="test[:360]")
    shown = {row.file: row.accuracy.value for row in read_sections(store)[0].rows}
    assert shown == {"a.onnx": pytest.approx(300 / N), "b.onnx": pytest.approx(340 / N)}


def test_accuracy_on_another_accelerator_does_not_count_for_a_timed_row(tmp_path):
    store = Store(tmp_path / "runs.db")
    timed(store, "a.onnx", "64", "onnx", 2.0)
    store.add_metric(
        AccuracyKey(sha256("a.onnx"), "64", "npu", "d", "test", 1.0), "digits", Metric("accuracy", 1, 1, 1, 9)
    )
    assert read_sections(store)[0].rows[0].accuracy is None


def test_circumstances_versions_and_commands_are_on_the_page(report):
    for words in ("Example CPU at 2.5 GHz", "ai-edge-litert", "2.3.0", "signal SIGSEGV after 0.3 s", "edgevit sweep"):
        assert words in report.html
        assert words in report.markdown
    command = "edgevit profile runs/demo/artifacts/mobilevit_xxs.tflite --size 64 --threads 2"
    assert command in report.html
    assert f"    {command}\n" in report.markdown


@pytest.mark.parametrize(("low", "high"), [(0, 5), (88.4, 99.2), (0.001, 0.0094), (3, 3), (0, 12345)])
def test_linear_ticks_are_round_and_hold_the_domain(low, high):
    scale = linear(low, high, 0, 100)
    assert scale.low <= low <= high <= scale.high
    assert 2 <= len(scale.ticks) <= 12
    step = scale.ticks[1] - scale.ticks[0]
    assert f"{step:.0e}"[0] in "125"
    assert scale(scale.low) == 0
    assert scale(scale.high) == pytest.approx(100)


def test_a_logarithmic_scale_makes_equal_ratios_equal_distances():
    scale = logarithmic(0.1, 50, 0, 300)
    assert scale(1) - scale(0.1) == pytest.approx(scale(10) - scale(1))
    assert {0.1, 1, 10} <= set(scale.ticks)


def test_a_label_without_room_is_left_out():
    frame = Box(0, 0, 100, 100)
    assert place_label("64", [(50, 50, "middle")], [Box(45, 40, 55, 60)], frame) is None
    assert place_label("64", [(99, 50, "start"), (50, 50, "middle")], [], frame) == (50, 50, "middle")


def test_both_files_are_written_or_neither(tmp_path, store):
    assert write_report(store, tmp_path / "a" / "r.html") == (tmp_path / "a" / "r.html", tmp_path / "a" / "r.md")
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["r.html", "r.md"]
    (tmp_path / "b" / "r.md").mkdir(parents=True)
    for out in (tmp_path / "b" / "r.html", tmp_path / "a" / "report.md", tmp_path / "a" / "r.html" / "x.html"):
        with pytest.raises(EdgeVitError):
            write_report(store, out)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["r.md"]


def test_command_prints_the_files_and_the_sentence(tmp_path):
    make_store(tmp_path / "runs.db")
    result = CliRunner().invoke(main, ["report", str(tmp_path), "--budget-ms", "2.8"])
    assert result.exit_code == 0, result.output
    html, markdown, *sentences = result.output.splitlines()
    assert [html, markdown] == [str(tmp_path / "report.html"), str(tmp_path / "report.md")]
    assert sentences[0].startswith("Ship mobilevit_xxs.tflite at 64")
    text = (tmp_path / "report.md").read_text()
    assert sentences[0] in text
    assert f"edgevit report {tmp_path} --budget-ms 2.8" in text


def test_an_empty_or_missing_store_is_one_line_and_exit_2(tmp_path):
    missing = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert missing.exit_code == 2
    assert missing.output.splitlines() == [
        f"edgevit: {tmp_path}/runs.db: no such file; run `edgevit sweep {tmp_path}` first"
    ]
    assert not (tmp_path / "runs.db").exists()
    Store(tmp_path / "runs.db")
    empty = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert empty.exit_code == 2
    assert "run `edgevit sweep" in empty.output
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "bad.db").write_bytes(b"not a database" * 100)
    assert CliRunner().invoke(main, ["report", str(tmp_path), "--db", str(tmp_path / "bad.db")]).exit_code == 2
