"""Geneformer's tokens against its definition, one cell at a time in float64, written here without scforge.

Geneformer (Theodoris et al. 2023) makes a cell so: columns that are genes of the dictionary stay; each count becomes
``count * (1 / n_counts) * 1e4 * (1 / median)``, with n_counts over all columns; nonzero genes stand in the order of
``np.argsort`` of the negated values; the first 2,048 (V1) or 4,094 between <cls> and <eos> (V2) are kept. V2 first maps
ids to current ones and sums the columns of one gene, the sums behind the genes with one column.
"""

from collections import Counter
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from scforge.data import CellBlock
from scforge.data.genes import GeneMap
from scforge.errors import DataError
from scforge.tokenizers import RankValueTokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data"
CELLS = SHARED / "cells" / "pbmc3k.h5ad"
SIZES = {"V1": 2048, "V2": 4096}


class Reference:
    """Geneformer's tokenizer as published, slowly."""

    def __init__(self, tokens, medians, version, ensembl_map=None, size=None):
        self.tokens, self.medians, self.version = tokens, medians, version
        self.ensembl_map = ensembl_map
        self.size = SIZES[version] if size is None else size

    def columns(self, names):
        """Return the gene of each column that is left, and the columns that it is made of, in their order."""
        if self.version == "V1":
            return [(name, [i]) for i, name in enumerate(names) if name in self.medians and name in self.tokens]
        known = {old: new for old, new in self.ensembl_map.items() if new in self.tokens}
        genes = [known.get(name.upper()) for name in names]
        n_columns = Counter(genes)
        single = [(gene, [i]) for i, gene in enumerate(genes) if gene is not None and n_columns[gene] == 1]
        repeated = dict.fromkeys(gene for gene in genes if gene is not None and n_columns[gene] > 1)
        return single + [(gene, [i for i, other in enumerate(genes) if other == gene]) for gene in repeated]

    def matrix(self, counts, names):
        """Return the counts of the columns that are left, CSR, and their genes."""
        kept = self.columns(names)
        rows = [i for _, columns in kept for i in columns]
        places = np.repeat(np.arange(len(kept)), [len(columns) for _, columns in kept])
        sums = sparse.csr_matrix((np.ones(len(rows)), (rows, places)), shape=(len(names), len(kept)))
        matrix = sparse.csr_matrix(counts.astype(np.float64) @ sums)
        matrix.sort_indices()
        return matrix, [gene for gene, _ in kept]

    def cells(self, counts, names):
        """Return for each cell the tokens, and keys and tokens of all expressed genes from high to low."""
        n_counts = np.asarray(counts.sum(axis=1, dtype=np.float64)).ravel()
        matrix, genes = self.matrix(counts, names)
        tokens = np.array([self.tokens[gene] for gene in genes])
        norms = np.array([1.0 / self.medians[gene] for gene in genes])
        for cell in range(len(n_counts)):
            part = slice(matrix.indptr[cell], matrix.indptr[cell + 1])
            data, indices = matrix.data[part], matrix.indices[part]
            keys = data * (1.0 / n_counts[cell]) * 10_000 * norms[indices]
            order = np.argsort(-keys)
            ranked = tokens[indices][order]
            yield self.framed(ranked), keys[order], ranked

    def framed(self, ranked):
        if self.version == "V1":
            return ranked[: self.size]
        return np.concatenate([[self.tokens["<cls>"]], ranked[: self.size - 2], [self.tokens["<eos>"]]])


def rows_of(batch):
    ids, mask = batch["input_ids"].numpy(), batch["attention_mask"].numpy()
    return [row[there] for row, there in zip(ids, mask, strict=True)]


def in_batches(tokenizer, counts, names, size=300):
    gene_map = GeneMap.of(names, tokenizer.vocab)
    for start in range(0, counts.shape[0], size):
        yield from rows_of(tokenizer(counts[start : start + size], gene_map))


def assert_equal_up_to_ties(ours, expected, keys, ranked):
    """The keys of our tokens are those of the reference, one by one: only equal keys may have changed places."""
    assert len(ours) == len(expected)
    assert len(set(ours.tolist())) == len(ours)
    key_of = dict(zip(ranked.tolist(), keys.tolist(), strict=True))
    special = {0, 1, 2, 3} if len(expected) and expected[0] not in key_of else set()
    for one, two in zip(ours.tolist(), expected.tolist(), strict=True):
        if one != two:
            assert one not in special
            assert two not in special
            assert key_of[one] == key_of[two]


@pytest.fixture(scope="module", params=["V1", "V2"])
def published(request):
    """Geneformer's tokenizer with the published dictionaries, and a function that makes ours."""
    version, folder = request.param, SHARED / "vocab"
    file, map_file = (folder / f"geneformer_{version}_{part}.parquet" for part in ("tokens_medians", "ensembl_map"))
    table, ensembl = pd.read_parquet(file), pd.read_parquet(map_file)
    named, known = table[table["token"].notna()], table[table["median"].notna()]
    tokens = dict(zip(named["gene_id"], named["token"].astype(int), strict=True))
    medians = dict(zip(known["gene_id"], known["median"].astype(float), strict=True))
    ensembl_map = dict(zip(ensembl["ensembl_id"], ensembl["gene_id"], strict=True))

    def make(parity, size=None):
        options = {"ensembl_map": map_file if version == "V2" else None, "parity": parity}
        return cut(RankValueTokenizer.from_geneformer(file, version, **options), size)

    return Reference(tokens, medians, version, ensembl_map), make


def cut(tokenizer, size):
    """Return the tokenizer with another length."""
    config = tokenizer.config() | ({} if size is None else {"max_len": size})
    return RankValueTokenizer(tokenizer.vocab, **config)


@pytest.fixture(scope="module")
def pbmc3k():
    adata = ad.read_h5ad(CELLS)
    return sparse.csr_matrix(adata.X), adata.var["gene_ids"].astype(str).to_numpy()


@pytest.mark.real_data
@pytest.mark.skipif(not CELLS.is_file(), reason="needs the published dictionaries and cells in ../shared/data")
class TestRealData:
    @pytest.mark.slow
    @pytest.mark.parametrize("size", [None, 64])
    def test_all_cells(self, published, pbmc3k, size):
        """`exact` gives the published tokens; `stable` too, up to ties, which are rare in real data."""
        reference, make = published
        (counts, names), version = pbmc3k, reference.version
        reference = Reference(reference.tokens, reference.medians, version, reference.ensembl_map, size)
        exact, stable = make("exact", size), make("stable", size)
        assert dict(zip(exact.vocab.tokens, range(len(exact.vocab)), strict=True)) == reference.tokens
        np.testing.assert_array_equal(exact.vocab.medians, [reference.medians[gene] for gene in exact.vocab.genes])
        # Some cells are cut short, or some columns summed; little would be shown otherwise.
        matrix, genes = reference.matrix(counts, names)
        cut = (np.diff(matrix.indptr) > reference.size).any()
        assert cut if version == "V1" or size else len(genes) < sum(len(c) for _, c in reference.columns(names))
        n_same = 0
        for one, two, (expected, keys, ranked) in zip(
            in_batches(exact, counts, names),
            in_batches(stable, counts, names),
            reference.cells(counts, names),
            strict=True,
        ):
            np.testing.assert_array_equal(one, expected)
            assert_equal_up_to_ties(two, expected, keys, ranked)
            n_same += np.array_equal(two, expected)
        assert n_same > 2000


# The same with made-up dictionaries, which need no files.
GENES = [f"ENSG{i:011d}" for i in range(120)]
V1 = {"<pad>": 0, "<mask>": 1, **{gene: i + 2 for i, gene in enumerate(GENES)}}
V2 = {"<pad>": 0, "<mask>": 1, "<cls>": 2, "<eos>": 3, **{gene: i + 4 for i, gene in enumerate(GENES)}}
# Few distinct medians, so that there are ties.
MEDIANS = {gene: [0.5, 1.0, 1.7, 3.0][i % 4] for i, gene in enumerate(GENES)}
FORMER = {f"ENSG{1000 + i:011d}": GENES[3 * i] for i in range(30)}
MAP = {gene: gene for gene in GENES} | FORMER | {"ENSG00000000777": "ENSG00000000999"}


def made_up(version, parity, size=None):
    tokens = V1 if version == "V1" else V2
    ensembl_map = MAP if version == "V2" else None
    tokenizer = RankValueTokenizer.from_geneformer((tokens, MEDIANS), version, ensembl_map=ensembl_map, parity=parity)
    return cut(tokenizer, size), Reference(tokens, MEDIANS, version, ensembl_map, size=size)


def table(names, seed=0, n_cells=50):
    generator = np.random.default_rng(seed)
    counts = generator.poisson(0.6, (n_cells, len(names))) * generator.choice([1, 1, 2, 40], (n_cells, len(names)))
    counts[3] = 0
    counts[3, 0] = 5
    return sparse.csr_matrix(counts.astype(np.float32)), np.array(names, dtype=object)


def shuffled(names, seed=1):
    return [names[i] for i in np.random.default_rng(seed).permutation(len(names))]


NAMES = {
    "permuted, with foreign genes": shuffled([*GENES, *(f"other{i}" for i in range(60))]),
    "few genes": shuffled(GENES[:40]),
    "repeated": shuffled([*GENES, *GENES[:30], *GENES[:10]]),
    "former and current ids": shuffled([*GENES, *FORMER, "ENSG00000000777", "what"]),
    "lower case": shuffled([*(gene.lower() for gene in GENES[:60]), *GENES[40:]]),
    "versions": [f"{gene}.12" for gene in GENES],
}
CASES = [(version, names) for version in ("V1", "V2") for names in list(NAMES)[: 3 if version == "V1" else None]]


@pytest.mark.parametrize("size", [None, 20, 5])
@pytest.mark.parametrize(("version", "names"), CASES)
def test_made_up_dictionaries(version, names, size):
    (exact, reference), (stable, _) = (made_up(version, parity, size) for parity in ("exact", "stable"))
    counts, columns = table(NAMES[names])
    for one, two, (expected, keys, ranked) in zip(
        rows_of(exact(counts, columns)),
        rows_of(stable(counts, columns)),
        reference.cells(counts, [name.split(".")[0] for name in columns]),
        strict=True,
    ):
        np.testing.assert_array_equal(one, expected)
        if (version, names) != ("V1", "repeated"):  # tested below
            assert_equal_up_to_ties(two, expected, keys, ranked)


def test_v1_keeps_each_of_repeated_columns_and_stable_sums_them():
    counts = sparse.csr_matrix(np.array([[4, 0, 3, 1]], dtype=np.float32))
    names = [GENES[1], GENES[2], GENES[1], GENES[3]]  # medians 1, 1.7, 1, 3
    exact, _ = made_up("V1", "exact")
    assert exact(counts, names)["input_ids"].tolist() == [[3, 3, 5]]
    stable, _ = made_up("V1", "stable")
    assert stable(counts, names)["input_ids"].tolist() == [[3, 5]]


@pytest.mark.parametrize("parity", ["exact", "stable"])
def test_library_size_is_that_of_the_whole_panel(parity):
    """Counts outside the dictionary lower the values of all genes of the cell by one factor."""
    tokenizer, _ = made_up("V2", parity)
    counts, names = table(GENES)
    wide = sparse.csr_matrix(sparse.hstack([counts, np.full((50, 1), 1000)]))
    among = tokenizer(wide, [*names, "other"])
    n_counts = np.asarray(counts.sum(axis=1)).ravel() + 1000.0
    dense = counts.toarray()
    for cell, (ids, values) in enumerate(zip(rows_of(among), among["values"].numpy(), strict=True)):
        expected = np.log1p(dense[cell, ids[1:-1] - 4] / n_counts[cell] * 1e4)
        np.testing.assert_allclose(values[1 : len(ids) - 1], expected, rtol=1e-6)
    for given in (tokenizer(counts, names, totals=n_counts), tokenizer(CellBlock.from_csr(counts, n_counts))):
        assert all(np.array_equal(given[key], among[key]) for key in among)


def test_sizes_and_special_tokens():
    v1, v2 = (made_up(version, "stable")[0] for version in ("V1", "V2"))
    assert (v1.max_len, v1.append_cls, v1.append_eos) == (2048, False, False)
    assert (v2.max_len, v2.append_cls, v2.append_eos) == (4096, True, True)
    assert v1.vocab.special_tokens == ("<pad>", "<mask>")
    assert (v2.vocab.pad_id, v2.vocab.mask_id, v2.vocab.cls_id, v2.vocab.eos_id) == (0, 1, 2, 3)
    for tokens, medians, version, message in (
        (V1, MEDIANS, "V2", "pass the dictionaries of version V2, or the version that matches the dictionaries"),
        (V2, MEDIANS, "V1", "pass the dictionaries of version V1, or the version that matches the dictionaries"),
        (
            V1 | {GENES[0]: 500},
            MEDIANS,
            "V1",
            "must be consecutive integers from 0; pass a token dictionary as published",
        ),
        (V1, {GENES[0]: 1.0}, "V1", "no positive median for 119 genes"),
    ):
        with pytest.raises(DataError, match=message):
            RankValueTokenizer.from_geneformer((tokens, medians), version)
