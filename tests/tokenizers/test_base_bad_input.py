"""What is not a count, no name and no option is refused in one sentence, before a kernel meets it."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse

from scforge.data import GeneVocab
from scforge.data.genes import GeneMap
from scforge.errors import DataError, GeneMismatchError, MissingFileError, OptionError, ScforgeError
from scforge.tokenizers import Masking, RankValueTokenizer, get_tokenizer, list_tokenizers
from scforge.tokenizers.binned_expression import bin_entries

N_GENES = 50
VOCAB = (
    GeneVocab.from_genes([f"G{i}" for i in range(N_GENES)])
    .with_medians(np.ones(N_GENES))
    .with_entropies(np.full(N_GENES, 0.5))
)
COUNTS = np.random.default_rng(0).poisson(0.5, (6, N_GENES)).astype(np.float32)
every_tokenizer = pytest.mark.parametrize("name", ["binned_expression", "continuous_projection", "rank_value"])


def fails(call, error: type[ScforgeError], *parts: str) -> None:
    """Check that `call` raises exactly `error`, with one line that holds `parts`."""
    with pytest.raises(ScforgeError) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert "\n" not in message
    assert ".." not in message.replace("...", "")
    assert len(message) < 500
    for part in parts:
        assert part in message


VALUES = [
    (-3, "cells contains negative values (smallest: -3), but raw counts are needed"),
    (np.nan, "cells contains 1 missing or infinite values"),
    (-np.inf, "cells contains 1 missing or infinite values"),
    (0.5, "cells contains values that are not whole numbers (first: 0.5)"),
    (1e39, "cells contains values above the largest float32, 3.4e+38 (largest: 1e+39)"),
]


@every_tokenizer
@pytest.mark.parametrize(("value", "message"), VALUES)
def test_values_that_are_no_counts(name, value, message) -> None:
    tokenizer = get_tokenizer(name, VOCAB)
    counts = COUNTS.astype(np.float64)
    counts[2, 3] = value
    for matrix in (sparse.csr_matrix(counts), counts, sparse.csc_matrix(counts)):
        for genes in (None, VOCAB.genes):
            fails(lambda m=matrix, g=genes: tokenizer(m, g), DataError, message)


@every_tokenizer
@pytest.mark.parametrize("named", [False, True])
def test_any_kind_of_matrix(name, named) -> None:
    tokenizer = get_tokenizer(name, VOCAB)
    genes = list(VOCAB.genes) if named else None
    square = np.random.default_rng(1).poisson(0.5, (N_GENES, N_GENES)).astype(np.float32)
    expected = tokenizer(sparse.csr_matrix(square), genes)
    kinds = (
        np.asarray, np.asfortranarray, sparse.csc_matrix, sparse.coo_matrix, sparse.csr_array,
        np.float16, np.longdouble, np.uint8, lambda x: x.astype(">f4"), lambda x: x.astype(">i4"),
    )  # fmt: skip
    for kind in kinds:
        batch = tokenizer(kind(square), genes)
        assert all(torch.equal(batch[key], expected[key]) for key in expected)
    one, two = tokenizer(square > 0, genes), tokenizer((square > 0).astype(int), genes)
    assert all(torch.equal(one[key], two[key]) for key in one)


NO_MATRIX = [
    (
        COUNTS.tolist(),
        OptionError,
        "cells is of type 'list' and not a numeric matrix; pass counts of shape (cells, genes)",
    ),
    (ad.AnnData(COUNTS), OptionError, "cells is of type 'AnnData' and not a numeric matrix"),
    (COUNTS[0], OptionError, "cells is of type 'ndarray' and not a numeric matrix"),
    (COUNTS.astype(object), OptionError, "cells is of type 'ndarray' and not a numeric matrix"),
    (COUNTS[:, :20], DataError, "cells has 20 columns, but the vocabulary has 50 genes; pass the column names"),
]


@pytest.mark.parametrize(("cells", "error", "message"), NO_MATRIX, ids=[m[:30] for *_, m in NO_MATRIX])
def test_no_matrix_of_counts(cells, error, message) -> None:
    tokenizer = get_tokenizer("rank_value", VOCAB)
    fails(lambda: tokenizer(cells), error, message)
    assert tokenizer(COUNTS[:0])["input_ids"].shape[0] == 0


@every_tokenizer
def test_a_damaged_matrix(name) -> None:
    tokenizer = get_tokenizer(name, VOCAB)
    for part, place, value, kind in (
        ("indices", 0, 10**6, "csr"), ("indices", 0, -5, "csr"), ("indptr", 3, 10**7, "csr"), ("indptr", 3, 0, "csr"),
        ("indptr", -1, 10**7, "csr"), ("indptr", 0, 1, "csr"), ("indices", 0, 6, "csc"),
    ):  # fmt: skip
        matrix = sparse.csr_matrix(COUNTS).asformat(kind, copy=True)
        getattr(matrix, part)[place] = value
        for genes in (None, VOCAB.genes):
            fails(lambda m=matrix, g=genes: tokenizer(m, g), DataError, "cells is corrupted")


TOTALS = [
    (np.ones(5), "totals has shape (5,), but there are 6 cells"),
    (3.0, "totals has shape ()"),
    ([1, 2, 3, 4, 5, np.nan], "totals contains nan, which is not a library size"),
    ([1, 2, 3, 4, -5, 6], "totals contains -5"),
]


@pytest.mark.parametrize(("totals", "message"), TOTALS, ids=[message for _, message in TOTALS])
@pytest.mark.parametrize("options", [{}, {"parity": "exact"}])
def test_totals(totals, message, options) -> None:
    tokenizer = get_tokenizer("rank_value", VOCAB, **options)
    for genes in (None, VOCAB.genes):
        fails(lambda g=genes: tokenizer(COUNTS, g, totals=totals), DataError, message)
    tokenizer(COUNTS, totals=[0, 1, 2, 3, 4, 5])


@every_tokenizer
def test_a_map_onto_another_vocabulary(name) -> None:
    tokenizer = get_tokenizer(name, VOCAB)
    hint = "create the GeneMap with GeneMap.of(names, tokenizer.vocab)."
    wide = sparse.csr_matrix((np.ones(3, np.float32), [5, 10**6, 10**7 - 1], [0, 3]), shape=(1, 10**7))
    foreign = GeneMap(np.arange(10**7, dtype=np.int32), 10**7)
    fails(lambda: tokenizer(wide, foreign), DataError, "for 10000000 genes, but the vocabulary has 50 genes; " + hint)
    beyond = GeneMap(np.arange(1, N_GENES + 1, dtype=np.int32), N_GENES)
    fails(lambda: tokenizer(COUNTS, beyond), DataError, "for 51 genes, but the vocabulary has 50 genes; " + hint)
    nothing = GeneMap(np.full(N_GENES, -1, dtype=np.int32), N_GENES)
    fails(lambda: tokenizer(COUNTS, nothing), GeneMismatchError, "none of the 50 genes of the vocabulary; " + hint)
    tokenizer(COUNTS, GeneMap.of(VOCAB.genes, VOCAB))


def test_names_of_which_none_is_in_the_vocabulary() -> None:
    vocab = GeneVocab.from_genes(["ENSG00000167286", "ENSG00000090382"])
    tokenizer = get_tokenizer("continuous_projection", vocab)
    start = "gene_ids contains none of the 2 genes of the vocabulary. It contains "
    convert = "convert them with scforge.data.convert_gene_ids(names, to='ensembl', species='human')."
    for names, kind, hint in [
        (["CD19", "MS4A1"], "human gene symbols such as 'CD19', 'MS4A1'", convert),
        (["ENSMUSG00000032094", "ENSMUSG00000069516"], "mouse Ensembl ids", "convert them to the names in the vocab"),
        (
            ["x1", "x2"],
            "names of an unknown kind such as 'x1', 'x2', but the vocabulary contains human Ensembl ids",
            "convert them to the names in the vocabulary",
        ),
        ([0, 1], "numbers (Entrez ids?)", "convert them to the names in the vocabulary"),
    ]:
        fails(lambda n=names: tokenizer(COUNTS[:, :2], n), GeneMismatchError, start + kind, hint)
    for names in ("ENSG00000167286", 5):
        fails(lambda n=names: tokenizer(COUNTS[:, :2], n), OptionError, f"names={names!r} is not a list of names")
    hint = "gene_ids contains 1 genes, but cells has 2 columns"
    fails(lambda: tokenizer(COUNTS[:, :2], ["ENSG00000167286"]), DataError, hint)


SWITCHES = {"append_cls": None, "append_eos": None, "use_medians": "rank_value", "collapse_duplicates": "rank_value"}
SWITCHES |= {"freeze": "gene_embedding"}


def options_that_are_none():
    """Yield the tokenizer, its options, and what is told."""
    for value in ("false", 1, None):
        for option, owner in SWITCHES.items():
            for name in list_tokenizers() if owner is None else [owner]:
                yield name, {option: value}, f"{option}={value!r} must be True or False."
    for name in list_tokenizers():
        yield name, {"max_len": -1}, "max_len=-1 is too small; pass at least 0"
        yield name, {"max_len": "8"}, "max_len='8' is not a whole number of tokens"


def test_options() -> None:
    for name, options, message in options_that_are_none():
        fails(lambda n=name, o=options: get_tokenizer(n, VOCAB, **o), OptionError, message)
    for name in list_tokenizers():
        assert get_tokenizer(name, VOCAB, max_len=2**31 - 1)(COUNTS)["input_ids"].shape[1] < 60
    for option, value, message in (
        ("mask_token_prob", "0.5", "mask_token_prob='0.5' is not a number from 0 to 1."),
        ("random_token_prob", True, "random_token_prob=True is not a number from 0 to 1."),
        ("random_token_prob", 1.5, "random_token_prob=1.5 is not a number from 0 to 1."),
        ("seed", "0", "seed='0' is not a whole number"),
        ("seed", -1, "seed=-1 is too small; pass at least 0"),
        ("seed", 2**63, f"seed={2**63} is too large"),
    ):
        fails(lambda o=option, v=value: Masking(VOCAB, **{o: v}), OptionError, message)


TOKENS = {"<pad>": 0, "<mask>": 1, "ENSG00000000003": 2, "ENSG00000000005": 3}
MEDIANS = {"ENSG00000000003": 2.0, "ENSG00000000005": 0.5}
BOTH = "pass the two dictionaries (gene to token, gene to median) as a tuple."
TEXT = pd.DataFrame({"gene_id": list(TOKENS), "token": ["a"] * 4, "median": [1.0] * 4})
ONE = "ENSG00000000005"
GENEFORMER = [
    (TOKENS, DataError, "tokens_medians is not a table with the columns 'gene_id', 'token', 'median' (it has: '<pad>'"),
    ((TOKENS, 3), OptionError, "tokens_medians is not a pair of dictionaries; " + BOTH),
    (None, DataError, "(it has: NoneType); pass such a table, a file, or the two dictionaries"),
    ((MEDIANS, TOKENS), DataError, "the token ids in tokens_medians must be consecutive integers from 0"),
    (({**TOKENS, "<pad>": "0"}, MEDIANS), DataError, "tokens_medians contains the token '0', which is not a number"),
    ((TOKENS, {**MEDIANS, ONE: "a"}), DataError, "contains the median 'a', which is not a number"),
    ((TOKENS, {**MEDIANS, ONE: -1.0}), DataError, f"has no positive median for 1 genes (first: '{ONE}', -1.0)"),
    ((TOKENS, {**MEDIANS, ONE: np.nan}), DataError, f"has no positive median for 1 genes (first: '{ONE}', nan)"),
    (TEXT, DataError, "tokens_medians contains the token 'a', which is not a number"),
    (
        TEXT[["gene_id"]],
        DataError,
        "tokens_medians is not a table with the columns 'gene_id', 'token', 'median' (it has: 'ge",
    ),
    ("gone.parquet", MissingFileError, "tokens_medians='gone.parquet' does not exist"),
]


@pytest.mark.parametrize(("parts", "error", "message"), GENEFORMER, ids=[message[:60] for *_, message in GENEFORMER])
def test_dictionaries_of_geneformer(parts, error, message) -> None:
    fails(lambda: RankValueTokenizer.from_geneformer(parts, version="V1"), error, message)


def test_options_of_geneformer(tmp_path) -> None:
    def make(**options):
        return RankValueTokenizer.from_geneformer([TOKENS, MEDIANS], **({"version": "V1"} | options))

    assert make().vocab.genes == tuple(MEDIANS)
    fails(lambda: make(version="V3"), OptionError, "version='V3' is not known (known: 'V1', 'V2')")
    hint = (
        "ensembl_map is not a table with the columns 'ensembl_id', 'gene_id' (it has: list); pass such a table, a file"
    )
    fails(lambda: make(ensembl_map=[1]), DataError, hint)
    fails(lambda: make(ensembl_map="map.pkl"), OptionError, "ensembl_map='map.pkl' is a pickle file")
    (tmp_path / "tokens.pkl").write_bytes(b"no pickle is opened")
    (tmp_path / "tokens.parquet").write_text("hello")
    call = RankValueTokenizer.from_geneformer
    hint = "tokens.pkl' is a pickle file, which can run code; if you trust it, read it with pickle.load and " + BOTH
    fails(lambda: call(tmp_path / "tokens.pkl"), OptionError, hint)
    fails(lambda: call(tmp_path / "tokens.parquet"), DataError, "cannot be read as a table: ")


def test_bins_of_a_block_that_nobody_checked_stay_in_bounds() -> None:
    for value in (-3e9, -1.0, np.nan, np.inf, -np.inf):
        bins = bin_entries(np.array([0, 20]), np.r_[value, np.ones(19)].astype(np.float32), 51, "one")
        assert bins.min() >= 0
        assert bins.max() <= 50
