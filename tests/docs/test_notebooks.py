"""Notebooks in the documentation: outputs of the same code only, and nothing of the machine that ran them."""

import copy
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx", reason="the documentation is built by the group docs")
from scforge_docs.notebooks import cleaned, copy_notebooks, with_outputs

ROOT = Path(__file__).parents[2]


def notebook(*cells):
    made = [{"cell_type": "markdown", "metadata": {}, "source": ["text"]}]
    for source in cells:
        made.append({"cell_type": "code", "metadata": {}, "source": [source], "outputs": [], "execution_count": None})
    return {"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


def executed(source, *outputs):
    ran = copy.deepcopy(source)
    for number, (cell, given) in enumerate(zip(ran["cells"][1:], outputs, strict=True), 1):
        cell |= {"outputs": given, "execution_count": number}
    return ran


def stream(text, name="stdout"):
    return {"output_type": "stream", "name": name, "text": [text]}


def save(path, made):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(made))


def outputs_of(made):
    return [output for cell in made["cells"] if cell["cell_type"] == "code" for output in cell["outputs"]]


def test_outputs_of_the_same_code_are_taken_and_text_is_that_of_the_source():
    source = notebook("print(1)")
    ran = executed(source, [stream("1\n")])
    source["cells"][0]["source"] = ["newer text"]
    made = with_outputs(source, ran)
    assert outputs_of(made) == [{"output_type": "stream", "name": "stdout", "text": "1\n"}]
    assert made["cells"][0]["source"] == ["newer text"]
    assert outputs_of(source) == []


@pytest.mark.parametrize("change", [{"source": ["print(2)"]}, {"execution_count": None}, {"outputs": ["failed"]}])
def test_other_runs_are_not_taken(change):
    source = notebook("print(1)")
    ran = executed(source, [stream("1\n")])
    if "outputs" in change:
        change = {"outputs": [{"output_type": "error", "ename": "E", "evalue": "", "traceback": []}]}
    ran["cells"][1] |= change
    assert with_outputs(source, ran) == source


def test_noise_is_left_out():
    source = notebook("train()")
    widget = {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}}
    data = {"image/png": "AAAA\n", "text/plain": "<F>"}
    picture = {"output_type": "display_data", "data": data, "metadata": {"a": 1}}
    data = {"text/plain": ["<Axes at 0x7f00deadbeef>"]}
    result = {"output_type": "execute_result", "data": data, "metadata": {}, "execution_count": 1}
    ran = executed(source, [stream("warning", "stderr"), widget, stream(" 0%\r100%\nend\n"), picture, result])
    kept = outputs_of(with_outputs(source, ran))
    assert [output.get("text") for output in kept] == ["100%\nend\n", None, None]
    assert kept[1] == picture | {"metadata": {}}
    assert kept[2]["data"] == {"text/plain": "<Axes at 0x...>"}


def test_places_of_the_machine_are_replaced_or_refused(tmp_path):
    for text, expected in (
        (f"{ROOT}/src/scforge/a.py", "./src/scforge/a.py"),
        (f"{sys.prefix}/lib/python/site-packages", "python/lib/python/site-packages"),
        (str(Path.home() / ".cache" / "x"), "~/.cache/x"),
        ("/tmp/tmpab12cd34/store.zarr", "/tmp/folder/store.zarr"),
        ("https://example.org/home/page and a / b", "https://example.org/home/page and a / b"),
    ):
        assert cleaned(text) == expected
    place = "/ho" + "me/somebody/data.h5ad"
    with pytest.raises(ValueError, match="a folder of this machine"):
        cleaned(f"read {place}")
    source = notebook("print(path)")
    save(tmp_path / "notebooks" / "a.ipynb", source)
    save(tmp_path / "ran" / "a.ipynb", executed(source, [stream(place)]))
    with pytest.raises(ValueError, match=r"a\.ipynb: an output holds a folder"):
        copy_notebooks(tmp_path / "notebooks", tmp_path / "ran", tmp_path / "out")


def test_copies(tmp_path):
    one, two = notebook("print(1)"), notebook("print(2)")
    save(tmp_path / "notebooks" / "one.ipynb", one)
    save(tmp_path / "notebooks" / "two.ipynb", two)
    save(tmp_path / "ran" / "one.ipynb", executed(one, [stream("1\n")]))
    save(tmp_path / "out" / "stray.ipynb", {})
    assert copy_notebooks(tmp_path / "notebooks", tmp_path / "ran", tmp_path / "out") == ["one.ipynb"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["one.ipynb", "two.ipynb"]
    written = (tmp_path / "out" / "one.ipynb").stat().st_mtime_ns
    copy_notebooks(tmp_path / "notebooks", tmp_path / "ran", tmp_path / "out")
    assert (tmp_path / "out" / "one.ipynb").stat().st_mtime_ns == written  # a build takes what has not changed as it is
    assert copy_notebooks(tmp_path / "notebooks", tmp_path / "none", tmp_path / "out") == []
