"""The check for tokenizers finds what is wrong: each tokenizer below breaks one rule, and is told which."""

from __future__ import annotations

from dataclasses import replace

import numba
import numpy as np
import pytest
import torch
from scipy import sparse

import scforge.testing.tokenizers
from scforge.data import CellBlock, GeneVocab
from scforge.data.random import content_keys
from scforge.errors import OptionError
from scforge.testing import check_tokenizer
from scforge.tokenizers import Masking, RaggedTokens, Tokenizer
from scforge.tokenizers.batch import pad


def cut(block: CellBlock, choose) -> tuple[np.ndarray, np.ndarray]:
    """Return row boundaries, and positions of the entries that `choose` picks of each cell, in its order."""
    picks = [start + choose(block.counts[start:stop], row) for start, stop, row in entries(block)]
    return np.cumsum([0, *map(len, picks)]), np.concatenate([np.empty(0, dtype=np.int64), *picks])


def entries(block):
    return zip(block.indptr[:-1], block.indptr[1:], block.rows, strict=True)


class Sorted(Tokenizer):
    """The most expressed genes in the order of the vocabulary, with a level as an extra. Correct."""

    ordered_by_gene = True

    def __init__(self, vocab, *, max_len=None, append_cls=True, append_eos=False, scale=1.0):
        super().__init__(vocab, max_len=max_len, append_cls=append_cls, append_eos=append_eos)
        self.scale = scale

    def choose(self, counts, row):
        return np.sort(np.argsort(-counts, kind="stable")[: self.most_genes])

    def chooser(self, block):
        return self.choose

    def _tokenize(self, block):
        indptr, kept = cut(block, self.chooser(block))
        values = self.scale * np.log1p(block.counts[kept])
        ids = (block.genes[kept] + self.vocab.n_special).astype(np.int32)
        return RaggedTokens(indptr, ids, values.astype(np.float32), {"bin_ids": np.ones(len(kept), dtype=np.int32)})


class Drawn(Sorted):
    """Genes drawn at random, in random order. Correct."""

    ordered_by_gene = False
    samples = True

    def chooser(self, block):
        keys = iter(content_keys(block, seed=0, stream=7))
        return lambda counts, row: np.random.default_rng(int(next(keys))).permutation(len(counts))[: self.most_genes]


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


class Selective(Sorted):
    """Leaves every third gene out. Correct."""

    def lengths(self, n_expressed):
        return np.minimum(
            super().lengths(n_expressed), sum(i % 3 != 1 for i in range(self.vocab.n_genes)) + self._n_around
        )

    def _tokenize(self, block):
        kept = block.genes % 3 != 1
        indptr = np.concatenate([[0], np.cumsum(kept)])[block.indptr]
        return super()._tokenize(replace(block, indptr=indptr, genes=block.genes[kept], counts=block.counts[kept]))


@pytest.mark.parametrize("cls", [Sorted, Drawn, AllGenes, Selective])
@pytest.mark.parametrize("options", [{}, {"append_cls": False}, {"append_eos": True}, {"max_len": 9}])
def test_correct_ones_pass(cls, options):
    check_tokenizer(cls, **options)


@pytest.mark.parametrize("n_genes", [1, 2, 3, 300])
def test_small_and_large_vocabularies(n_genes):
    vocab = GeneVocab.from_genes([f"g{i}" for i in range(n_genes)])
    for cls in (Sorted, Drawn, AllGenes, Selective):
        check_tokenizer(cls(vocab))


BROKEN = []


def breaks(sentence, **options):
    def decorator(cls):
        BROKEN.append(pytest.param(cls, options, sentence, id=cls.__name__))
        return cls

    return decorator


class Changed(Sorted):
    """A batch that is changed behind its making."""

    def change(self, batch):
        pass

    def __call__(self, cells, gene_ids=None, *, totals=None):
        batch = super().__call__(cells, gene_ids, totals=totals)
        self.change(batch)
        return batch


@breaks("raises IndexError.* where a batch has the right keys, dtypes and shapes")
class NoEmptyCells(Sorted):
    def choose(self, counts, row):
        counts[0] += 0
        return super().choose(counts, row)


@breaks(r"the batch lacks \['values'\]")
class NoValues(Changed):
    def change(self, batch):
        del batch["values"]


@breaks(r"the batch holds \['labels'\], which masking alone makes")
class Labels(Changed):
    def change(self, batch):
        batch["labels"] = batch["input_ids"]


@breaks("'input_ids' is torch.int32 instead of torch.int64")
class ShortIds(Changed):
    def change(self, batch):
        batch["input_ids"] = batch["input_ids"].int()


@breaks("'bin_ids' is torch.float64 instead of")
class LongBins(Changed):
    def change(self, batch):
        batch["bin_ids"] = batch["bin_ids"].double()


@breaks(r"'bin_ids' has the shape \(16, \d+\), ids \(16, \d+\)")
class NarrowBins(Changed):
    def change(self, batch):
        batch["bin_ids"] = batch["bin_ids"][:, 1:]


@breaks("'values' holds a number that is not finite")
class Infinite(Sorted):
    def _tokenize(self, block):
        tokens = super()._tokenize(block)
        with np.errstate(over="ignore"):
            return tokens._replace(values=np.exp(tokens.values * 10).astype(np.float32))


@breaks("padding stands before a token")
class PaddedInFront(Changed):
    def change(self, batch):
        for key in batch:
            batch[key] = batch[key].flip(1)


@breaks("attention_mask is not true exactly where there is a token")
class AllAttended(Changed):
    def change(self, batch):
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])


@breaks("'values' is not 0 at CLS, EOS and padding")
class PaddedWithMinusTwo(Changed):
    def change(self, batch):
        batch["values"][~batch["attention_mask"]] = -2


@breaks("'bin_ids' is not 0 at CLS, EOS and padding")
class BinOfCls(Changed):
    def change(self, batch):
        batch["bin_ids"][:, 0] = 1


@breaks("a token id is not in the vocabulary")
class OneTooHigh(Sorted):
    def _tokenize(self, block):
        tokens = super()._tokenize(block)
        return tokens._replace(ids=tokens.ids + 1)


@breaks("MASK is among the tokens")
class Masked(Sorted):
    def _tokenize(self, block):
        tokens = super()._tokenize(block)
        tokens.ids[tokens.ids == 6] = 2
        tokens.values[tokens.ids == 2] = 0
        tokens.extras["bin_ids"][tokens.ids == 2] = 0
        return tokens


@breaks("the batch is wider than its longest cell")
class TooWide(Changed):
    def change(self, batch):
        for key in batch:
            batch[key] = torch.nn.functional.pad(batch[key], (0, 1))


@breaks("append_cls=True but a cell has 0 CLS")
class NoCls(Sorted):
    _frame = (-1, -1)


@breaks("append_cls=False but a cell has 1 CLS", append_cls=False)
class AlwaysCls(Sorted):
    _frame = (3, -1)


@breaks("CLS does not stand in front of the genes")
class ClsBehind(Sorted):
    _frame = (-1, 3)


@breaks("EOS does not stand behind the genes", append_cls=False, append_eos=True)
class EosInFront(Sorted):
    _frame = (4, -1)


@breaks("a gene is twice among the tokens of cell 2")
class Twice(Sorted):
    def _tokenize(self, block):
        tokens = super()._tokenize(block)
        tokens.ids[tokens.ids == 6] = 5
        return tokens


@breaks("an expressed gene is not among the tokens of cell 3, though it would fit")
class LastGeneLost(Sorted):
    def choose(self, counts, row):
        return super().choose(counts, row)[:-1]


@breaks("a gene that the data do not have is among the tokens")
class NotMeasured(AllGenes):
    def measured(self, block):
        return np.arange(self.vocab.n_genes)


@breaks(r"lengths\(\) says 60 tokens but cell 0 has 1")
class WrongLengths(Sorted):
    def lengths(self, n_expressed):
        return np.full_like(n_expressed, 60)


@breaks(r"lengths\(\) says 7 tokens but cell 2 has 41")
class TooLowLengths(Selective):
    def lengths(self, n_expressed):
        return np.minimum(super().lengths(n_expressed), 7)


@breaks(r"max_tokens\(\) is 99 but a cell with all genes has 61 tokens")
class WrongMost(Sorted):
    def max_tokens(self):
        return 99


@breaks("a second call gives other tokens")
class Unseeded(Sorted):
    def _tokenize(self, block):
        tokens = super()._tokenize(block)
        return tokens._replace(values=(tokens.values + np.random.rand(len(tokens.values))).astype(np.float32))


@breaks("raises .*[Pp]ickle.* where the tokens are the same a second time")
class Unpicklable(Sorted):
    def __init__(self, vocab, **options):
        super().__init__(vocab, **options)
        self.function = lambda counts: counts


@breaks("a pickled copy gives other tokens")
class Forgets(Sorted):
    def __getstate__(self):
        return vars(self) | {"scale": 2.0}


@breaks("[12] threads give other tokens")
class Threaded(Sorted):
    def _tokenize(self, block):
        tokens = super()._tokenize(block)
        return tokens._replace(values=tokens.values + np.float32(torch.get_num_threads() > 1))


@breaks("cell 0 alone has other tokens than in a block|cell 1 alone")
class CentredOnTheBatch(Sorted):
    def _tokenize(self, block):
        tokens = super()._tokenize(block)
        return tokens._replace(values=tokens.values - tokens.values.mean() if len(tokens.values) else tokens.values)


@breaks("the order of the cells changes their tokens")
class CellsSorted(Sorted):
    def _tokenize(self, block):
        order = np.argsort(block.rows)
        sizes = np.diff(block.indptr)[order]
        take = np.concatenate([np.arange(block.indptr[cell], block.indptr[cell + 1]) for cell in order])
        indptr = np.concatenate([[0], np.cumsum(sizes)])
        ordered = replace(
            block, indptr=indptr, genes=block.genes[take], counts=block.counts[take], rows=block.rows[order]
        )
        return super()._tokenize(ordered)


class Matrix(Sorted):
    """A way of its own with matrices."""

    def change(self, cells, gene_ids, totals):
        return cells, gene_ids, totals

    def __call__(self, cells, gene_ids=None, *, totals=None):
        if not isinstance(cells, CellBlock):
            cells, gene_ids, totals = self.change(cells, gene_ids, totals)
        return super().__call__(cells, gene_ids, totals=totals)


@breaks("a matrix gives other tokens than a block")
class RoundsMatrices(Matrix):
    def change(self, cells, gene_ids, totals):
        return cells.minimum(5), gene_ids, totals


@breaks("permuted columns give other tokens")
class ColumnsInTheirOrder(Matrix):
    def change(self, cells, gene_ids, totals):
        return cells, None if gene_ids is not None and len(gene_ids_of(gene_ids)) == 60 else gene_ids, totals


def gene_ids_of(gene_ids):
    return getattr(gene_ids, "columns", gene_ids)


@breaks("version suffixes give other tokens")
class NoVersions(Matrix):
    def change(self, cells, gene_ids, totals):
        if gene_ids is not None and not hasattr(gene_ids, "columns"):
            gene_ids = [str(name).replace(".", "?") for name in gene_ids[:20]] + list(gene_ids[20:])
        return cells, gene_ids, totals


@breaks("symbols give other tokens")
class NoSymbols(Matrix):
    def change(self, cells, gene_ids, totals):
        if gene_ids is not None and not hasattr(gene_ids, "columns"):
            gene_ids = [str(name).replace("SYMBOL", "?") for name in gene_ids[:20]] + list(gene_ids[20:])
        return cells, gene_ids, totals


@breaks("two columns of one gene are not summed")
class FirstColumnOnly(Matrix):
    def change(self, cells, gene_ids, totals):
        if gene_ids is not None and len(gene_ids_of(gene_ids)) == 120:
            cells, gene_ids = cells[:, 60:], gene_ids[60:]
        return cells, gene_ids, totals


@breaks("genes outside the vocabulary change more than the library size")
class UnknownIsFirst(Matrix):
    def change(self, cells, gene_ids, totals):
        if gene_ids is not None and not hasattr(gene_ids, "columns"):
            gene_ids = [name if name in self.vocab else self.vocab.genes[0] for name in gene_ids]
        return cells, gene_ids, totals


@breaks("counts as int64 give other tokens")
class IntegersHalved(Matrix):
    def change(self, cells, gene_ids, totals):
        return (cells * 0.5).astype(int) if cells.dtype == np.int64 else cells, gene_ids, totals


@breaks("counts as uint8 give other tokens")
class Overflows(Matrix):
    def change(self, cells, gene_ids, totals):
        return cells + cells if cells.dtype == np.uint8 else cells, gene_ids, totals


@breaks("explicit zeros, unsorted or repeated indices give other tokens")
class FirstOfRepeated(Matrix):
    def change(self, cells, gene_ids, totals):
        if not cells.has_canonical_format:
            _, first = np.unique(
                np.repeat(np.arange(16), np.diff(cells.indptr)) * 60 + cells.indices, return_index=True
            )
            rows = np.repeat(np.arange(16), np.diff(cells.indptr))[first]
            cells = sparse.csr_matrix((cells.data[first], (rows, cells.indices[first])), cells.shape)
        return cells, gene_ids, totals


@breaks("the counts that it was given are changed")
class InPlace(Matrix):
    def change(self, cells, gene_ids, totals):
        cells.sum_duplicates()
        return cells, gene_ids, totals


@breaks("raises AttributeError.* where config.. makes an equal tokenizer")
class OptionNotKept(Sorted):
    def __init__(self, vocab, *, cutoff=3, **options):
        super().__init__(vocab, **options)


@breaks("config.. cannot be written as JSON")
class ArrayOption(Sorted):
    def __init__(self, vocab, *, cutoffs=(1, 2), **options):
        super().__init__(vocab, **options)
        self.cutoffs = np.array(cutoffs)


@breaks("config.. is another after it was written as JSON")
class TupleOption(Sorted):
    def __init__(self, vocab, *, cutoffs=(1, 2), **options):
        super().__init__(vocab, **options)
        self.cutoffs = tuple(cutoffs)


@breaks("the options of config.. do not come back from the constructor")
class GrowingOption(Sorted):
    def __init__(self, vocab, *, cutoff=3, **options):
        super().__init__(vocab, **options)
        self.cutoff = cutoff + 1


@breaks("config.. and the keyword-only options differ in \\['scale'\\]")
class ShortConfig(Sorted):
    def config(self):
        return {name: value for name, value in super().config().items() if name != "scale"}


@breaks("a cell has 61 tokens although max_len=8")
class NeverCut(Sorted):
    def choose(self, counts, row):
        return np.arange(len(counts))


@breaks("truncation keeps the genes that come first in the vocabulary")
class Head(Sorted):
    def choose(self, counts, row):
        return np.arange(len(counts))[: self.most_genes]


@breaks("truncation keeps the genes that come first in the vocabulary")
class HeadSaidToBeDrawn(Head):
    samples = True


@breaks("truncation drops a count of .* and keeps one of .*; set samples")
class DrawnUnsaid(Drawn):
    samples = False


@breaks("truncation drops a count of .* and keeps one of .*; set samples")
class Lowest(Sorted):
    def choose(self, counts, row):
        return np.sort(np.argsort(counts, kind="stable")[: self.most_genes])


@breaks(r"ragged\(\) and the padded batch differ in 'values'")
class OtherRagged(Sorted):
    def ragged(self, block):
        tokens = super().ragged(block)
        return tokens._replace(values=tokens.values + 1)


@breaks(r"ragged\(\) has the keys \['input_ids', 'values'\]")
class RaggedWithoutBins(Sorted):
    def ragged(self, block):
        return super().ragged(block)._replace(extras={})


@breaks("genes with equal counts stand in one order in every cell.*set ordered_by_gene = True")
class OrderUnsaid(Sorted):
    ordered_by_gene = False


@breaks("a gene stands where its count puts it.*set ordered_by_gene = True")
class TiesUnsaid(Drawn):
    """From high to low, equal counts in random order: the neighbours of a hidden token bracket its count."""

    samples = False

    def chooser(self, block):
        keys = iter(content_keys(block, seed=0, stream=7))

        def choose(counts, row):
            ties = np.random.default_rng(int(next(keys))).permutation(len(counts))
            return ties[np.argsort(-counts[ties], kind="stable")][: self.most_genes]

        return choose


@breaks("cell .* alone has other tokens than in a block")
class DrawnByRow(Drawn):
    """The row of a cell decides, so a cell of a subset gets other tokens than in the whole."""

    def chooser(self, block):
        keys = iter(block.rows)
        return lambda counts, row: np.random.default_rng(int(next(keys))).permutation(len(counts))[: self.most_genes]


@pytest.mark.parametrize(("cls", "options", "sentence"), BROKEN)
def test_broken_ones_are_found(cls, options, sentence):
    with pytest.raises(AssertionError, match=f"^{cls.__name__}: .*(?:{sentence})"):
        check_tokenizer(cls, **options)


class Leaving(Masking):
    """Masking that forgets one key."""

    key = "bin_ids"

    def __call__(self, batch, rows, **options):
        masked = super().__call__(batch, rows, **options)
        masked[self.key] = masked[self.key] + masked["masked_positions"].to(masked[self.key].dtype)
        return masked


@pytest.mark.parametrize("key", ["bin_ids", "values", "input_ids"])
def test_what_masking_leaves_is_found(monkeypatch, key):
    monkeypatch.setattr(scforge.testing.tokenizers, "Masking", type("Leaving", (Leaving,), {"key": key}))
    with pytest.raises(AssertionError, match=f"Sorted: '{key}' still tells of hidden tokens"):
        check_tokenizer(Sorted)


def test_masking_that_forgets_a_cell_is_found(monkeypatch):
    class Sparing(Masking):
        def __call__(self, batch, rows, **options):
            masked = super().__call__(batch, rows, **options)
            masked["labels"][5] = -100
            return masked

    monkeypatch.setattr(scforge.testing.tokenizers, "Masking", Sparing)
    with pytest.raises(AssertionError, match="masking does not hide a token of each cell"):
        check_tokenizer(Sorted)


def test_threads_are_left_as_they_were():
    before = torch.get_num_threads(), numba.get_num_threads()
    with pytest.raises(AssertionError, match="threads"):
        check_tokenizer(Threaded)
    assert (torch.get_num_threads(), numba.get_num_threads()) == before


def test_names_and_instances_are_taken():
    check_tokenizer("continuous_projection", max_len=9)
    vocab = GeneVocab.from_genes(["a", "b", "c"])
    check_tokenizer(Sorted(vocab, scale=0.5))
    with pytest.raises(OptionError, match="come with an instance"):
        check_tokenizer(Sorted(vocab), scale=0.5)
    with pytest.raises(OptionError, match="is no Tokenizer; pass a registered name, a class or an instance"):
        check_tokenizer(42)
    with pytest.raises(OptionError, match="did you mean 'rank_value'"):
        check_tokenizer("rank_values")
    with pytest.raises(OptionError, match="'scales' is unknown to"):
        check_tokenizer(Sorted, scales=1)


def test_pad_is_what_the_check_compares_with():
    tokens = RaggedTokens(np.array([0, 2]), np.array([4, 5], dtype=np.int32), np.ones(2, dtype=np.float32))
    assert pad(tokens)["input_ids"].tolist() == [[4, 5]]
