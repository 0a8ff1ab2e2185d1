"""Names of other people stay text in reports, cards, tables, plots and terminals."""

import io
import re
from contextlib import nullcontext
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import scforge
from scforge import pl
from scforge._text import code, literal, markdown, printable, without_formulas
from scforge.cli import main
from scforge.estimators.card import CardFacts
from scforge.eval.report import Report, Row
from scforge.models import Encoder

NAMES = [r"$\frac{$", "a|b", "a\nb", "<script>alert(1)</script>", "![x](http://host/x.png)", "=cmd|'x'!A0"]


@given(st.text())
def test_a_name_stays_in_its_cell_of_a_markdown_table(name: str) -> None:
    text = markdown(name)
    assert len(f"{text}.".splitlines()) == 1
    assert "|" not in text
    assert "<" not in text
    assert "![" not in text


ACTIVE = ["[click me](http://evil)", "[click me][x]", "**b**", "*b*", "__b__", "_b_", "`c`", "~~s~~", r"\*b*", "&lt;b>"]
ACTIVE += [
    "# a",
    "> a",
    "- a",
    "+ a",
    "1. a",
    "2) a",
    "---",
    "===",
    "a *b* _c_",
    "![x](http://evil)",
    "[x]: http://evil",
]


@pytest.mark.parametrize("name", ACTIVE)
def test_nothing_in_a_name_is_active_in_markdown(name: str) -> None:
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for form in ("{}", "text\n{}", "- {}", "**{}**", "| a |\n|---|\n| {} |"):
        kinds, texts = set(), []
        for token in reader.parse(form.format(markdown(name))):
            kinds.add(token.type)
            texts += [one.content for one in token.children or [] if one.type == "text"]
            kinds |= {one.type for one in token.children or []}
        plain = {token.type for token in reader.parse(form.format("a"))}
        plain |= {one.type for token in reader.parse(form.format("a")) for one in token.children or []}
        assert kinds - {"softbreak"} == plain - {"softbreak"}, form
        assert name in "".join(texts), form


@pytest.mark.parametrize("name", ["CD14_Mono", "X_scforge", "-0.5", "0.500", "T cell (naive)", "CD8+ T", "a/b-c.d"])
def test_ordinary_names_are_as_they_are_in_markdown(name: str) -> None:
    assert markdown(name) == name


@given(st.text())
@example("org/model")
@example("a`[x](http://evil)`")
def test_a_name_as_code_ends_with_the_code(name: str) -> None:
    assert code(name) in (f"`{name}`", markdown(name))
    assert "`" not in name or code(name) == markdown(name)


def test_dollar_signs_in_markdown_are_no_formulas() -> None:
    assert markdown("$x_1$") == r"\$x_1\$"


@given(st.text())
def test_nothing_controls_the_terminal(text: str) -> None:
    shown = printable(text)
    assert all(mark in "\n\t" or ord(mark) >= 32 for mark in shown)
    assert not re.search("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]", shown)
    shown.encode()
    assert printable(shown) == shown


NUMBERS = st.floats() | st.integers(-(2**60), 2**60)


@given(st.lists(st.tuples(st.text(), NUMBERS, st.none() | st.text() | NUMBERS), min_size=1))
def test_a_spreadsheet_finds_no_formula_and_all_numbers(rows: list[tuple[str, float, object]]) -> None:
    table = pd.DataFrame(rows, columns=["=name", "value", "mixed"]).set_index("=name", drop=False)
    safe = without_formulas(table)
    for cell in [*safe.columns, *safe.index, *safe["'=name"], *safe["mixed"]]:
        if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r")):
            float(cell)
    pd.testing.assert_series_equal(safe["value"], table["value"], check_index=False)
    numbers = [one for one in table["mixed"] if isinstance(one, int | float)]
    assert [repr(one) for one in safe["mixed"] if isinstance(one, int | float)] == list(map(repr, numbers))
    assert list(table.columns) == ["=name", "value", "mixed"]


def report_of(names: list[str]) -> Report:
    report = Report(names[0], facts={"data": names[3]}, notes=[names[4]])
    for number, name in enumerate(names):
        report.add(Row(name, "baseline" if number else "model", {names[1]: 0.5 + number / 20}))
    return report


def test_a_report_of_hostile_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(NAMES)
    report.write(tmp_path / "out")
    text = (tmp_path / "out/report.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == len(NAMES) + 2
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "<" not in text
    assert "![" not in text
    csv = (tmp_path / "out/report.csv").read_text()
    assert "\n=" not in csv
    assert ",=" not in csv
    table = pd.read_csv(io.StringIO(csv))
    np.testing.assert_allclose(table["value"], report.to_frame()["value"])
    assert (tmp_path / "out/report.html").read_text().count("data:image/png") == 1


def _report(names: list[str]) -> object:
    return pl.metrics(report_of(names))


def _scib(names: list[str]) -> object:
    return pl.scib_table(pd.DataFrame(np.random.rand(len(names), 2), index=names, columns=names[:2]))


def _confusion(names: list[str]) -> object:
    return pl.confusion_matrix(pd.DataFrame({"label": names * 2, "predicted": names * 2}), "label", "predicted")


def _curves(names: list[str]) -> object:
    history = {"train_loss": pd.DataFrame({"train_loss": [1.0, 0.5]})}
    return pl.training_curves(history, title=names[2], reference=1.0, reference_label=names[0])


def _ranks(names: list[str]) -> object:
    rows = [(method, name, 0.5) for method in names[:2] for name in names]
    return pl.perturbation_ranks(pd.DataFrame(rows, columns=["method", "perturbation", "rank"]))


@pytest.mark.parametrize("draw", [_report, _scib, _confusion, _curves, _ranks])
def test_dollar_signs_in_plots_are_no_formulas(draw) -> None:
    axes = draw([r"$\frac{$", r"$a_$b$", r"$\notacommand$", "plain", "$", r"\$x$"])
    figure = np.ravel(axes)[0].figure
    figure.savefig(io.BytesIO(), format="png")
    plt.close(figure)


def test_numbers_on_axes_stay_formulas() -> None:
    _, ax = plt.subplots()
    ax.plot([1, 2], [1e9, 3e9])
    ax.set_xscale("log")
    ax.set_title("$x$")
    literal(ax)
    ax.figure.savefig(io.BytesIO(), format="png")
    assert not ax.title.get_parse_math()
    assert ax.yaxis.offsetText.get_parse_math()
    assert all(label.get_parse_math() for label in ax.get_xticklabels())
    plt.close(ax.figure)


def test_embeddings_of_categories_with_dollar_signs() -> None:
    adata = scforge.datasets.pbmc3k()[:40].copy()
    adata.obs["type"] = pd.Categorical([r"$\frac{$", "$a$"] * 20)
    adata.obsm["X_a"] = np.random.default_rng(0).normal(size=(40, 3))
    axes = pl.embeddings(adata, "X_a", color="type")
    axes[0].figure.savefig(io.BytesIO(), format="png")
    plt.close("all")


@pytest.mark.parametrize("name", ["a\x1b[31mb.h5ad", "a\x9b2Jb.h5ad", "a\u202eb.h5ad", "a\udc80b.h5ad"])
def test_errors_on_a_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage = [[name], ["inspect", "x.h5ad", name]]
    for command in (["inspect", name], ["embed", name, "-m", "m", "-o", "x.h5ad"], ["config", "check", name], *usage):
        with pytest.raises(SystemExit) if command in usage else nullcontext():
            assert main(command) == 2
        error = capsys.readouterr().err
        assert name not in error
        assert error.isascii()


def test_a_table_on_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adata = scforge.datasets.pbmc3k()[:50].copy()
    adata.obs["type\x1b[2J"] = ["a", "b"] * 25
    adata.write_h5ad(tmp_path / "cells.h5ad")
    assert main(["inspect", str(tmp_path / "cells.h5ad")]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told
    assert r"type\x1b[2J" in told


def test_a_model_card_of_hostile_facts(tmp_path: Path) -> None:
    adata = scforge.datasets.pbmc3k()[:60, :200].copy()
    Encoder.setup_anndata(adata)
    model = Encoder(adata, n_top_genes=None, hidden_dim=8, latent_dim=4)
    table = pd.DataFrame({"macro_f1": [0.5, 0.4]}, index=["scforge", "a|b\n<script>"])
    table["kind"] = ["model", "baseline"]
    facts = {"data": ["<script>x</script>", "a\n# b"], "license": "<b>", "citation": "<i>me</i>", "metrics": table}
    model.fitted.facts = CardFacts(checkpoint="a, `[x](http://evil)`").with_given(**facts)
    model.save(tmp_path / "model")
    text = (tmp_path / "model/README.md").read_text().partition("\n---\n")[2]
    assert "<script" not in text
    assert "<i>" not in text
    assert "<b>" not in text
    assert "\n# b" not in text
    assert r"Trained elsewhere (a, \[x\](http://evil))" in text
