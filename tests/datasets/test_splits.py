import dataclasses
import gzip
import hashlib
from importlib import resources
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest

from scforge.datasets import get_card, get_split, list_cards, load, read_split, write_split
from scforge.datasets.cards import SplitRule
from scforge.datasets.splits import Split, check_rule, make_split
from scforge.errors import DataError, OptionError
from scforge.testing import raises

SOURCE = Path(__file__).parents[3] / "shared" / "data" / "cells"
SHIPPED = [name for name in list_cards() if get_card(name).splits]
PARTS = ("train", "validation", "test")


def data_of(**columns: list[str]) -> ad.AnnData:
    n_cells = len(next(iter(columns.values())))
    obs = pd.DataFrame(columns, index=[f"cell{i}" for i in range(n_cells)])
    return ad.AnnData(np.ones((n_cells, 1), dtype=np.float32), obs=obs)


def card_with(rule: SplitRule) -> object:
    return dataclasses.replace(get_card("norman"), split=rule, more_splits={})


def parts_of(split: Split, adata: ad.AnnData, column: str) -> dict[str, set]:
    labels = split.labels(adata)
    return {part: set(adata.obs.loc[labels == part, column]) for part in PARTS}


def test_shipped_splits_are_whole_and_small() -> None:
    for name in SHIPPED:
        split = get_split(name)
        assert len(split) == get_card(name).n_cells
        ids = np.concatenate([split.train, split.validation, split.test, split.left_out])
        assert len(set(ids)) == len(split)
        assert len(split.train) > len(split.test) > 0
        assert len(split.validation)
    with resources.as_file(resources.files("scforge.datasets").joinpath("splits")) as folder:
        files = sorted(folder.iterdir())
        assert sum(file.stat().st_size for file in files) < 400_000
        assert [file.name for file in files] == sorted(f"{name}-v1.csv.gz" for name in SHIPPED)


@pytest.mark.parametrize("name", [name for name in SHIPPED if name == "pbmc3k" or (SOURCE / f"{name}.h5ad").exists()])
def test_a_shipped_split_is_what_its_rule_makes(name: str) -> None:
    adata = load(name, SOURCE)
    split, made = get_split(name, adata), make_split(get_card(name), adata[::-1])
    for part in (*PARTS, "left_out"):
        assert list(getattr(split, part)) == list(getattr(made, part))
    if name == "pbmc3k":
        shares = pd.crosstab(adata.obs["cell_type"], split.labels(adata), normalize="index")
        assert shares["test"].between(0.18, 0.22).all()
        assert set(adata.obs_names[adata.obs["cell_type"].isna()]) & set(split.test)


def test_donors_are_held_out_whole_and_unknown_ones_left_out() -> None:
    adata = data_of(donor=[*"aabbccddee", None])
    split = make_split(card_with(SplitRule("groups", "donor", 1, ("b", "d"))), adata)
    found = parts_of(split, adata, "donor")
    assert found["test"] == {"b", "d"}
    assert len(found["validation"]) == 1
    assert not found["train"] & (found["validation"] | found["test"])
    assert list(split.left_out) == ["cell10"]
    rule = SplitRule("groups", "donor", 1, 2)
    two = [make_split(card_with(rule), data_of(donor=DONORS), version=version).test for version in (1, 2)]
    assert list(two[0]) != list(two[1])
    assert split.labels(adata).isna().sum() == 1
    for donors in (list("aabb"), [True, True, False, False]):
        with pytest.raises(DataError, match="the column 'donor' has only 2 values, which is too few to hold out"):
            make_split(card_with(SplitRule("groups", "donor", 1, 1)), data_of(donor=donors))


def test_no_held_out_perturbation_has_a_training_cell() -> None:
    names = [f"p{i}" for i in range(10)] * 8 + ["control"] * 40 + [None]
    adata = data_of(perturbation=names)
    rule = SplitRule("perturbations", "perturbation", 0.2, 3, control_share=0.25)
    split = make_split(card_with(rule), adata)
    found = parts_of(split, adata, "perturbation")
    assert [len(found[part] - {"control"}) for part in PARTS] == [5, 2, 3]
    assert set.intersection(*found.values()) == {"control"}
    controls = adata.obs["perturbation"] == "control"
    assert split.labels(adata)[controls].value_counts().to_dict() == {"train": 20, "validation": 10, "test": 10}
    assert list(split.left_out) == ["cell120"]


def test_perturbations_in_contexts_and_their_controls() -> None:
    kinds = [kind for kind in "abcd" for _ in range(20)]
    adata = data_of(condition=[*["control", "drug"] * 40, "drug", "control"], kind=[*kinds, None, None])
    rule = SplitRule("perturbations", "condition", 1, 1, context_key="kind", control_share=0.4)
    split = make_split(card_with(rule), adata)
    table = pd.crosstab([adata.obs["kind"], adata.obs["condition"]], split.labels(adata))
    drugged = table.xs("drug", level="condition")
    assert (drugged.max(axis=1) == 10).all()
    for part in ("validation", "test"):
        (held,) = drugged.index[drugged[part] > 0]
        assert table.loc[(held, "control"), part] == 4
        assert table.loc[(held, "control"), "train"] == 6
    assert (table.xs("control", level="condition")["train"] > 0).all()
    assert list(split.left_out) == ["cell80", "cell81"]


def test_only_combinations_are_held_out_in_whatever_order() -> None:
    genes = "ABCDEF"
    pairs = [f"{a}_{b}" for a in genes for b in genes if a != b]
    adata = data_of(perturbation=[*genes, *pairs, "control", "control", "control"])
    rule = SplitRule("perturbations", "perturbation", 0.2, 0.4, separator="_")
    found = parts_of(make_split(card_with(rule), adata), adata, "perturbation")
    assert set(genes) <= found["train"]
    assert {len(name) for name in found["test"] - {"control"}} == {3}
    assert not {f"{b}_{a}" for a, _, b in found["test"] - {"control"}} & (found["train"] | found["validation"])
    with pytest.raises(DataError, match=r"'perturbation \(joined by \+\)' has only 0 values, which is too few to hold"):
        make_split(card_with(dataclasses.replace(rule, separator="+")), adata)


def test_a_planted_leak_is_an_error() -> None:
    with pytest.raises(DataError, match="contains cell 'b' twice"):
        Split("x", 1, ["a", "b"], ["c"], ["b"])
    with pytest.raises(DataError, match="has no validation cells"):
        Split("x", 1, ["a", "b"], [], ["c"])
    adata = data_of(perturbation=["control", "x", "x", "y", "z"])
    leaky = Split("norman", 1, ["cell0", "cell1"], ["cell4"], ["cell2", "cell3"])
    with pytest.raises(DataError, match="puts cells of 'x' in more than one part"):
        check_rule(leaky, card_with(SplitRule("perturbations", "perturbation", 1, 1)), adata)


def test_rows_of_a_part(tiny_adata: ad.AnnData, pbmc: ad.AnnData) -> None:
    split, some = get_split("pbmc3k"), pbmc[:300]
    rows = {part: split.rows(some, part) for part in PARTS}
    assert sorted(np.concatenate(list(rows.values()))) == list(range(300))
    assert set(some.obs_names[rows["test"]]) <= set(split.test)
    assert rows["test"].dtype == np.int64
    with raises(DataError, "adata"):
        split.rows(tiny_adata, "test")
    with raises(DataError, "adata"):
        get_split("pbmc3k", some)
    with pytest.raises(DataError, match="no cell of adata is in part 'test'"):
        split.rows(pbmc[list(split.train)], "test")
    with raises(OptionError, "part"):
        split.rows(pbmc, "tests")


def test_where_nothing_ships_the_rule_needs_the_data() -> None:
    with pytest.raises(OptionError, match="no split of 'norman' is included in the package; pass the data set as"):
        get_split("norman")
    with raises(OptionError, "version"):
        get_split("pbmc3k", version=2)
    adata = data_of(donor_id=["a", "a", "b", "c", "d", "e"], cell_type=["x"] * 6)
    assert len(get_split("immune_atlas", adata)) == 6
    with raises(DataError, "column"):
        get_split("immune_atlas", data_of(donor=["a"] * 5))


GENES = "ABCDEF"
PERTURBED = [*GENES, *(f"{a}+{b}" for i, a in enumerate(GENES) for b in GENES[i + 1 :]), *["control"] * 9]
DONORS = [f"donor{i % 10}" for i in range(40)]


@pytest.mark.parametrize(
    ("name", "column", "values", "validation", "test"),
    [
        ("tabula_sapiens", "donor_id", DONORS, "donor6", "donor2 donor4"),
        ("immune_atlas", "donor_id", DONORS, "donor8", "donor1 donor4"),
        ("norman", "perturbation_name", PERTURBED, "A+B C+E", "A+C A+D A+F B+D B+E B+F C+D D+E"),
    ],
)
def test_a_rule_makes_the_same_split_everywhere(name, column, values, validation: str, test: str) -> None:
    """What is held out of simulated data is pinned: another result would be another version."""
    adata = data_of(**{column: values})
    found = parts_of(get_split(name, adata[::-1]), adata, column)
    assert found["validation"] - {"control"} == set(validation.split())
    assert found["test"] - {"control"} == set(test.split())


def test_write_and_read_back(tmp_path: Path) -> None:
    split = Split("mine", 3, ["b", 'a,"1"'], ["é"], ["NA"], ["left"])
    for name in ("one.csv.gz", "two.csv.gz"):
        write_split(split, tmp_path / name)
    assert (tmp_path / "one.csv.gz").read_bytes() == (tmp_path / "two.csv.gz").read_bytes()
    again = read_split(tmp_path / "one.csv.gz", name="mine", version=3)
    for part in (*PARTS, "left_out"):
        assert list(getattr(again, part)) == list(getattr(split, part))


def test_files_that_are_no_split(tmp_path: Path) -> None:
    for content in (b"cell,part\n", gzip.compress(b""), gzip.compress(b"cell,parts\na,train\n")):
        (tmp_path / "x.csv.gz").write_bytes(content)
        with pytest.raises(DataError, match="x.csv.gz' .*write it with write_split"):
            read_split(tmp_path / "x.csv.gz")
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"cell,part\na,train\na,test\nb,validation\n"))
    with pytest.raises(DataError, match="contains cell 'a' twice"):
        read_split(tmp_path / "x.csv.gz")


def test_shipped_splits_are_those_of_their_cards() -> None:
    for name in list_cards():
        for version, expected in get_card(name).splits.items():
            file = resources.files("scforge.datasets").joinpath("splits", f"{name}-v{version}.csv.gz")
            assert hashlib.sha256(file.read_bytes()).hexdigest() == expected
