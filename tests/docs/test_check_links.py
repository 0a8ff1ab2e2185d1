"""Dead links are found, whatever they are in."""

import json

import check_links
import pytest


def html(folder, name, body):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><body>{body}</body></html>")


def test_a_sound_folder_passes(tmp_path, capsys):
    html(tmp_path, "index.html", '<h1 id="top">a</h1><a href="b/c.html#x">c</a><a href="https://example.org/#y">o</a>')
    html(tmp_path, "b/c.html", '<p id="x"></p><a href="../index.html#top">up</a><a href="#x">x</a><img src="p.png">')
    (tmp_path / "b" / "p.png").write_bytes(b"")
    assert check_links.main([str(tmp_path)]) == 0
    assert "4 links checked, 0 broken; 1 to other hosts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('<a href="gone.html">x</a>', "gone.html: there is no such file"),
        ('<img src="_static/gone.png">', "gone.png: there is no such file"),
        ('<a href="#gone">x</a>', "#gone: there is no such anchor"),
        ('<a href="index.html#gone">x</a>', "index.html#gone: there is no such anchor"),
        ('<a href="folder/">x</a>', "folder/: there is no such file"),
    ],
)
def test_a_dead_link_of_a_page_is_found(tmp_path, capsys, body, reason):
    html(tmp_path, "index.html", body)
    (tmp_path / "folder").mkdir()
    assert check_links.main([str(tmp_path)]) == 1
    assert reason in capsys.readouterr().err


def test_versions_behind_names_do_not_matter(tmp_path):
    html(tmp_path, "index.html", '<script src="_static/a.js?v=3f"></script>')
    (tmp_path / "_static").mkdir()
    (tmp_path / "_static" / "a.js").write_text("")
    assert check_links.main([str(tmp_path)]) == 0


def test_links_of_markdown(tmp_path, capsys):
    (tmp_path / "b.md").write_text("# A title, `code`\n")
    page = tmp_path / "a.md"
    page.write_text("[b](b.md#a-title-code) [o](https://example.org) `[code](gone.md)`\n\n```\n[more](gone.md)\n```\n")
    assert check_links.main([str(page)]) == 0
    page.write_text("![picture](gone.png)\n\n[b](b.md#none)\n\n[ref]: other.md\n")
    assert check_links.main([str(page)]) == 1
    told = capsys.readouterr().err
    assert "gone.png: there is no such file" in told
    assert "b.md#none: there is no such heading" in told
    assert "other.md: there is no such file" in told


def test_links_of_notebooks(tmp_path, capsys):
    cells = [
        {"cell_type": "markdown", "source": ["see [this]", "(gone.ipynb)"]},
        {"cell_type": "code", "source": ["x = '[not](this.md)'"], "outputs": []},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert check_links.main([str(path)]) == 1
    assert "gone.ipynb" in capsys.readouterr().err


def test_a_missing_argument_is_told(tmp_path, capsys):
    assert check_links.main([str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
