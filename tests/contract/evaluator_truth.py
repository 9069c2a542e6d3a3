"""Runs in the evaluators' own environment, without our code: makes files, calls desktop-env's metrics on them, says what they gave.

    EVALUATORS_PYTHON evaluator_truth.py FOLDER  ->  JSON lines {"name", "func", "arguments", "options", "score"}

Arguments are {"path": a file in FOLDER}, {"paths": [...]}, or {"value": JSON}.
"""

# ruff: noqa: E402 -- easyocr, which needs torch, must look as if it were there before the package is imported

import json
import sys
import types
import zipfile
from pathlib import Path

sys.modules["easyocr"] = types.ModuleType("easyocr")

import docx
import fitz
import numpy
import openpyxl
import pptx
from desktop_env.evaluators import metrics
from docx.enum.text import WD_PARAGRAPH_ALIGNMENT
from PIL import Image

FOLDER = Path(sys.argv[1])


def file(name):
    return {"path": name}


def value(one):
    return {"value": one}


def rule(expected):
    return value({"expected": expected})


def workbook(name, last):
    book = openpyxl.Workbook()
    for row in (("Name", "Sum"), ("a", 1), ("b", last)):
        book.active.append(row)
    book.save(FOLDER / name)


def document(name, *texts, is_centred=False, table=None):
    made = docx.Document()
    for text in texts:
        paragraph = made.add_paragraph(text)
        if is_centred:
            paragraph.alignment = WD_PARAGRAPH_ALIGNMENT.CENTER
    if table:
        cell = made.add_table(1, 1).cell(0, 0)
        cell.text = table
    made.save(FOLDER / name)


def slides(name, text):
    made = pptx.Presentation()
    slide = made.slides.add_slide(made.slide_layouts[0])
    slide.shapes.title.text = text
    made.save(FOLDER / name)


def pdf(name, *texts):
    made = fitz.open()
    for text in texts:
        made.new_page().insert_text((72, 72), text)
    made.save(FOLDER / name)


def picture(name, shade, size=64):
    noise = numpy.random.default_rng(0).integers(0, 40, (size, size, 3), numpy.uint8)
    Image.fromarray(noise + numpy.uint8(shade)).save(FOLDER / name)


def archive(name, text):
    with zipfile.ZipFile(FOLDER / name, "w") as made:
        made.writestr("a.txt", text)


def make_files():
    workbook("good.xlsx", 2), workbook("same.xlsx", 2), workbook("bad.xlsx", 3)
    document("good.docx", "Title", "Text", table="1"), document("same.docx", "Title", "Text", table="1")
    (
        document("bad.docx", "Title", "Another text", table="2"),
        document("centred.docx", "Title", is_centred=True),
    )
    slides("good.pptx", "Hello"), slides("same.pptx", "Hello"), slides("bad.pptx", "Goodbye")
    pdf("good.pdf", "one page", "two"), pdf("same.pdf", "one page", "two"), pdf("bad.pdf", "one page")
    picture("good.png", 100), picture("same.png", 100), picture("bad.png", 200), picture("small.png", 100, 32)
    archive("good.zip", "x"), archive("same.zip", "x"), archive("bad.zip", "y")
    (FOLDER / "good.csv").write_text("a,b\n1,2\n")
    (FOLDER / "same.csv").write_text("a,b\n1,2\n")
    (FOLDER / "bad.csv").write_text("a,b\n1,3\n")
    (FOLDER / "good.json").write_text('{"editor": {"tabSize": 2}, "word": "on"}')
    (FOLDER / "bad.json").write_text('{"editor": {"tabSize": 4}, "word": "off"}')
    (FOLDER / "good.txt").write_text("alpha\nbeta\n")
    (FOLDER / "same.txt").write_text("alpha\nbeta\n")
    (FOLDER / "bad.txt").write_text("alpha\n")


def cases():
    table = {"rules": [{"type": "sheet_data", "sheet_idx0": "RI0", "sheet_idx1": "EI0"}]}
    settings = value({"expect": [{"key": ["editor", "tabSize"], "method": "eq", "ref": 2}]})
    for name in ("good", "bad"):
        yield "compare_table", [file(f"{name}.xlsx"), file("same.xlsx")], table
        yield "compare_docx_files", [file(f"{name}.docx"), file("same.docx")], {}
        yield "compare_docx_tables", [file(f"{name}.docx"), file("same.docx")], {}
        yield "compare_pptx_files", [file(f"{name}.pptx"), file("same.pptx")], {}
        yield "compare_pdfs", [file(f"{name}.pdf"), file("same.pdf")], {}
        yield "check_pdf_pages", [file(f"{name}.pdf"), value({"relation": "eq", "ref_value": 2})], {}
        yield "compare_images", [file(f"{name}.png"), file("same.png")], {}
        yield "check_structure_sim", [file(f"{name}.png"), file("same.png")], {}
        yield "check_image_size", [file(f"{name}.png"), value({"height": 64, "width": 64})], {}
        yield (
            "compare_archive",
            [file(f"{name}.zip"), file("same.zip")],
            {"file_path": "text", "file_type": "text"},
        )
        yield "compare_csv", [file(f"{name}.csv"), file("same.csv")], {}
        yield "check_csv", [file(f"{name}.csv"), value({"expect": [{"a": "1", "b": "2"}]})], {}
        yield "check_json", [file(f"{name}.json"), settings], {}
        yield "check_json_settings", [file(f"{name}.json"), rule({"word": "on"})], {}
        yield "compare_text_file", [file(f"{name}.txt"), file("same.txt")], {}
        yield "check_list", [file(f"{name}.txt"), value({"expect": ["beta"]})], {}
        yield "diff_text_file", [file(f"{name}.txt"), file("same.txt")], {}
    yield "check_image_size", [file("small.png"), value({"height": 64, "width": 64})], {}
    yield "is_first_line_centered", [file("centred.docx")], {}
    yield "is_first_line_centered", [file("good.docx")], {}
    yield "compare_docx_files", [value(None), file("same.docx")], {}
    yield "fuzzy_match", [value("abcd"), value({"expected": "abce"})], {}
    for text in ("on", "off"):
        yield "exact_match", [value(text), rule("on")], {}
        yield "check_include_exclude", [value(text), value({"include": ["on"], "exclude": ["x"]})], {}
        yield "match_in_list", [value(text), rule(["on", "yes"])], {}
        yield "is_in_list", [value([text]), rule("on")], {}
        yield "literal_match", [value(text), value("ON")], {"ignore_case": True}
        yield "check_direct_json_object", [value({"k": text}), rule({"k": "on"})], {}
        loose = {"expected": {"k": ["on", "yes"], "n": "a"}, "expect_in_result": True}
        yield "check_direct_json_object", [value({"k": text, "n": "cat"}), value(loose)], {}
        yield "check_direct_json_object", [value({"k": [text], "n": "cat"}), value(loose)], {}
        yield "check_direct_json_object", [value({"k": f"{text}on", "n": "cat"}), value(loose)], {}
        yield "is_utc_0", [value(f"Time zone: Etc/UTC (UTC, +0000)\n{text}\n\nx")], {}


def real(argument):
    return str(FOLDER / argument["path"]) if "path" in argument else json.loads(json.dumps(argument["value"]))


def main():
    make_files()
    for func, arguments, options in cases():
        try:
            score = float(getattr(metrics, func)(*map(real, arguments), **options))
        except Exception as error:
            score = f"{type(error).__name__}"
        line = {"func": func, "arguments": arguments, "options": options, "score": score}
        print("CASE " + json.dumps(line))


main()
