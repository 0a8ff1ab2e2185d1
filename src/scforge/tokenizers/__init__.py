"""Tokenizers, with one strategy per file, vectorized over blocks of cells."""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {
    "Tokenizer": "scforge.tokenizers.base",
    "TokenBatch": "scforge.tokenizers.base",
    "RaggedTokens": "scforge.tokenizers.base",
    "RankValueTokenizer": "scforge.tokenizers.rank_value",
    "EntropyRankedTokenizer": "scforge.tokenizers.entropy_ranked",
    "BinnedExpressionTokenizer": "scforge.tokenizers.binned_expression",
    "ContinuousProjectionTokenizer": "scforge.tokenizers.continuous_projection",
    "GeneEmbeddingTokenizer": "scforge.tokenizers.gene_embedding",
    "Masking": "scforge.tokenizers.masking",
    "register_tokenizer": "scforge.tokenizers.base",
    "get_tokenizer": "scforge.tokenizers.base",
    "list_tokenizers": "scforge.tokenizers.base",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
