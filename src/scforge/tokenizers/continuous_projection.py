"""The tokenizer for continuous values: genes with their normalized expression."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Self

import numpy as np

from scforge._checks import check_bool, check_choice, check_positive, check_seed
from scforge._constants import TARGET_SUM
from scforge.data.cells import CellBlock, content_keys
from scforge.data.vocab import GeneVocab
from scforge.errors import OptionError
from scforge.tokenizers._expression import check_transform, expression, keep, reorder, with_zeros
from scforge.tokenizers.base import RaggedTokens, Tokenizer, insert, register_tokenizer

DEPTH_TOKENS = ("<target_depth>", "<source_depth>")
_DEPTH = re.compile(r"[ta]-?\d+(\.\d+)?|f(?=.*[1-9])\d+(\.\d+)?")


_STREAM = 0x6F726472  # "ordr": its random numbers are others than those of masks, samples and views


@register_tokenizer("continuous_projection")
class ContinuousProjectionTokenizer(Tokenizer):
    """Represent a cell by its expressed genes and their values, which are log1p CP10K by default.

    A model projects the value: a transformer adds it to the gene embedding, and ``gene_pooling`` weights the embedding
    by it. :meth:`scfoundation` and :meth:`transcriptformer` create the same tokens as the packages of these names.

    Parameters
    ----------
    vocab
        The genes.
    max_len
        Maximum number of tokens per cell, including special tokens. The genes with the highest counts are kept. If
        None, keeps all genes.
    append_cls, append_eos
        Whether to add a CLS token before the genes, and an EOS token after them.
    transform
        Values of genes: ``"log1p_cp10k"``; ``"cp10k"``, without the logarithm; ``"log1p_counts"``, without library-size
        normalization; or ``"counts"``, without either.
    target_sum
        Total counts per cell after scaling, instead of 10,000 as in CP10K.
    clip
        Maximum value. If None, values are not clipped.
    order
        Order of the genes: ``"vocabulary"``, ``"expression"`` (from high to low) or ``"random"`` (resampled in each
        epoch).
    library_size
        Library size for CP10K: ``"data"``, the counts of all genes of the data, including genes outside the vocabulary,
        or ``"vocabulary"``, the counts of vocabulary genes.
    include_zero_genes
        Whether to include measured genes without counts, with the value 0. Do not use this to predict the identity of
        masked genes, because the masked genes would then be exactly the missing genes.
    unmeasured_as_zero
        Whether `include_zero_genes` also applies to vocabulary genes that are not in the data.
    target_depth
        If given, adds two tokens after the genes, for the target depth and the depth of the cell, with the values that
        scFoundation calls T and S. S is the log10 of the library size. T is 4 for ``"t4"``, the log10 of twice the
        library size for ``"f2"``, and S + 1 for ``"a1"``.
    attention_bias
        Whether to return ``attention_bias``, the log of the count (or of `clip`) of each gene, which TranscriptFormer
        adds to the attention scores of that gene.
    seed
        Random seed.

    Raises
    ------
    OptionError
        If an option is invalid.

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import csr_matrix
    >>> from scforge.data import GeneVocab
    >>> tokenizer = ContinuousProjectionTokenizer(GeneVocab.from_genes(["A", "B", "C"]), append_cls=False)
    >>> batch = tokenizer(csr_matrix(np.array([[1, 0, 3]])))
    >>> batch["input_ids"].tolist(), batch["values"].round(decimals=2).tolist()
    ([[4, 6]], [[7.820000171661377, 8.920000076293945]])
    """

    default_max_len = None

    def __init__(
        self,
        vocab: GeneVocab,
        *,
        max_len: int | None = None,
        append_cls: bool = True,
        append_eos: bool = False,
        transform: str = "log1p_cp10k",
        target_sum: float = TARGET_SUM,
        clip: float | None = None,
        order: str = "vocabulary",
        library_size: str = "data",
        include_zero_genes: bool = False,
        unmeasured_as_zero: bool = False,
        target_depth: str | None = None,
        attention_bias: bool = False,
        seed: int = 0,
    ) -> None:
        if target_depth is not None and not _DEPTH.fullmatch(str(target_depth)):
            raise OptionError(
                "is invalid; pass e.g. 't4' for 10^4 counts, 'f2' for 2 times the "
                "counts of the cell, or 'a1' for 10^1 times the counts of the cell.",
                target_depth=target_depth,
            )
        self.target_depth = target_depth
        super().__init__(vocab, max_len=max_len, append_cls=append_cls, append_eos=append_eos)
        self.target_sum = check_transform(transform, target_sum)
        for token in DEPTH_TOKENS if target_depth is not None else ():
            self._require_token("target_depth", token)
        self.transform = transform
        self.clip = None if clip is None else check_positive("clip", clip)
        self.order = check_choice("order", order, ["vocabulary", "expression", "random"])
        self.ordered_by_gene = order != "random"
        self.library_size = check_choice("library_size", library_size, ["data", "vocabulary"])
        self.include_zero_genes = check_bool("include_zero_genes", include_zero_genes)
        self.unmeasured_as_zero = check_bool("unmeasured_as_zero", unmeasured_as_zero)
        if self.unmeasured_as_zero and not self.include_zero_genes:
            raise OptionError("requires include_zero_genes=True; set both options.", unmeasured_as_zero=True)
        self.attention_bias = check_bool("attention_bias", attention_bias)
        self.seed = check_seed(seed)
        self.lists_all_genes = self.include_zero_genes
        self.gives_counts = transform == "counts" and (clip is None or float(clip).is_integer())
        plain = (transform, self.target_sum, clip) == ("log1p_cp10k", TARGET_SUM, None)
        self.gives_expression = plain and not attention_bias

    @classmethod
    def scfoundation(
        cls, vocab: GeneVocab, *, target_depth: str = "t4", include_zero_genes: bool = False, seed: int = 0
    ) -> Self:
        """Tokenize cells as in scFoundation (Hao et al. 2024).

        The vocabulary is scFoundation's gene panel, and values are log1p CP10K of the counts in the panel. Tokens are
        the expressed genes for the encoder (with `include_zero_genes`, all genes in the panel, for the decoder),
        followed by T and S. The two depth tokens are added to `vocab`.

        Parameters
        ----------
        vocab
            The gene panel.
        target_depth, include_zero_genes, seed
            See the class.

        Returns
        -------
        The tokenizer, whose ``vocab`` includes the depth tokens.
        """
        return cls(
            vocab.with_special_tokens(*DEPTH_TOKENS),
            append_cls=False,
            library_size="vocabulary",
            include_zero_genes=include_zero_genes,
            unmeasured_as_zero=include_zero_genes,
            target_depth=target_depth,
            seed=seed,
        )

    @classmethod
    def transcriptformer(
        cls, vocab: GeneVocab, *, max_len: int = 2048, order: str = "random", seed: int = 0, **options: Any
    ) -> Self:
        """Tokenize cells as in TranscriptFormer (Pearce et al. 2025), with counts clipped at 30, and attention bias.

        Parameters
        ----------
        vocab, max_len, order, seed, **options
            See the class.

        Returns
        -------
        The tokenizer.
        """
        return cls(
            vocab,
            max_len=max_len,
            transform="counts",
            clip=30.0,
            order=order,
            attention_bias=True,
            seed=seed,
            **options,
        )

    @classmethod
    def special_tokens(cls, options: dict[str, Any]) -> tuple[str, ...]:
        """Return the special tokens that a tokenizer with these options needs in its vocabulary."""
        return super().special_tokens(options) + (DEPTH_TOKENS if options.get("target_depth") is not None else ())

    @property
    def _n_around(self) -> int:
        return super()._n_around + (len(DEPTH_TOKENS) if self.target_depth is not None else 0)

    def _tokenize(self, block: CellBlock) -> RaggedTokens:
        if self.library_size == "vocabulary":
            sums = np.concatenate([[0.0], np.cumsum(block.counts, dtype=np.float64)])
            block = replace(block, totals=np.diff(sums[block.indptr]))
        values = block.counts if self.transform == "counts" else expression(block, self.transform, self.target_sum)
        indptr, genes, counts = block.indptr, block.genes, block.counts
        if self.unmeasured_as_zero:
            block = replace(block, measured=None)
        if self.include_zero_genes:
            indptr, genes, (counts, values) = with_zeros(block, self.vocab.n_genes, (counts, values))
        indptr, kept = keep(indptr, counts, block, self.most_genes, seed=self.seed)
        ids, counts, values = genes[kept] + self.vocab.n_special, counts[kept], values[kept]
        if self.order != "vocabulary":
            keys = content_keys(block, seed=self.seed, stream=_STREAM) if self.order == "random" else None
            moved = reorder(indptr, counts, keys)
            ids, counts, values = ids[moved], counts[moved], values[moved]
        extras = {}
        if self.attention_bias:
            limited = counts if self.clip is None or self.transform != "counts" else np.minimum(counts, self.clip)
            extras["attention_bias"] = np.log(np.maximum(limited, 1.0), dtype=np.float32)
        if self.clip is not None:
            values = np.minimum(values, np.float32(self.clip))
        tokens = RaggedTokens(indptr, ids, values, extras)
        if self.target_depth is None:
            return tokens
        # log10 of the depth that is wanted and of the depth available, of one count where there is none.
        source, number = np.log10(np.maximum(block.totals, 1.0)), float(self.target_depth[1:])
        wanted = {"t": np.full_like(source, number), "f": source + np.log10(max(number, 1e-300)), "a": source + number}
        depths = np.stack([wanted[self.target_depth[0]], source], axis=1).ravel().astype(np.float32)
        depth_ids = [self.vocab.special_tokens.index(token) for token in DEPTH_TOKENS]
        return insert(tokens, np.repeat(tokens.indptr[1:], len(depth_ids)), depth_ids, depths)
