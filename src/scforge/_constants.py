"""Names and numbers that are used by several subpackages."""

from __future__ import annotations

from typing import Final

PAD_TOKEN: Final = "<pad>"
UNK_TOKEN: Final = "<unk>"
MASK_TOKEN: Final = "<mask>"
CLS_TOKEN: Final = "<cls>"
EOS_TOKEN: Final = "<eos>"

SPECIAL_TOKENS: Final = (PAD_TOKEN, UNK_TOKEN, MASK_TOKEN, CLS_TOKEN)
"""Special tokens of a vocabulary in the order of their ids, which precede all genes."""

PAD_ID: Final = 0
"""Padding id in every vocabulary; the ids below apply to a vocabulary with the usual special tokens."""
UNK_ID: Final = 1
MASK_ID: Final = 2
CLS_ID: Final = 3
N_SPECIAL: Final = len(SPECIAL_TOKENS)

IGNORE_LABEL: Final = -100
"""Label of a position without a target, i.e. the ``ignore_index`` of torch's cross entropy."""

TARGET_SUM: Final = 10_000.0
"""Total counts to which a cell is scaled before log1p (CP10K)."""

OBSM_KEY: Final = "X_scforge"
QUERY_KEY: Final = "X_scforge_query"
"""Key of the embedding of a query model that training has moved out of the reference space."""
AUTO_KEY: Final = "auto"
"""Value that lets the model choose between the two keys above."""
UNS_KEY: Final = "scforge"

REPORT_FILES: Final = ("report.json", "report.csv", "report.html", "report.md")
EVALUATION_FILE: Final = "evaluation.csv"
"""Scores of a fine-tuned model in the folder of its training run."""
