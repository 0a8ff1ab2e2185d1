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
    builtin={
        "binned_expression": "scforge.tokenizers.binned_expression",
        "continuous_projection": "scforge.tokenizers.continuous_projection",
        "entropy_ranked": "scforge.tokenizers.entropy_ranked",
        "gene_embedding": "scforge.tokenizers.gene_embedding",
        "rank_value": "scforge.tokenizers.rank_value",
    },
)


def register_tokenizer(name: str) -> Callable[[Any], Any]:
    """Register a :class:`~scforge.tokenizers.Tokenizer` class as `name` (class decorator)."""
    return TOKENIZERS.register(name)


def list_tokenizers() -> list[str]:
    """Return the names of all tokenizers.

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

    Raises
    ------
    OptionError
        If the name, or an option, is unknown.
    """
    cls = TOKENIZERS.get(name)
    check_options("tokenizer option", name, options, cls.option_names())
    return cls(vocab, **options)
