import numpy as np
import pytest
from scipy import sparse

from scforge.data import CellBlock, GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers import get_tokenizer
from scforge.tokenizers import rank_value as _ranking

N_GENES = 700
rng = np.random.default_rng(0)
MEDIANS = {
    "spread": rng.lognormal(0, 2, N_GENES),
    "close as single precision tells": 1 + rng.integers(0, 40, N_GENES) * 2.0**-26,
    "a chain of close ones": 1 + np.arange(N_GENES)[rng.permutation(N_GENES)] * 2.0**-25,
    "halves and doubles": 2.0 ** rng.integers(-3, 4, N_GENES) * (1 + rng.integers(0, 3, N_GENES) * 2.0**-50),
    "equal": np.ones(N_GENES),
    "equal and close ones": (1 + rng.integers(0, 12, N_GENES) * 2.0**-23) * rng.choice([1, 1 / 3, 1 / 7], N_GENES),
    "simple ratios": rng.choice([1, 1 / 3, 1 / 7, 2 / 3, 3 / 7, 2, 5 / 3], N_GENES),
    "beyond the table": 10.0 ** rng.uniform(-15, 15, N_GENES),
    "one far off": np.r_[1e-19, 1 + rng.random(N_GENES - 1) * 1e-4],
}


def reference(counts, total, medians):
    genes = np.flatnonzero(counts)
    keys = counts[genes].astype(np.float64) * (1 / total) * 1e4 * (1 / medians[genes])
    return genes[np.argsort(-keys, kind="stable")]


@pytest.mark.parametrize("kind", list(MEDIANS))
@pytest.mark.parametrize(("largest", "most"), [(1, 2**16), (1000, 2**16), (1000, 0), (2**31, 2**16)])
def test_order(kind, largest, most, monkeypatch):
    monkeypatch.setattr(_ranking, "_MAX", most)  # 0: gene and count do not travel with the key
    medians = MEDIANS[kind]
    counts = np.floor(np.exp(rng.random((40, N_GENES)) * np.log(largest + 1))) * (rng.random((40, N_GENES)) < 0.6)
    counts = counts.astype(np.float32)
    counts[3] = 0
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(N_GENES)]).with_medians(medians)
    block = CellBlock.from_csr(sparse.csr_matrix(counts))
    tokens = get_tokenizer("rank_value", vocab, append_cls=False)._tokenize(block)
    for cell in range(40):
        ids = tokens.ids[tokens.indptr[cell] : tokens.indptr[cell + 1]] - vocab.n_special
        np.testing.assert_array_equal(ids, reference(counts[cell], max(block.totals[cell], 1), medians))


@pytest.mark.parametrize("median", [1e-30, 1e30])
def test_medians_of_nothing(median):
    vocab = GeneVocab.from_genes(["a", "b"]).with_medians([1.0, median])
    with pytest.raises(OptionError, match="the vocabulary has medians from"):
        get_tokenizer("rank_value", vocab)
