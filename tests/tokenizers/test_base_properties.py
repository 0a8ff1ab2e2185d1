"""What holds for every tokenizer whatever the cells: random blocks with all that is odd in real data.

Shapes: B cells, S tokens, G genes.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse

from scforge.data import CellBlock, GeneVocab
from scforge.tokenizers import Masking, get_tokenizer, list_tokenizers
from scforge.tokenizers.base import TOKENIZERS

# The same examples in every run, so that nobody's change fails on a chance find of another's.
thorough = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
OPTIONS: dict[str, list[dict]] = {
    "binned_expression": [
        {"truncation": "highest"},
        {"side": "one", "n_bins": 5},
        {"side": "tahoe", "truncation": "highest"},
        {"edges": [4.0, 6.0, 8.0], "truncation": "highest"},
        {"include_zero_genes": True, "truncation": "highest"},
        {"include_zero_genes": True},
    ],
    "continuous_projection": [
        {"order": "expression"},
        {"order": "random", "transform": "counts", "clip": 30.0, "attention_bias": True},
        {"include_zero_genes": True},
        {"target_depth": "t4", "library_size": "vocabulary"},
    ],
    "entropy_ranked": [{"weighting": "inverse"}],
    "rank_value": [{"use_medians": False}, {"parity": "exact"}],
}
every_tokenizer = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items()) or 'default'}")
        for name in list_tokenizers()
        for options in [{}, *OPTIONS.get(name, [])]
    ],
)
# Many equal ones, large ones, neighbors of large ones: all are float32 numbers.
COUNTS = st.one_of(
    st.sampled_from([1, 1, 1, 2, 3]),
    st.integers(1, 40),
    st.sampled_from([255, 256, 1023, 1024, 2**24 - 1, 2**24, 2**30, 2**31 - 128, 2**31]),
)
DTYPES = ["uint8", "uint16", "int32", "int64", "float32", "float64"]


@st.composite
def blocks(draw, counts=COUNTS):
    """Draw counts (B, G): empty cells, one gene, cells of all genes."""
    n_genes = draw(st.integers(1, 24))
    dense = np.zeros((draw(st.integers(1, 5)), n_genes), dtype=np.int64)
    for row in dense:
        n_expressed = draw(st.sampled_from([0, 1, n_genes // 2, n_genes]))
        genes = draw(st.permutations(range(n_genes)))[:n_expressed]
        row[genes] = draw(st.lists(counts, min_size=n_expressed, max_size=n_expressed))
    return dense


def make(name, n_genes, seed=0, **options):
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(n_genes)])
    vocab = vocab.with_medians(np.random.default_rng(seed).choice([0.5, 1.0, 1.7, 3.0, 1 / 3], n_genes))
    vocab = vocab.with_entropies(np.random.default_rng(seed).choice([0.0, 0.3, 0.31, 0.9, 1.0], n_genes))
    return get_tokenizer(name, vocab.with_special_tokens(*TOKENIZERS.get(name).special_tokens(options)), **options)


def plain(dense):
    return CellBlock.from_csr(sparse.csr_matrix(dense.astype(np.float64)))


def genes_of(tokenizer, batch, row):
    ids = batch["input_ids"][row].numpy()
    return ids[ids >= tokenizer.vocab.n_special] - tokenizer.vocab.n_special


def assert_same(one, two):
    assert set(one) == set(two)
    for key in one:
        assert torch.equal(one[key], two[key]), key


def messy(dense, dtype, draw):
    """Store the same counts in any order, some in two entries, with zeros between."""
    first = np.minimum(draw(st.integers(0, 3)), dense) if draw(st.booleans()) else dense // 2
    stored = np.concatenate([first, dense - first], axis=1)
    n_cells, n_stored = stored.shape
    order = np.argsort(np.random.default_rng(draw(st.integers(0, 99))).random(n_stored))
    columns = np.tile(np.arange(dense.shape[1]), 2)[order]
    indptr = np.arange(n_cells + 1) * n_stored
    matrix = sparse.csr_matrix((stored[:, order].ravel(), np.tile(columns, n_cells), indptr), shape=dense.shape)
    return matrix.astype(dtype)


@every_tokenizer
@thorough
@given(dense=blocks(), data=st.data())
def test_any_form_of_the_matrix_gives_the_same_tokens(name, options, dense, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    if np.dtype(dtype).kind in "iu":
        dense = np.minimum(dense, np.iinfo(dtype).max)
    tokenizer = make(name, dense.shape[1], max_len=data.draw(st.sampled_from([None, 5, 12])), **options)
    matrix = messy(dense, dtype, data.draw)
    before = [matrix.data.copy(), matrix.indices.copy(), matrix.indptr.copy()]
    assert_same(tokenizer(matrix), tokenizer(plain(dense)))
    assert all(np.array_equal(a, b) for a, b in zip(before, (matrix.data, matrix.indices, matrix.indptr), strict=True))
    names = np.array(tokenizer.vocab.genes)
    assert_same(tokenizer(matrix, names), tokenizer(sparse.csr_matrix(dense.astype(np.float64)), names))


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("dtype", ["int8", "uint16"])
def test_sums_do_not_overflow(dtype, named):
    """Two entries of one gene in a cell have a sum that the dtype of the matrix may not hold."""
    most = np.iinfo(dtype).max
    matrix = sparse.csr_matrix((np.array([most, most, 2], dtype=dtype), [1, 1, 0], [0, 3]), shape=(1, 3))
    tokenizer = make("continuous_projection", 3, transform="counts", append_cls=False)
    batch = tokenizer(matrix, ["g0", "g1", "g2"] if named else None)
    assert batch["values"].tolist() == [[2.0, 2.0 * most]]
    counts = sparse.csr_matrix(np.array([[2.0**31, 1.0, 2.0**20]], dtype=np.float32))
    assert CellBlock.from_csr(counts).totals.tolist() == [2.0**31 + 2.0**20 + 1]


@every_tokenizer
@thorough
@given(dense=blocks(), data=st.data())
def test_invariants(name, options, dense, data):
    max_len = data.draw(st.sampled_from([None, 5, 12]))
    eos = {"append_eos": data.draw(st.booleans()), "append_cls": data.draw(st.booleans())}
    tokenizer = make(name, dense.shape[1], max_len=max_len, **options, **eos)
    block = plain(dense)
    batch = tokenizer(block)
    mask = batch["attention_mask"]
    assert torch.equal(mask, batch["input_ids"] != 0)
    assert torch.equal(mask.sum(dim=1), torch.from_numpy(tokenizer.lengths(np.count_nonzero(dense, axis=1))))
    assert not (mask[:, 1:] & ~mask[:, :-1]).any()
    assert max_len is None or mask.shape[1] <= max(max_len, 1)
    assert all(tensor.isfinite().all() for tensor in batch.values())
    ragged = tokenizer.ragged(block)
    for key, array in {"input_ids": ragged.ids, "values": ragged.values, **ragged.extras}.items():
        np.testing.assert_array_equal(batch[key][mask], array)
    zeros = getattr(tokenizer, "include_zero_genes", False)
    for row, counts in enumerate(dense):
        genes = genes_of(tokenizer, batch, row)
        assert len(set(genes)) == len(genes)
        assert len(genes) == min(len(counts) if zeros else np.count_nonzero(counts), tokenizer.most_genes)
        assert zeros or counts[genes].all()
        weighs = tokenizer.needs_entropies or (name == "rank_value" and tokenizer.use_medians)
        if not getattr(tokenizer, "samples", False) and not weighs:
            assert np.delete(counts, genes).max(initial=0) <= counts[genes].min(initial=2**32)


@every_tokenizer
@thorough
@given(dense=blocks(), ratio=st.sampled_from([0.01, 0.15, 0.5, 0.99]), data=st.data())
def test_masking(name, options, dense, ratio, data):
    tokenizer = make(name, dense.shape[1], append_eos=True, max_len=data.draw(st.sampled_from([None, 7])), **options)
    vocab = tokenizer.vocab
    shares = data.draw(st.sampled_from([(0.8, 0.1), (0.0, 1.0), (0.0, 0.0), (1.0, 0.0)]))
    seed, epoch = data.draw(st.integers(0, 2**31)), data.draw(st.integers(0, 1000))
    masking = Masking(vocab, mask_ratio=ratio, mask_token_prob=shares[0], random_token_prob=shares[1], seed=seed)
    rows = np.arange(len(dense)) + data.draw(st.sampled_from([0, 2**33]))
    batch = tokenizer(plain(dense))
    before = {key: tensor.clone() for key, tensor in batch.items()}
    last = data.draw(st.booleans())
    masked = masking(batch, rows, epoch=epoch, hidden_last=last)
    assert_same(batch, before)
    chosen, labels, ids = masked["masked_positions"], masked["labels"], masked["input_ids"]
    n_genes = (batch["input_ids"] >= vocab.n_special).sum(dim=1)
    n_chosen = torch.clamp(torch.floor(n_genes * ratio + 0.5).long(), min=1).clamp(max=n_genes)
    assert torch.equal(chosen.sum(dim=1), n_chosen)
    assert torch.equal(chosen, labels != -100)
    assert (labels[chosen] >= vocab.n_special).all()
    assert ((ids[chosen] >= vocab.n_special) | (ids[chosen] == vocab.mask_id)).all()
    assert ids.max() < len(vocab)
    assert torch.equal(masked["attention_mask"], batch["attention_mask"])
    for key in set(batch) - {"input_ids", "attention_mask"}:
        assert not masked[key][chosen].any()
    whole = torch.where(chosen, labels, ids)
    if last:
        special = batch["input_ids"] < vocab.n_special
        assert torch.equal(whole[special], batch["input_ids"][special])
        assert torch.equal(whole.sort(dim=1).values, batch["input_ids"].sort(dim=1).values)
    else:
        assert torch.equal(whole, batch["input_ids"])
    # Where a token went, what is told of it went too: the visible in their keys, the hidden in the targets.
    targets = {"values": ("value_labels", 0), "bin_ids": ("bin_labels", -100)}
    for key in set(batch) - {"input_ids", "attention_mask"}:
        of_gene = torch.zeros(len(dense), len(vocab), dtype=batch[key].dtype).scatter_(
            1, batch["input_ids"], batch[key]
        )
        told = of_gene.gather(1, whole)
        assert torch.equal(masked[key][~chosen], told[~chosen])
        if key in targets:
            target, ignore = targets[key]
            assert torch.equal(masked[target], told.masked_fill(~chosen, ignore))
    # One cell alone, in another batch, has the same mask.
    row = data.draw(st.integers(0, len(dense) - 1))
    alone = {
        key: tensor[[row, row]][:, : max(int(batch["attention_mask"][row].sum()), 1)] for key, tensor in batch.items()
    }
    again = masking(alone, rows[[row, row]], epoch=epoch, hidden_last=last)
    for key, tensor in again.items():
        for copy in tensor:
            assert torch.equal(copy, masked[key][row, : tensor.shape[1]]), key
