"""Tokenizers: one strategy a file, vectorized over blocks of cells."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "BinnedExpressionTokenizer": "scforge.tokenizers.binned_expression",
    "ContinuousProjectionTokenizer": "scforge.tokenizers.continuous_projection",
    "EntropyRankedTokenizer": "scforge.tokenizers.entropy_ranked",
    "GeneEmbeddingTokenizer": "scforge.tokenizers.gene_embedding",
    "Masking": "scforge.tokenizers.masking",
    "RaggedTokens": "scforge.tokenizers.base",
    "RankValueTokenizer": "scforge.tokenizers.rank_value",
    "TokenBatch": "scforge.tokenizers.base",
    "Tokenizer": "scforge.tokenizers.base",
    "get_tokenizer": "scforge.tokenizers.base",
    "list_tokenizers": "scforge.tokenizers.base",
    "register_tokenizer": "scforge.tokenizers.base",
}

__all__ = [  # noqa: RUF022 -- in the order in which one meets them
    "Tokenizer",
    "TokenBatch",
    "RaggedTokens",
    "RankValueTokenizer",
    "EntropyRankedTokenizer",
    "BinnedExpressionTokenizer",
    "ContinuousProjectionTokenizer",
    "GeneEmbeddingTokenizer",
    "Masking",
    "register_tokenizer",
    "get_tokenizer",
    "list_tokenizers",
]

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
