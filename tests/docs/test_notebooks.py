import copy
import json
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


FAILED = {"output_type": "error", "ename": "E", "evalue": "", "traceback": []}


@pytest.mark.parametrize("change", [{"source": ["print(2)"]}, {"execution_count": None}, {"outputs": [FAILED]}])
def test_other_runs_are_not_taken(change):
    source = notebook("print(1)")
    ran = executed(source, [stream("1\n")])
    ran["cells"][1] |= change
    assert with_outputs(source, ran) == source


def test_outputs_are_taken_without_noise_and_text_is_that_of_the_source():
    source = notebook("train()")
    widget = {"output_type": "display_data", "data": {"application/vnd.jupyter.widget-view+json": {}}, "metadata": {}}
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA\n"}, "metadata": {"a": 1}}
    ran = executed(source, [stream("warning", "stderr"), widget, stream(" 0%\r100%\nend\n"), picture])
    source["cells"][0]["source"] = ["newer text"]
    made = with_outputs(source, ran)
    assert made["cells"][0]["source"] == ["newer text"]
    kept = made["cells"][1]["outputs"]
    assert [output.get("text") for output in kept] == ["100%\nend\n", None]
    assert kept[1] == picture | {"metadata": {}}


def test_places_of_the_machine_are_replaced_or_refused(tmp_path):
    for text, expected in (
        (f"{ROOT}/src/scforge/a.py", "./src/scforge/a.py"),
        ("/tmp/tmpab12cd34/store.zarr", "/tmp/folder/store.zarr"),
        ("https://example.org/home/page and a / b", "https://example.org/home/page and a / b"),
    ):
        assert cleaned(text) == expected
    place = "/ho" + "me/somebody/data.h5ad"
    with pytest.raises(ValueError, match="a folder of this machine"):
        cleaned(f"read {place}")
    source = notebook("print(path)")
    for folder, made in (("notebooks", source), ("ran", executed(source, [stream(place)]))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.ipynb").write_text(json.dumps(made))
    with pytest.raises(ValueError, match=r"a\.ipynb: an output holds a folder"):
        copy_notebooks(tmp_path / "notebooks", tmp_path / "ran", tmp_path / "out")
    assert copy_notebooks(tmp_path / "notebooks", tmp_path / "none", tmp_path / "out") == []
