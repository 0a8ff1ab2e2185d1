"""What every registered tokenizer promises. A new one is covered by a line in OPTIONS."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from scforge.data import CellBlock, GeneVocab, open_cells
from scforge.tokenizers import Masking, get_tokenizer, list_tokenizers
from scforge.tokenizers.batch import pad

OPTIONS: dict[str, list[dict]] = {
    "continuous_projection": [{}, {"append_cls": False}, {"max_len": 7}],
    "rank_value": [{}, {"append_cls": False}, {"max_len": 7}, {"use_medians": False}],
}
CASES = [
    pytest.param(name, options, id=f"{name}-{i}")
    for name in list_tokenizers()
    for i, options in enumerate(OPTIONS.get(name, [{}]))
]
every_tokenizer = pytest.mark.parametrize(("name", "options"), CASES)


@pytest.fixture
def cells(tiny_adata, tiny_vocab):
    return open_cells(tiny_adata, tiny_vocab)


def test_every_tokenizer_has_options_here():
    assert set(OPTIONS) <= set(list_tokenizers())


@every_tokenizer
def test_batch(cells, tiny_vocab, name, options):
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    batch = tokenizer(cells.block(np.arange(60)))
    ids, mask, values = batch["input_ids"], batch["attention_mask"], batch["values"]
    assert set(batch) == {"input_ids", "attention_mask", "values"}
    assert (ids.dtype, mask.dtype, values.dtype) == (torch.int64, torch.bool, torch.float32)
    assert ids.shape == mask.shape == values.shape
    assert mask[:, :1].all()
    assert torch.equal(mask, ids != 0)
    assert torch.equal(mask.sum(dim=1), torch.from_numpy(tokenizer.lengths(cells.n_expressed)))
    assert ids.shape[1] == mask.sum(dim=1).max()
    assert ids.shape[1] <= tokenizer.max_tokens()
    assert ids.max() < len(tiny_vocab)
    if tokenizer.max_len is not None:
        assert ids.shape[1] <= tokenizer.max_len
    if tokenizer.append_cls:
        assert (ids[:, 0] == 3).all()
        assert not values[:, 0].any()
    genes = ids >= 4
    assert (genes.sum(dim=1) == mask.sum(dim=1) - int(tokenizer.append_cls)).all()
    assert (values[genes] > 0).all()
    for row in ids:
        assert len(set(row[row >= 4].tolist())) == int((row >= 4).sum())


@every_tokenizer
def test_one_cell_is_a_block_of_one(cells, tiny_vocab, name, options):
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    whole = tokenizer(cells.block(np.arange(60)))
    for row in (0, 31):
        one = tokenizer(cells.block(np.array([row])))
        n = one["input_ids"].shape[1]
        for key in one:
            assert torch.equal(one[key][0], whole[key][row, :n])


@every_tokenizer
def test_gene_order_of_the_data_does_not_matter(tiny_adata, tiny_vocab, name, options):
    order = np.random.default_rng(0).permutation(80)
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    one, two = (
        tokenizer(open_cells(adata, tiny_vocab).block(np.arange(60)))
        for adata in (tiny_adata, tiny_adata[:, order].copy())
    )
    assert all(torch.equal(one[key], two[key]) for key in one)


@every_tokenizer
def test_padded_is_ragged(cells, tiny_vocab, name, options):
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    block = cells.block(np.array([3, 50, 4]))
    ragged, batch = tokenizer.ragged(block), tokenizer(block)
    np.testing.assert_array_equal(batch["input_ids"][batch["attention_mask"]], ragged.ids)
    np.testing.assert_array_equal(batch["values"][batch["attention_mask"]], ragged.values)
    np.testing.assert_array_equal(batch["attention_mask"].sum(dim=1), np.diff(ragged.indptr))
    assert torch.equal(pad(ragged)["input_ids"], batch["input_ids"])


@every_tokenizer
def test_matrix_and_block_mean_the_same(cells, tiny_vocab, name, options):
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    one, two = tokenizer(cells.counts[:9], totals=cells.totals[:9]), tokenizer(cells.block(np.arange(9)))
    assert all(torch.equal(one[key], two[key]) for key in one)


@every_tokenizer
def test_config_makes_it_again(cells, tiny_vocab, name, options):
    tokenizer = get_tokenizer(name, tiny_vocab, **options)
    config = json.loads(json.dumps(tokenizer.config()))
    assert options.items() <= config.items()
    again = get_tokenizer(name, tiny_vocab, **config)
    assert repr(again) == repr(tokenizer)
    one, two = (t(cells.block(np.arange(60))) for t in (tokenizer, again))
    assert all(torch.equal(one[key], two[key]) for key in one)


@every_tokenizer
def test_values_are_finite_for_huge_counts(tiny_vocab, name, options):
    counts = np.zeros((1, 80))
    counts[0, :3] = [1, 1e6, 3e7]
    batch = get_tokenizer(name, tiny_vocab, **options)(sparse.csr_matrix(counts))
    assert batch["values"].isfinite().all()
    assert int((batch["input_ids"] >= 4).sum()) == 3


ODD_COUNTS = hnp.arrays(
    np.int64,
    st.tuples(st.integers(1, 5), st.integers(1, 6)),
    elements=st.one_of(st.just(0), st.integers(0, 3), st.just(100_000)),
)


@every_tokenizer
@settings(max_examples=40, deadline=None)
@given(dense=ODD_COUNTS, data=st.data())
def test_odd_blocks(name, options, dense, data):
    """Empty cells, one gene, explicit zeros and counts in two pieces give what the dense matrix says."""
    n_cells, n_genes = dense.shape
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(n_genes)]).with_medians(np.arange(1.0, n_genes + 1))
    # Every entry stored, in any order, some as a zero and some as two halves.
    first = data.draw(hnp.arrays(np.int64, dense.shape, elements=st.integers(0, 3)))
    first = np.minimum(first, dense)
    order = np.argsort(data.draw(hnp.arrays(np.float64, 2 * n_genes, elements=st.floats(0, 1))))
    stored = np.concatenate([first, dense - first], axis=1)[:, order]
    columns = np.tile(np.tile(np.arange(n_genes), 2)[order], n_cells)
    indptr = np.arange(n_cells + 1) * 2 * n_genes
    messy = sparse.csr_matrix((stored.ravel().astype(np.float32), columns, indptr), shape=dense.shape)

    tokenizer = get_tokenizer(name, vocab, **options)
    batch = tokenizer(messy)
    tidy = tokenizer(CellBlock.from_csr(sparse.csr_matrix(dense)))
    assert all(torch.equal(batch[key], tidy[key]) for key in batch)
    assert batch["values"].isfinite().all()
    for row, ids, mask in zip(dense, batch["input_ids"], batch["attention_mask"], strict=True):
        genes = set((ids[ids >= 4] - 4).tolist())
        assert genes <= set(np.flatnonzero(row).tolist())
        assert len(genes) == min(np.count_nonzero(row), tokenizer.most_genes)
        assert int(mask.sum()) == len(genes) + tokenizer.append_cls
    masked = Masking(len(vocab))(batch, np.arange(n_cells), epoch=0)
    n_genes_of_cell = (batch["input_ids"] >= 4).sum(dim=1)
    assert torch.equal(masked["masked_positions"].any(dim=1), n_genes_of_cell > 0)
