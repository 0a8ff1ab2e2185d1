import numba
import numpy as np
import pytest
import torch
from scipy import sparse

import scforge.testing.tokenizers
from scforge.data import CellBlock, GeneVocab
from scforge.data.cells import content_keys
from scforge.errors import OptionError
from scforge.testing import check_tokenizer, raises
from scforge.tokenizers import Masking, Tokenizer
from scforge.tokenizers.base import RaggedTokens


class Sorted(Tokenizer):
    """The most expressed genes in the order of the vocabulary, with a level as an extra. Correct."""

    ordered_by_gene = True

    def __init__(self, vocab, *, max_len=None, append_cls=True, append_eos=False, scale=1.0):
        super().__init__(vocab, max_len=max_len, append_cls=append_cls, append_eos=append_eos)
        self.scale = scale

    def choose(self, counts, key):
        return np.sort(np.argsort(-counts, kind="stable")[: self.most_genes])

    def keys(self, block):
        return content_keys(block, seed=0, stream=7)

    def _tokenize(self, block):
        cells = zip(block.indptr[:-1], block.indptr[1:], self.keys(block), strict=True)
        picks = [start + self.choose(block.counts[start:stop], int(key)) for start, stop, key in cells]
        indptr = np.cumsum([0, *map(len, picks)])
        kept = np.concatenate([np.empty(0, dtype=np.int64), *picks])
        values = self.scale * np.log1p(block.counts[kept])
        ids = (block.genes[kept] + self.vocab.n_special).astype(np.int32)
        return RaggedTokens(indptr, ids, values.astype(np.float32), {"bin_ids": np.ones(len(kept), dtype=np.int32)})


class Drawn(Sorted):
    """Genes drawn at random, in random order. Correct."""

    ordered_by_gene = False
    samples = True

    def choose(self, counts, key):
        return np.random.default_rng(key).permutation(len(counts))[: self.most_genes]


class Few(Sorted):
    """Five genes of a cell at most, whatever `max_len` is. Correct."""

    @property
    def most_genes(self):
        return min(5, super().most_genes)


class AllGenes(Tokenizer):
    """All measured genes, also those without counts, in the order of their counts. Correct."""

    ordered_by_gene = True

    def measured(self, block):
        return np.arange(self.vocab.n_genes) if block.measured is None else np.flatnonzero(block.measured)

    def lengths(self, n_expressed):
        return super().lengths(np.full_like(n_expressed, self.vocab.n_genes))

    def _tokenize(self, block):
        measured = self.measured(block)
        dense = sparse.csr_matrix((block.counts, block.genes, block.indptr), (len(block), self.vocab.n_genes)).toarray()
        order = np.argsort(-dense[:, measured], axis=1, kind="stable")[:, : self.most_genes]
        values = np.take_along_axis(dense[:, measured], order, axis=1)
        ids = measured[order] + self.vocab.n_special
        indptr = np.arange(len(block) + 1) * order.shape[1]
        return RaggedTokens(indptr, ids.ravel().astype(np.int32), values.ravel().astype(np.float32))


class Broken(Sorted):
    """Correct until a flaw below takes the place of one of its parts."""

    keep = list

    def __init__(self, vocab, *, cutoffs=(1, 2), **options):
        super().__init__(vocab, **options)
        self.cutoffs = type(self).keep(cutoffs)

    def matrix(self, cells, gene_ids):
        return cells, gene_ids

    def batch(self, batch):
        pass

    def tokens(self, tokens):
        return tokens

    def __call__(self, cells, gene_ids=None, *, totals=None):
        if not isinstance(cells, CellBlock):
            cells, gene_ids = self.matrix(cells, gene_ids)
        batch = super().__call__(cells, gene_ids, totals=totals)
        self.batch(batch)
        return batch

    def _tokenize(self, block):
        return self.tokens(super()._tokenize(block))


@pytest.mark.parametrize("cls", [Sorted, Drawn, Few, AllGenes, Broken])
@pytest.mark.parametrize("options", [{}, {"append_cls": False}, {"append_eos": True}, {"max_len": 9}])
def test_correct_ones_pass(cls, options):
    before = torch.get_num_threads(), numba.get_num_threads()
    check_tokenizer(cls, **options)
    assert (torch.get_num_threads(), numba.get_num_threads()) == before
    if cls is not Broken and not options:
        for n_genes in (1, 300):
            check_tokenizer(cls(GeneVocab.from_genes([f"g{i}" for i in range(n_genes)])))


def change(edit, *names):
    def edit_batch(self, batch):
        for name in names or list(batch):
            batch[name] = edit(batch[name])

    return edit_batch


def forget(part):
    """Return a flaw that does not know names with this part, where names are given."""

    def edit_matrix(self, cells, gene_ids):
        if gene_ids is not None and not hasattr(gene_ids, "columns"):
            gene_ids = [str(name).replace(part, "?") for name in gene_ids[:20]] + list(gene_ids[20:])
        return cells, gene_ids

    return edit_matrix


def threaded(self, tokens):
    return tokens._replace(values=tokens.values + np.float32(torch.get_num_threads() > 1))


def centered_on_the_batch(self, tokens):
    return tokens._replace(values=tokens.values - tokens.values.mean() if len(tokens.values) else tokens.values)


def ties_in_random_order(self, counts, key):
    """From high to low: the neighbors of a hidden token bracket its count."""
    ties = np.random.default_rng(key).permutation(len(counts))
    return ties[np.argsort(-counts[ties], kind="stable")][: self.most_genes]


def option_not_kept(self, vocab, *, cutoff=3, **options):
    Sorted.__init__(self, vocab, **options)


def by_token(self, counts, key):
    return np.arange(len(counts))[: self.most_genes]


FLAWS = [
    # What a batch is.
    ({"choose": lambda self, counts, key: Sorted.choose(self, counts + 0 * counts[0], key)}, "raised IndexError"),
    ({"batch": lambda self, batch: batch.pop("values")}, r"the batch lacks \['values'\]"),
    ({"batch": lambda self, batch: batch.update(labels=batch["input_ids"])}, r"the batch contains \['labels'\]"),
    ({"batch": change(torch.Tensor.int, "input_ids")}, "'input_ids' has dtype torch.int32 instead"),
    ({"batch": change(lambda tensor: tensor[:, 1:], "bin_ids")}, r"'bin_ids' has shape \(16, \d+\)"),
    ({"batch": change(lambda tensor: tensor.flip(1))}, "padding comes before a token"),
    ({"batch": change(torch.ones_like, "attention_mask")}, "attention_mask is not True exactly"),
    ({"batch": change(lambda tensor: tensor - 2, "values")}, "'values' is not 0 at CLS, EOS and padding"),
    ({"batch": change(lambda tensor: torch.nn.functional.pad(tensor, (0, 1)))}, "wider than its longest cell"),
    # Which tokens there are.
    ({"tokens": lambda self, tokens: tokens._replace(ids=tokens.ids + 1)}, "a token id is not in the vocabulary"),
    ({"_frame": (-1, -1)}, "append_cls=True, but a cell has 0 CLS tokens"),
    ({"_frame": (-1, 3)}, "CLS is not before the genes"),
    (
        {"tokens": lambda self, tokens: tokens._replace(ids=np.where(tokens.ids == 6, 5, tokens.ids))},
        "a gene occurs more than once",
    ),
    ({"choose": lambda self, counts, key: Sorted.choose(self, counts, key)[:-1]}, "of cell 3, although it would fit"),
    ({"cls": AllGenes, "measured": lambda self, block: np.arange(self.vocab.n_genes)}, "that is not in the data"),
    ({"lengths": lambda self, n_expressed: np.full_like(n_expressed, 60)}, "returns 60 tokens for cell 0, which has 1"),
    ({"max_tokens": lambda self: 99}, r"max_tokens\(\) is 99, but a cell with all genes has 61 tokens"),
    # The same tokens again, from any form of the cells.
    (
        {"tokens": lambda self, tokens: tokens._replace(values=np.random.rand(len(tokens.ids)).astype("f4"))},
        "a second call",
    ),
    ({"__getstate__": lambda self: vars(self) | {"function": lambda: None}}, "are reproducible raised .*[Pp]ickle"),
    ({"__getstate__": lambda self: vars(self) | {"scale": 2.0}}, "a pickled copy returns different tokens"),
    ({"tokens": threaded}, "[12] threads give different tokens"),
    ({"tokens": centered_on_the_batch}, "cell [01] alone has different tokens than in a block"),
    ({"cls": Drawn, "keys": lambda self, block: block.rows}, "cell .* alone has different tokens than in a block"),
    ({"matrix": lambda self, cells, ids: (cells.minimum(5), ids)}, "a matrix gives different tokens than a block"),
    ({"matrix": forget(".")}, "version suffixes give different tokens"),
    (
        {"matrix": lambda self, x, ids: (x + x if x.dtype == "uint8" else x, ids)},
        "counts as uint8 give different tokens",
    ),
    (
        {"matrix": lambda self, cells, ids: (cells.sum_duplicates() or cells, ids)},
        "the input counts are modified",
    ),
    # The options.
    ({"__init__": option_not_kept}, "config.. creates an equal tokenizer raised AttributeError"),
    ({"keep": tuple}, "config.. changes when it is written as JSON and read again"),
    ({"keep": lambda cutoffs: [*cutoffs, 3]}, "the tokenizer created from config.. has a different config"),
    ({"config": lambda self: {"cutoffs": [1, 2]}}, "config.. and the keyword-only options differ in .*'scale'"),
    # What is cut, and the order.
    ({"choose": lambda self, counts, key: np.arange(len(counts))}, "a cell has 61 tokens, but max_len=8"),
    ({"choose": by_token}, "truncation keeps the genes that come first in the vocabulary"),
    ({"cls": Drawn, "samples": False}, "truncation drops a count of .* but keeps .*; set samples = True"),
    ({"choose": lambda self, counts, key: Sorted.choose(self, -counts, key)}, "drops a count of .*; set samples"),
    ({"ragged": lambda self, block: Sorted.ragged(self, block)._replace(values=np.zeros(1))}, "differ in 'values'"),
    ({"ordered_by_gene": False}, "have the same order in every cell.*set ordered_by_gene = True"),
    (
        {"cls": Drawn, "samples": False, "choose": ties_in_random_order},
        "depends only on its count.*set ordered_by_gene",
    ),
]


@pytest.mark.parametrize(("flaw", "sentence"), FLAWS, ids=[sentence for _, sentence in FLAWS])
def test_broken_ones_are_found(monkeypatch, flaw, sentence):
    cls = flaw.get("cls", Broken)
    options = {name: value for name, value in flaw.items() if name in ("append_cls", "append_eos")}
    for name in flaw.keys() - options - {"cls"}:
        monkeypatch.setattr(cls, name, flaw[name], raising=False)
    with pytest.raises(AssertionError, match=f"^{cls.__name__}: .*(?:{sentence})"):
        check_tokenizer(cls, **options)


@pytest.mark.parametrize("key", ["bin_ids", "values", "input_ids", "labels"])
def test_what_masking_leaves_is_found(monkeypatch, key):
    class Leaving(Masking):
        def __call__(self, batch, rows, **options):
            masked = super().__call__(batch, rows, **options)
            if key == "labels":
                masked["labels"][5] = -100
            else:
                masked[key] = masked[key] + masked["masked_positions"].to(masked[key].dtype)
            return masked

    monkeypatch.setattr(scforge.testing.tokenizers, "Masking", Leaving)
    with pytest.raises(AssertionError, match=f"'{key}' still reveals masked|does not mask a token in every cell"):
        check_tokenizer(Sorted)


def test_names_and_instances_are_taken():
    check_tokenizer("continuous_projection", max_len=9)
    vocab = GeneVocab.from_genes(["a", "b", "c"])
    check_tokenizer(Sorted(vocab, scale=0.5))
    with raises(OptionError, "options"):
        check_tokenizer(Sorted(vocab), scale=0.5)
    with raises(OptionError, "tokenizer"):
        check_tokenizer(42)
    with raises(OptionError, "tokenizer"):
        check_tokenizer("rank_values")
