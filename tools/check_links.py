"""Check links without the internet: python tools/check_links.py FOLDER_OF_HTML [FILE.md | FILE.ipynb ...]

Every href and src of the built pages that stays within them has to lead to a file, and to an anchor that is there.
Relative links of markdown files and of the markdown in notebooks have to lead to files beside them. Links to other
hosts are counted only.
"""

from __future__ import annotations

import functools
import html
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

_HERE = ("", "file")
_MARKDOWN = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+[^)]*)?\)")
_REFERENCE = re.compile(r"^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
_BLOCK = re.compile(r"^[ \t]*(`{3,}|~{3,}).*?^[ \t]*\1\s*$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"<script(?=[^<>]*>)(?P<tag>[^<>]*>).*?</script>", re.DOTALL)
_TAG = re.compile(r"<[a-zA-Z][^<>]*>")
_ATTRIBUTE = re.compile(r"""\s(id|name|href|src)=(?:"([^"]*)"|'([^']*)')""")
_CODE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True)
class _Page:
    """Anchors and links of a page."""

    anchors: frozenset[str]
    links: tuple[str, ...]


@functools.cache
def _page(path: Path) -> _Page:
    # Expressions, because the parser of the standard library takes minutes for pages with long side bars.
    anchors, links = set(), {}
    for tag in _TAG.findall(_SCRIPT.sub(r"<script\g<tag>", path.read_text(encoding="utf-8", errors="replace"))):
        for name, double, single in _ATTRIBUTE.findall(tag):
            value = html.unescape(double or single)
            if name == "id" or (name == "name" and tag.startswith("<a ")):
                anchors.add(value)
            elif name in ("href", "src"):
                links[value] = None
    return _Page(frozenset(anchors), tuple(links))


def broken_in_html(folder: Path) -> tuple[list[str], int, int]:
    """Return what is wrong in a folder of pages, the number of links within it, and of those to other hosts."""
    found, inside, outside = [], 0, 0
    # In _static the theme has templates, which are no pages.
    for path in sorted(path for path in folder.rglob("*.html") if "_static" not in path.relative_to(folder).parts):
        for link in _page(path).links:
            try:
                parts = urlsplit(link)
            except ValueError as error:
                found.append(f"{path.relative_to(folder)}: {link}: is no address ({error})")
                continue
            if parts.scheme or parts.netloc:
                outside += parts.scheme in ("http", "https") or bool(parts.netloc)
                continue
            inside += 1
            where = f"{path.relative_to(folder)}: {link}"
            target = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file():
                found.append(f"{where}: there is no such file")
            elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in _page(target).anchors:
                found.append(f"{where}: there is no such anchor")
    return found, inside, outside


def _markdown_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def _links_of(text: str) -> Iterator[str]:
    plain = _CODE.sub("", _BLOCK.sub("", text))
    yield from _MARKDOWN.findall(plain)
    yield from _REFERENCE.findall(plain)


def _anchors_of(path: Path) -> set[str]:
    """Return the anchors that headings of a markdown file get where it is shown."""
    titles = re.findall(r"^#{1,6} +(.*?) *$", _BLOCK.sub("", _markdown_of(path)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_in_markdown(path: Path) -> tuple[list[str], int, int]:
    """Return what is wrong in a markdown file or notebook, and the numbers of links as :func:`broken_in_html`."""
    found, inside, outside = [], 0, 0
    for link in _links_of(_markdown_of(path)):
        try:
            parts = urlsplit(link)
        except ValueError as error:
            found.append(f"{path}: {link}: is no address ({error})")
            continue
        if parts.scheme not in _HERE or parts.netloc:
            outside += 1
            continue
        inside += 1
        target = path if not parts.path else path.parent / unquote(parts.path)
        if not target.exists():
            found.append(f"{path}: {link}: there is no such file")
        elif parts.fragment and target.suffix == ".md" and parts.fragment not in _anchors_of(target):
            found.append(f"{path}: {link}: there is no such heading")
    return found, inside, outside


def main(arguments: Sequence[str]) -> int:
    """Check all; print what is wrong and return 1, or a line of numbers and 0."""
    wrong: list[str] = []
    inside = outside = 0
    if not arguments:
        print("check_links: name a folder of pages, or files", file=sys.stderr)
        return 2
    for place in map(Path, arguments):
        if not place.exists():
            print(f"check_links: {place} does not exist", file=sys.stderr)
            return 2
        if place.is_dir() and not any(place.rglob("*.html")):
            print(f"check_links: {place} has no pages", file=sys.stderr)
            return 2
        found, within, beyond = broken_in_html(place.resolve()) if place.is_dir() else broken_in_markdown(place)
        wrong += found
        inside, outside = inside + within, outside + beyond
    for line in dict.fromkeys(wrong):
        print(line, file=sys.stderr)
    print(f"{inside:,} links checked, {len(wrong):,} broken; {outside:,} to other hosts not looked at")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
