"""The model card that lies beside the weights."""

from __future__ import annotations

from scforge._version import __version__
from scforge.estimators.spec import ModelSpec

__all__ = ["model_card"]

_CARD = """---
library_name: scforge
tags: [single-cell, {architecture}]
---

# {architecture}, {parameters:,} parameters

Made with scforge {version}. Trained for {n_epochs} epochs with the objective `{objective}` on tokens of the strategy
`{tokenizer}` over {n_genes:,} genes ({kind}, {release}).

```python
import scforge

model = scforge.models.Encoder.load("this folder")
model.get_latent_representation(adata)  # writes adata.obsm["X_scforge"]
```

`adata` needs raw counts. Its genes are matched by name with those of `vocab.json`.
"""


def model_card(spec: ModelSpec, n_epochs: int, parameters: int) -> str:
    """Return the text of ``README.md`` in a model folder."""
    return _CARD.format(
        architecture=spec.architecture,
        parameters=parameters,
        version=__version__,
        n_epochs=n_epochs,
        objective=spec.objective,
        tokenizer=spec.tokenizer,
        n_genes=spec.vocab.n_genes,
        kind=spec.vocab.kind,
        release=spec.vocab.release,
    )
