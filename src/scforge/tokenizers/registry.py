"""The registry of tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scforge._registry import Registry, check_options

if TYPE_CHECKING:
    from scforge.data.vocab import GeneVocab
    from scforge.tokenizers.base import Tokenizer

__all__ = ["TOKENIZERS", "get_tokenizer", "list_tokenizers", "register_tokenizer"]

TOKENIZERS: Registry[type[Tokenizer]] = Registry(
    "tokenizer",
    group="scforge.tokenizers",
    base="scforge.tokenizers.Tokenizer",
    builtin={
        "binned_expression": "scforge.tokenizers.binned_expression",
        "continuous_projection": "scforge.tokenizers.continuous_projection",
        "entropy_ranked": "scforge.tokenizers.entropy_ranked",
        "gene_embedding": "scforge.tokenizers.gene_embedding",
        "rank_value": "scforge.tokenizers.rank_value",
    },
)


def register_tokenizer(name: str) -> Callable[[Any], Any]:
    """Register a :class:`~scforge.tokenizers.Tokenizer` class as `name` (class decorator).

    Parameters
    ----------
    name
        Registry key, e.g. ``"rank_value"``.

    Returns
    -------
    A decorator that registers a class and hands it back.

    Raises
    ------
    OptionError
        If `name` belongs to another class.

    Examples
    --------
    >>> from scforge.data import GeneVocab
    >>> from scforge.tokenizers import RankValueTokenizer
    >>> @register_tokenizer("top_512")
    ... class Top512(RankValueTokenizer):
    ...     default_max_len = 512
    >>> get_tokenizer("top_512", GeneVocab.from_genes(["A", "B"]), use_medians=False).max_len
    512
    """
    return TOKENIZERS.register(name)


def list_tokenizers() -> list[str]:
    """Return the names of all tokenizers.

    Returns
    -------
    Built-in names, registered ones, and those that installed packages offer as entry points, sorted.

    Examples
    --------
    >>> list_tokenizers()
    ['binned_expression', 'continuous_projection', 'entropy_ranked', 'gene_embedding', 'rank_value']
    """
    return TOKENIZERS.names()


def get_tokenizer(name: str, vocab: GeneVocab, **options: Any) -> Tokenizer:
    """Make the tokenizer registered as `name`.

    Parameters
    ----------
    name
        Registry key, e.g. ``"rank_value"``.
    vocab
        The genes.
    **options
        Options of its constructor.

    Returns
    -------
    The tokenizer; call it with counts.

    Raises
    ------
    OptionError
        If the name, or an option, is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> from scforge.data import GeneVocab
    >>> vocab = GeneVocab.from_genes(["CD3D", "LYZ", "MS4A1"])
    >>> tokenizer = get_tokenizer("continuous_projection", vocab, max_len=3)
    >>> tokenizer(np.array([[1, 0, 5]]))["input_ids"].tolist(), tokenizer.max_tokens()
    ([[3, 4, 6]], 3)
    """
    cls = TOKENIZERS.get(name)
    check_options("tokenizer option", name, options, cls.option_names())
    return cls(vocab, **options)
