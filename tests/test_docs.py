"""The book of the formats: pages render, their code runs, their numbers are computed, tables and links are right."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("transformers")  # the tutorials need the extra [models]

from docs._generate import cards, formats, links, markdown, measured, pages, products, questions, scales, storage
from mxref.formats import BLOCK_FORMATS, ELEMENT_FORMATS

DOCS = Path(__file__).parent.parent / "docs"
WRITTEN = sorted(
    path
    for path in DOCS.rglob("*.md")
    if path.relative_to(DOCS).parts[0] not in ("_build", "formats", "elements", "decisions", "example_kernel")
)
NAMES = [str(path.relative_to(DOCS)) for path in WRITTEN]

# What is not prose: code, expressions, the targets of links, and what stands in tags.
NO_PROSE = re.compile(r"^```.*?^```|\{\{.*?\}\}|`[^`\n]*`|\]\([^)]*\)|<[^>\n]*>|^    .*$", re.DOTALL | re.MULTILINE)
# Numbers that prose may hold: clauses and versions of named documents, the element that is counted from, numbered lists.
ALLOWED = re.compile(
    r"(?:OCP )?(?:MX|OFP8) v?\d+\.\d+(?:, \d+(?:\.\d+)*)?|version \d+\.\d+"
    r"|[Ee]lement [01]\b|[Bb]yte [01]\b|[+-]0\b|^\d+\. |\b\d+-bit\b",
    re.MULTILINE,
)
TYPED = re.compile(r"(?<![\w.])(?<![a-z]-)\d[\d.,]*(?!\w)")


def typed_numbers(source: str) -> list[str]:
    """Numbers that stand in the prose of a page as digits: not part of a name such as FP4, not computed, not allowed."""
    return TYPED.findall(ALLOWED.sub(" ", NO_PROSE.sub(" ", source)))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_renders_and_its_code_runs(name):
    rendered = pages.render((DOCS / name).read_text(encoding="utf-8"), name)
    assert "{{" not in rendered and str(DOCS.parent) not in rendered


@pytest.mark.parametrize("name", NAMES)
def test_numbers_in_prose_are_computed(name):
    assert typed_numbers((DOCS / name).read_text(encoding="utf-8")) == []


def test_a_typed_number_is_seen():
    page = "E2M1 reaches 6, MXFP4 has `32` elements, {{ 4 }}; OCP MX v1.0, 6.3; [a link](page-7.md).\n\n1. one\n2. 448.0\n"
    assert typed_numbers(page) == ["6,", "448.0"]


def test_code_is_run_and_shown_with_what_it_prints():
    rendered = pages.render("```python\nprint({{ 1 + 1 }} * 3)\n```\n\n```python\nx = 1\n```\n")
    assert rendered.count("```python") == 2 and ":class: output\n6\n```" in rendered
    with pytest.raises(ZeroDivisionError):
        pages.render("```python\n1 / 0\n```\n")
    with pytest.raises(Exception, match="nowhere"):
        pages.render("{{ nowhere }}")


def test_every_format_has_its_page():
    generated = pages.generated_pages()
    assert len(generated) == len(ELEMENT_FORMATS) + len(BLOCK_FORMATS)
    for name, text in generated.items():
        assert text.startswith("# ") and "<svg" in text, name


FOREIGN = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
}


@pytest.mark.parametrize("name", FOREIGN)
def test_the_values_shown_are_those_of_ml_dtypes(name):
    element = ELEMENT_FORMATS[name]
    cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in formats.values(element).splitlines()[2:]]
    for code, bits, value, negative in cells:
        expected = np.array([int(code, 16)], np.uint8).view(FOREIGN[name]).astype(np.float64)[0]
        assert float(value) == expected and int(bits.replace(" ", ""), 2) == int(code, 16)
        assert np.array([int(negative, 16)], np.uint8).view(FOREIGN[name]).astype(np.float64)[0] == -expected


@pytest.mark.parametrize("name, dtype", [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_the_lists_of_eight_bits_are_those_of_ml_dtypes(name, dtype):
    shown = re.findall(r"^<li><code>0x(..)</code> (.*)</li>$", formats.values(ELEMENT_FORMATS[name]), re.MULTILINE)
    expected = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float64)
    assert [int(code, 16) for code, _ in shown] == list(range(256))
    for (_, text), value in zip(shown, expected, strict=True):
        assert (text == "NaN") if np.isnan(value) else read(text) == value and np.signbit(read(text)) == np.signbit(value)


def read(text: str) -> float:
    """The number that `markdown.exact` wrote."""
    significand, _, power = text.rpartition(" × ")
    if "2^" not in power:
        return float(text)
    sign = -1.0 if text.startswith("-") else 1.0
    return sign * abs(float(significand or 1)) * 2.0 ** int(power.removeprefix("-").removeprefix("2^"))


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.5, 448.0, 2.0**-127, -(2.0**-9), 1.25 * 2.0**-14, 57344.0, 1.75 * 2.0**126, 6.1]
)
def test_numbers_are_written_exactly(value):
    assert read(markdown.exact(value)) == value and np.signbit(read(markdown.exact(value))) == np.signbit(value)


def test_every_question_has_its_section():
    page = (DOCS / "questions.md").read_text(encoding="utf-8")
    sections = [
        re.sub(r"[^a-z0-9_ -]", "", title.lower().replace(".", " "))
        for title in re.findall(r"^## (.*)$", page, re.MULTILINE)
    ]
    assert [re.sub(r"[ _]+", "-", section) for section in sections] == [section for _, section, _, _ in questions.QUESTIONS]


def test_every_question_leads_to_the_section_that_answers_it():
    generated = pages.generated_pages()
    for question, _, target, _ in questions.QUESTIONS:
        page, _, section = target.partition("#")
        text = generated[page] if page in generated else (DOCS / page).read_text(encoding="utf-8")
        titles = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
        slugs = [re.sub(r"[ _]+", "-", re.sub(r"[^a-z0-9_ -]", "", title.lower())) for title in titles]
        assert section in slugs, (question, target, slugs)


def test_tile_offsets_are_where_the_formula_says():
    for r, c in ((0, 0), (37, 2), (127, 3), (128, 0), (300, 9)):
        assert storage.tile_offset(r, c, 10) == 512 * (r // 128 * 3 + c // 4) + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def test_pictures_fit_on_a_phone():
    written = [pages.render(path.read_text(encoding="utf-8"), path.name) for path in WRITTEN]
    frames = re.findall(
        r'<div class="drawing-frame">.*?</div>', "".join([*written, *pages.generated_pages().values()]), re.DOTALL
    )
    assert len(frames) > 30
    for frame in frames:
        drawings = re.findall(r'<svg class="(\w*)" viewBox="0 0 (\d+)', frame)
        assert [kind for kind, _ in drawings] in ([""], ["roomy", "phone"]) and 0.9 * int(drawings[-1][1]) <= 340


def columns(rendered: str) -> list[list[list[str]]]:
    """The columns of every table of a page, as they are read."""
    tables = re.findall(r"(?:^\|.*\|\n?)+", rendered, re.MULTILINE)
    plain = re.compile(r"[`*]|\]\([^)]*\)|\[(?=[^\]]*\]\()")
    lines = [[plain.sub("", line).strip("| ") for line in table.splitlines()] for table in tables]
    return [list(zip(*(re.split(r" \| ?", line) for line in table if not set(line) <= set("-:|")))) for table in lines]


@pytest.mark.parametrize(
    "name", ["scales/tensor-scale.md", "storage/checkpoints.md", "matmul/hardware.md", "measured/model.md"]
)
def test_tables_that_are_wider_than_a_phone_become_cards(name):
    tables = columns(pages.render((DOCS / name).read_text(encoding="utf-8"), name))
    assert any(cards.thirds(table) for table in tables)
    for table in tables:
        words = sum(max(max(map(len, re.split(r"[ -]", cell))) for cell in column) for column in table)
        assert cards.thirds(table) or 7 * words <= 340  # a letter of a table is seven pixels at most, a phone shows 340


def test_a_value_of_a_card_has_the_width_that_it_needs():
    assert cards.thirds([["op", "qdq"], ["ms", "12.5"]]) is None
    table = [["recipe", "a" * 60], ["bytes of codes", "16"], ["decodes to", "b" * 20], ["note", "word " * 20]]
    assert cards.thirds(table) == [3, 1, 2, 3]


@pytest.mark.parametrize("name, nan", [("mxfp8_e4m3", (0x7F, 0xFF)), ("mxfp8_e5m2", (0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF))])
def test_a_stored_nan_is_one_element_and_a_nan_scale_the_block(name, nan):
    rows = re.findall(
        r"^\| `0x(..)` `0x..` \| (\S+) \| (.*) \|$", formats.stored_specials(BLOCK_FORMATS[name]), re.MULTILINE
    )
    assert {int(code, 16) for code, value, _ in rows if value == "NaN"} == set(nan)
    for _, value, decoded in rows:
        assert decoded == f"{value}, 1 | {value}, 2 | NaN, NaN"


@pytest.mark.parametrize(
    "path", sorted((DOCS.parent / "benchmarks" / "results").glob("conformance-*.json")), ids=lambda path: path.stem
)
def test_refusals_add_up_to_those_of_the_record(path):
    counts = re.findall(r"\| (\d+) \|$", measured.refusals(path.stem), re.MULTILINE)
    assert sum(map(int, counts)) == measured.record(path.stem)["refused"]
    assert "| - |" not in measured.conformance(path.stem) and "None" not in measured.conformance(path.stem)


def test_broken_links_are_seen(tmp_path):
    (tmp_path / "a.html").write_text(
        '<p id="here"><a href="b.html#there">b</a><a href="#here">h</a><a href="https://x.org">x</a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"><a href="a.html#gone">a</a><a href="c.html">c</a><img src="d.png">')
    assert links.broken_links(tmp_path) == ["b.html: a.html#gone", "b.html: c.html", "b.html: d.png"]


def test_the_records_shown_are_committed():
    shown = set(re.findall(r'measured\.\w+\("([\w-]+)"\)', "".join(path.read_text(encoding="utf-8") for path in WRITTEN)))
    assert shown and all((DOCS.parent / "benchmarks" / "results" / f"{name}.json").exists() for name in shown)


def test_every_width_of_a_unit_names_the_place_that_it_is_from():
    for unit in products.UNITS:
        if unit.kept is not None:
            assert re.search(r"\]\(https://\S+/blob/[0-9a-f]{40}/\S+\): .*`\w+`", unit.source), unit


def test_the_embedded_models_page_holds_no_figure_but_counts_that_are_its_record():
    text = (DOCS.parent / "mxref/models/embedded/README.md").read_text(encoding="utf-8")
    record = measured.record("eval-embedded-cpu")
    total, experts = record["parameters"], record["quantized_weights"]
    met = total - experts * 6 // 8  # two experts of eight
    assert (
        f"| parameters | {total:,} in bfloat16, of which {experts:,} in experts; {met:,} take part in each token |" in text
    )
    assert re.findall(r"(?<![\w.])[+-]?\d+\.\d{2,}", text) == []  # measured, or copied from a log


def test_a_table_of_a_record_says_what_the_record_does_not_hold():
    assert "machine not recorded, versions not recorded, commit not recorded, date not recorded" in measured.source(
        "producers"
    )
    assert "| not recorded | not recorded |" in measured.records()


def test_what_has_no_number_says_why_in_words():
    shown = measured.gpu_experts()
    refused = [row for row in measured.record("moe-h200")["rows"] if "failed" in row]
    counts = re.findall(r"no number in (\d+) rows?, since", shown)
    assert sum(map(int, counts)) == len(refused) > 0 and "Error" not in shown


@pytest.mark.parametrize("name", ["measured/speed.md", "measured/model.md", "scales/tensor-scale.md"])
def test_no_page_writes_a_number_in_computer_notation_or_an_activation_by_two_names(name):
    rendered = pages.render((DOCS / name).read_text(encoding="utf-8"), name)
    assert re.findall(r"\d[eE][+-]\d", re.sub(r"```.*?```", "", rendered, flags=re.DOTALL)) == []
    assert not re.search(r"\| (?:bf16|None|not quantized) \||fp4, bfloat16 \|", rendered)


@pytest.mark.parametrize("value, digits, text", [(0.35, 3, "0.350"), (12.0, 3, "12.0"), (1234.5, 3, "1234")])
def test_measured_values_keep_their_digits(value, digits, text):
    assert markdown.measured(value, digits) == text


def test_the_picture_of_speed_has_a_dot_for_each_measurement():
    rows = [
        row for row in measured.record("elementwise-h200")["rows"] if row["size"] == [8192, 8192] and "failed" not in row
    ]
    assert measured.speed_picture().count("<circle") == 2 * len(rows) > 0  # where there is room, and on a phone


def test_the_direction_of_vllm_stands_beside_those_of_the_dialects():
    assert "vLLM" in scales.directions() and "**divide**" in scales.directions().split("vLLM")[1]


def test_no_sentence_stands_twice_before_a_table():
    for path in WRITTEN:
        rendered = pages.render(path.read_text(encoding="utf-8"), path.name)
        assert not re.search(r"[Ww]ith the default recipe.*:\n\n[Ww]ith the default recipe", rendered), path
