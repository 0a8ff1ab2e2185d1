"""Find wording that the field does not use: python tools/check_words.py [--count] [FILE ...]

Without files it reads the documentation, README.md, CHANGELOG.md, CONTRIBUTING.md, the Markdown of notebooks, and the
docstrings, comments, messages and YAML files of src. Each finding is printed as FILE:LINE: phrase -> replacement, and
the exit status is 1. Code, links and formulas are skipped. `--count` prints how often each phrase, each tic of the
house style and each vague name occurs, and never fails.

Without files it also checks the names of variables in src/scforge: if more than 1% of all assignments are to a vague
name, each is printed as FILE:LINE: name -> say what it holds, and the exit status is 1.

codespell and the like replace single words; most of these are phrases.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Regular expressions, in which a space also matches a line break, and what to write.
PHRASES = {
    r"besides?": "compared with, alongside, next to, in addition to",
    r"figures? (?:for|of merit|that|which|beside|from|to beat)": "metric, score, result, number",
    r"(?:scIB|perturbation|quality|validation) figures?": "metrics, scores",
    r"stands? (?:behind|beside|in (?!the way)|there|where|here)": "is, follows, appears, is listed",
    r"as it stands|as they stand": "unchanged, as is",
    r"(?:is|are|was|were|be|being) told(?! apart)": "is reported, is conditioned on, receives, raises",
    r"told (?:apart|the|what|which|from|about|with|that)": "distinguished, conditioned on, reported",
    r"(?:goes|going|go|went|gone) on(?= (?:after|where|from|with|to|at|in)|[.,;:)]|$)": "resumes, continues",
    r"(?<!there\s)(?:is|are) (?-i:none)\b(?! of)": "is not one, is missing",
    r"has no use (?:with|without|for)": "has no effect",
    r"to the (?:last )?bit\b": "bit for bit, bit-exact",
    r"(?<!multilayer\s)perceptrons?": "MLP",
    r"front class(?:es)?": "model class",
    r"models? of bytes": "byte-level language model",
    r"made (?:cells|donors|batches|counts|data)": "generated cells, simulated donors",
    r"drawn alike": "sampled uniformly",
    r"embedded (?:real )?data": "bundled data",
    r"mend(?:s|ed|ing)?": "fix",
    r"rooms|rooms? (?:of|that|it|above|below)": "layer, subpackage",
    r"worth (?:its|the) trouble": "better than the baselines",
    r"in silico figures?": "in silico scores",
    r"in place of": "instead of",
    r"of (?:its|their|one's) own": "a separate, your own",
    r"hidden (?:genes?|tokens?)": "masked genes, masked tokens",
    r"taught by": "trained on",
    r"a call": "a predicted label, a function call",
    r"as (?:of now|ever)": "currently, as always",
    r"no contest": "not a score",
    r"deals? cells": "assigns cells",
    r"read off": "derived from, decoded from",
    r"random weights (?:know|have)": "an untrained network scores",
    r"trainings": "training runs",
    r"asked? for(?= by|[.,;:)])": "requested, required",
    r"(?:neighbour|tokenis|normalis|initialis|optimis(?!m|t)|maximis|minimis)\w*": "American: neighbor, tokenize",
    r"(?:organis(?!m)|summaris|recognis|generalis)\w*": "American spelling: organize, summarize",
    r"(?:licence|colour|behaviour|modell?ling|grey|centre|favour)\w*": "American spelling: license, color",
    r"(?:un)?labelled": "American spelling: labeled",
    r"(?<![\w.])\.\d{2,}(?!\w)": "a leading zero: 0.84",
    r"\bsays? (?:so|how|what|which|whether|where)": "shows, reports, specifies",
    r"what (?:stands|came out|is asked|was asked|it holds)": "name the noun",
    r"the way of": "the flow of, the path of",
    r"in the end": "finally, at the end",
    r"(?:is|are) (?:dear|cheap)er?": "costs more, costs less",
    r"sees? nothing|says? nothing|knows? nothing": "name what is missing",
    r"lest": "so that ... not",
    r"whoever": "the process that, anyone who",
}

# The same, not reported in notebooks.
EXCEPT_NOTEBOOKS = {
    r"of no use": "without effect",
    r"go(?:es)? with (?=no|the|an?|any|other|each|all|it|them)": "work with, fit",
    r"(?:stays?|left|leaves?|lets?) (?:\w+ )?as (?:it|they) (?:is|are|was|were)": "does not change",
    r"drawn anew": "resampled",
    r"of like (?:length|expression|size)": "of similar length",
    r"whole-numbered": "integer",
    r"at hand": "available",
    r"at the most": "at most",
    r"in the manner of": "like",
    r"(?:tell|tells|told|telling) (?:\w+ ){0,2}apart": "distinguish",
    r"tells? nothing": "is not informative",
    r"(?:is|are) another one": "differs, does not match",
    r"in the words of": "in the notation of",
    r"what (?:is|was|were|are) (?:random|drawn|sampled|seen|left|known|kept|sent|asked|hidden)": "name it",
    r"what (?:it|they) (?:is|are|was|were) made (?:of|with|from)": "its settings, its source",
    r"(?:rows?|lines?|values?|vectors?|numbers?|columns?|files?|panels?) a (?:cell|row|gene|token|epoch|step|batch"
    r"|class|method|metric|model|key|name|group|perturbation|seed)": "one row per cell",
    r"(?:cells|tokens|operations|steps) an? (?:second|step|batch|epoch)": "cells per second",
    r"so many (?:cells|epochs|steps|genes|tokens|rows|bytes|batches|threads)": "this many",
}

# Tics of style that are fine in moderation: counted, never reported.
TICS = {
    "figure(s)": r"figures?",
    "stand(s), stood": r"stands?|stood",
    "say(s)": r"says?",
    "told": r"told",
    "tell(s), telling": r"tells?|telling",
    "go(es), going, went on": r"(?:go|goes|going|went) on",
    "is/are no, is none": r"(?:is|are) (?:no|none)",
    "fronted 'Of the'": r"(?-i:Of) (?:the|a|its)",
    "', too'": r", too",
    "draw(s), drawn": r"draws?|drawn",
    "hold(s)": r"holds?",
    "state(s)": r"states?",
    "nothing": r"nothing",
    "'a row a method'": r"(?:one|a|\d+) \w+ an? (?:cell|row|method|gene|model|token|step|epoch|batch|parameter|second)",
    "ones": r"ones",
    "made": r"made",
    "so that": r"so that",
    "whose": r"whose",
    "semicolons": r";",
}

# Variables that do not say what they hold, and the fraction of assignments that may be to one of them.
VAGUE = ("found", "one", "known", "place", "some", "made", "told")
MAX_VAGUE = 0.01

# Generated pages, titles of papers, and parts whose rewording is still to come.
SKIPPED = (
    "docs/_build",
    "docs/generated",
    "docs/notebooks",
    "docs/references.bib",
)

# Where a phrase is right: (part of the path, pattern of the text around it, and the reason).
ALLOWED = (
    # The name of a field.
    ("estimators/card.py", r"^\s*beside\s*$|\n    beside\n"),
)

_CODE = re.compile(
    r"^(?P<fence>[ \t]*(?:`{3,}|~{3,}|:{3,})).*?^[ \t]*(?P=fence)[`~:]*[ \t]*$"  # fenced blocks
    r"|^[ \t]*(?:>>>|\.\.\.) .*?$|``.*?``|`[^`]*`|\{\w+(?::\w+)?\}`[^`]*`|\$[^$]*\$|\]\([^)]*\)|https?://\S+",
    re.MULTILINE | re.DOTALL,
)


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:\b|(?<=\W))(?:{pattern})(?!\w)".replace(" ", r"\s+"), re.IGNORECASE)


def prose(text: str) -> str:
    """Return a text whose code, links and formulas are blank, with every line where it was."""
    return _CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)


def of_python(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each comment, docstring and other text with a space in it."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.removeprefix("#")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file, each with its first line."""
    if path.suffix == ".py":
        yield from of_python(path)
    elif path.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "markdown":
                yield number, "".join(cell["source"])
    else:
        yield 1, path.read_text(encoding="utf-8")


def files() -> list[Path]:
    """Return every file that is read by default."""
    paths = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    paths += [*ROOT.glob("docs/**/*.md"), *ROOT.glob("notebooks/*.ipynb"), *ROOT.glob("src/**/*.py")]
    paths += ROOT.glob("src/**/*.yaml")
    return sorted(path for path in paths if not path.relative_to(ROOT).as_posix().startswith(SKIPPED))


def findings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, phrase and replacement of all that is found in a file."""
    name = path.resolve().as_posix()
    phrases = PHRASES if path.suffix == ".ipynb" else PHRASES | EXCEPT_NOTEBOOKS
    for first, text in texts(path):
        text = prose(text)
        for pattern, replacement in phrases.items():
            for match in _compiled(pattern).finditer(text):
                around = text[max(0, match.start() - 30) : match.end() + 30]
                if any(part in name and re.search(right, around) for part, right in ALLOWED):
                    continue
                line = first + (0 if path.suffix == ".ipynb" else text.count("\n", 0, match.start()))
                yield line, " ".join(match[0].split()), replacement


def assignments() -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and name of each assignment in src/scforge, including targets of loops and comprehensions."""
    for path in sorted(ROOT.glob("src/scforge/**/*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield path, node.lineno, node.id


def vague() -> list[tuple[Path, int, str, str]]:
    """Return the assignments to vague names, or none if they are few enough."""
    named = list(assignments())
    lines = [(path, line, name, "say what it holds") for path, line, name in named if name in VAGUE]
    return lines if len(lines) > MAX_VAGUE * len(named) else []


def counted(paths: list[Path]) -> str:
    """Return a table of how often each phrase, tic and vague name occurs, by kind of file."""
    kinds = {".md": "docs", ".ipynb": "notebooks", ".py": "src", ".yaml": "src"}
    patterns = {name: name for name in (*PHRASES, *EXCEPT_NOTEBOOKS)} | TICS
    counts = {name: Counter() for name in patterns}
    for path in paths:
        for _, text in texts(path):
            text = prose(text)
            for name, pattern in patterns.items():
                counts[name][kinds[path.suffix]] += len(_compiled(pattern).findall(text))
    names = Counter(name for _, _, name in assignments())
    counts |= {f"{name} =": Counter(src=names[name]) for name in VAGUE} | {"all names =": Counter(src=names.total())}
    rows = [f"{'phrase':60} {'docs':>6} {'notebooks':>9} {'src':>6}"]
    rows += [f"{name[:60]:60} {c['docs']:6} {c['notebooks']:9} {c['src']:6}" for name, c in counts.items()]
    return "\n".join(rows)


def main() -> int:
    """Print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="files to read instead of all")
    parser.add_argument("--count", action="store_true", help="print how often each phrase occurs")
    args = parser.parse_args()
    paths = args.files or files()
    if args.count:
        print(counted(paths))
        return 0
    lines = [(path, *finding) for path in paths for finding in findings(path)] + ([] if args.files else vague())
    for path, line, phrase, replacement in lines:
        full = path.resolve()
        print(f"{full.relative_to(ROOT) if full.is_relative_to(ROOT) else full}:{line}: {phrase} -> {replacement}")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
