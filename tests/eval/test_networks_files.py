import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, MissingFileError, OptionError
from scforge.eval.networks import read_network
from scforge.testing import raises

TRRUST = "AATF\tBAX\tRepression\t1\nMYC\tTERT\tActivation\t3\nMYC\tTERT\tRepression\t4\nSP1\tA\tUnknown\t5\n"
ENCODE = (
    "source\tsource_desc\tsource_id\ttarget\ttarget_desc\ttarget_id\tweight\n"
    "GeneSym\tNA\tGeneID\tGeneSym\tNA\tGeneID\tNA\n"
    "A1BG\tna\t1\tATF2\tna\t1386\t1.000000\nA2M\tna\t2\tATF2\tna\t1386\t1.000000\n"
)
CHIP_ATLAS = "Target_genes\tGATA1|Average\tSRX1|K-562\tSTRING\nKLF1\t250.5\t501\t900\nALAS2\t40\t80\t0\nNONE\t0\t0\t0\n"
OMNIPATH = (
    "source\ttarget\tsource_genesymbol\ttarget_genesymbol\tis_directed\tis_stimulation\tis_inhibition\n"
    "P01106\tO14746\tMYC\tTERT\t1\t1\t0\nP17947\tP02818\tSPI1\tBGLAP\t1\t0\t1\nQ1\tQ2\tX\tY\t1\t1\t1\n"
)
COLLECTRI = "source,target,weight\nMYC,TERT,1\nMYC,A,-1\n"
DOROTHEA = "source,confidence,target,weight\nA,B,x,0.5\nA,A,x,0.5\n"
WEIGHTS = "TF\tgene\tweight\nA\tx\t1\nA\ty\t1\nA\ty\t0.3\n"
NAN = np.nan
SIGNS = [("AATF", "BAX", -1.0), ("MYC", "TERT", NAN), ("SP1", "A", NAN)]


def rows(found: pd.DataFrame) -> list[tuple]:
    return [tuple(row) for row in found.itertuples(index=False)]


@pytest.mark.parametrize(
    ("name", "text", "columns", "expected"),
    [
        ("trrust_rawdata.human.tsv", TRRUST, ["sign"], SIGNS),
        ("net.csv", COLLECTRI, ["sign"], [("MYC", "TERT", 1.0), ("MYC", "A", -1.0)]),
        ("d.csv", DOROTHEA, ["sign", "confidence"], [("A", "x", 1.0, "A")]),
        # as in R
        (
            "d.tsv",
            "tf\tconfidence\ttarget\tmor\nA\tE\tx\t-1\n",
            ["sign", "confidence"],
            [("A", "x", -1.0, "E")],
        ),
        ("o.tsv", OMNIPATH, ["sign"], [("MYC", "TERT", 1.0), ("SPI1", "BGLAP", -1.0), ("X", "Y", NAN)]),
        ("gene_attribute_edges.txt", ENCODE, [], [("ATF2", "A1BG"), ("ATF2", "A2M")]),
        ("GATA1.5.tsv", CHIP_ATLAS, ["weight"], [("GATA1", "KLF1", 250.5), ("GATA1", "ALAS2", 40.0)]),
        ("refNetwork.csv", "Gene1,Gene2,Type\nA,x,+\nA,x,-\nB,y,+\n", [], [("A", "x"), ("B", "y")]),
        ("e.tsv", WEIGHTS, ["weight"], [("A", "x", 1.0), ("A", "y", 1.0)]),
        ("e.csv", "\ufeffsource, target\nNA, nan\n", [], [("NA", "nan")]),  # names that look like none
    ],
)
def test_formats(name: str, text: str, columns: list, expected: list, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    found = read_network(tmp_path / name)
    assert str(rows(found)) == str(expected)
    assert list(found)[2:] == columns
    with gzip.open(tmp_path / f"{name}.gz", "wt", encoding="utf-8") as file:
        file.write(text)
    pd.testing.assert_frame_equal(read_network(tmp_path / f"{name}.gz"), found)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"source": "A", "target": "x", "mode": ["Activation", "Unknown"], "pmid": "1"}, [("A", "x", 1.0)]),
        ({"source": ["A", "B"], "target": ["x", "y"], "weight": [1, -1]}, [("A", "x", 1.0), ("B", "y", -1.0)]),
        ({"tf": ["A"], "confidence": ["C"], "target": ["x"], "mor": [-1.0]}, [("A", "x", -1.0, "C")]),
    ],
)
def test_parquet(table: dict, expected: list, tmp_path: Path) -> None:
    pd.DataFrame(table).to_parquet(tmp_path / "net.parquet")
    assert rows(read_network(tmp_path / "net.parquet")) == expected


def test_columns_that_the_user_names(tmp_path: Path) -> None:
    (tmp_path / "own.tsv").write_text("regulated\tby\nx\tA\ny\tB\n")
    assert rows(read_network(tmp_path / "own.tsv", source="by", target="regulated")) == [("A", "x"), ("B", "y")]
    (tmp_path / "bare.csv").write_text("A,3,x\nB,4,y\n")
    assert rows(read_network(tmp_path / "bare.csv", source=0, target=2)) == [("A", "x"), ("B", "y")]


def test_several_files(tmp_path: Path) -> None:
    both = [tmp_path / "GATA1.5.tsv", tmp_path / "TAL1.5.tsv"]
    for path in both:
        path.write_text(CHIP_ATLAS.replace("GATA1", path.name.split(".")[0]))
    assert read_network(both)["source"].tolist() == ["GATA1", "GATA1", "TAL1", "TAL1"]


@pytest.mark.parametrize(
    ("text", "options", "argument"),
    [
        ("a\tb\nx\ty\n", {}, "path"),
        ("", {}, "path"),
        ("source,target\nA,\n", {}, "path"),
        ("source,target,weight\nA,x,much\n", {}, "path"),
        ("source,target\nA,x\n", {"source": "src", "target": "target"}, "path"),
        (ENCODE.replace("A2M\tna\t2\tATF2", "A1BG\tna\t1\tJUN"), {}, "path"),
    ],
)
def test_files_that_cannot_be_used(text: str, options: dict, argument: str, tmp_path: Path) -> None:
    (tmp_path / "net.csv").write_text(text)
    with raises(DataError, argument):
        read_network(tmp_path / "net.csv", **options)


@pytest.mark.parametrize(
    ("path", "options", "error", "argument"),
    [
        ("none.tsv", {}, MissingFileError, "path"),
        ("x", {"source": "tf"}, OptionError, "source"),
    ],
)
def test_arguments_that_cannot_be_used(path, options: dict, error: type[Exception], argument: str) -> None:
    with raises(error, argument):
        read_network(path, **options)
