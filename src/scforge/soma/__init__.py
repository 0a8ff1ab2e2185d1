"""soma: a byte-level transformer, the V1 architecture of the SOMA network, in torch and flax.

Weight files, keys and tokens are the same as in the published package ``soma-models``, and names have the same import
paths: ``scforge.soma.v1.torch.Model`` corresponds to ``soma_models.v1.torch.Model``.

>>> from scforge.soma.v1.tokenizer import tokenize
>>> tokenize(b"abc", max_seq_len=5)[0].token_ids
[97, 98, 99, 257, 256]
"""

from __future__ import annotations

from scforge._lazy import lazy_names

_NAMES = {name: f"scforge.soma.{name}" for name in ("utils", "v1")} | {
    "embed": "scforge.soma.embedding",
    "gene_table": "scforge.soma.embedding",
    "read_documents": "scforge.soma.documents",
    "train": "scforge.soma.training",
}

__all__ = list(_NAMES)

__getattr__, __dir__ = lazy_names(__name__, _NAMES)
