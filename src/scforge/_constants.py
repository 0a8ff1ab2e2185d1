"""Names and numbers that more than one package needs."""

from __future__ import annotations

from typing import Final

PAD_TOKEN: Final = "<pad>"
UNK_TOKEN: Final = "<unk>"
MASK_TOKEN: Final = "<mask>"
CLS_TOKEN: Final = "<cls>"
EOS_TOKEN: Final = "<eos>"

SPECIAL_TOKENS: Final = (PAD_TOKEN, UNK_TOKEN, MASK_TOKEN, CLS_TOKEN)
"""Special tokens of a vocabulary in the order of their ids, which stand before all genes."""

PAD_ID: Final = 0
"""Id of padding in every vocabulary; the ids below are those of a vocabulary with the usual special tokens."""
UNK_ID: Final = 1
MASK_ID: Final = 2
CLS_ID: Final = 3
N_SPECIAL: Final = len(SPECIAL_TOKENS)

IGNORE_LABEL: Final = -100
"""Label of a position without a target, the ``ignore_index`` of torch's cross entropy."""

TARGET_SUM: Final = 10_000.0
"""Counts a cell is scaled to before log1p (CP10K)."""

OBSM_KEY: Final = "X_scforge"
QUERY_KEY: Final = "X_scforge_query"
"""Key of the embedding of a query model whose training has moved it away from that of its reference."""
AUTO_KEY: Final = "auto"
"""Leaves the choice between the two to the model."""
UNS_KEY: Final = "scforge"
