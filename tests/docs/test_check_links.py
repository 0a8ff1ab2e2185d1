"""Dead links are found, whatever they are in."""

import json

import check_links


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_sound_files_pass(tmp_path, capsys):
    files = {
        "index.html": '<h1 id="top">a</h1><a href="b/c.html#x">c</a><a href="https://example.org/#y">o</a>',
        "b/c.html": '<p id="x"></p><a href="../index.html#top">up</a><a href="#x">x</a><img src="p.png?v=3f">',
        "b/p.png": "",
    }
    write(tmp_path, files)
    assert check_links.main([str(tmp_path)]) == 0
    assert "4 links checked, 0 broken; 1 to other hosts" in capsys.readouterr().out
    text = "[b](b.md#a-title-code) [o](https://example.org) `[code](gone.md)`\n\n```\n[more](gone.md)\n```\n"
    write(tmp_path, {"b.md": "# A title, `code`\n", "a.md": text})
    assert check_links.main([str(tmp_path / "a.md")]) == 0


def test_a_dead_link_is_found(tmp_path, capsys):
    page = (
        '<a href="gone.html">x</a><img src="_static/gone.png"><a href="#gone">x</a><a href="index.html#none">x</a>'
        '<a href="folder/">x</a>'
    )
    (tmp_path / "folder").mkdir()
    cells = [
        {"cell_type": "markdown", "source": ["see [this]", "(gone.ipynb)"]},
        {"cell_type": "code", "source": ["x = '[not](this.md)'"], "outputs": []},
    ]
    markdown = "![picture](gone.png)\n\n[b](b.md#none)\n\n[ref]: other.md\n"
    write(tmp_path, {"index.html": page, "a.md": markdown, "b.md": "", "c.ipynb": json.dumps({"cells": cells})})
    told = ""
    for name in ("", "a.md", "c.ipynb"):
        assert check_links.main([str(tmp_path / name)]) == 1
        told += capsys.readouterr().err
    for name in ("gone.html", "_static/gone.png", "folder/", " gone.png", "other.md", "gone.ipynb"):
        assert f"{name}: there is no such file" in told
    assert "#gone: there is no such anchor" in told
    assert "index.html#none: there is no such anchor" in told
    assert "b.md#none: there is no such heading" in told
    assert "this.md" not in told
    assert check_links.main([str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
