"""Train the model behind ``scforge://pbmc3k-light`` on the embedded PBMC 3k data, and write its folder.

Usage: ``python tools/make_pbmc3k_light.py``

The same versions of scforge and its dependencies give the same weights on the same kind of processor.
"""

from __future__ import annotations

from pathlib import Path

import scforge
from scforge.eval import LabelPrediction, evaluate

NAME = "scforge://pbmc3k-light"
TARGET = Path(scforge.__file__).parent / "hub" / "models" / "pbmc3k-light"
MAX_BYTES = 2_000_000
# Narrower than the default light encoder, so that the folder stays small.
SIZES = {"hidden_dim": 96, "ffn_dim": 256, "latent_dim": 32, "decoder_dim": 64}


def main() -> None:
    """Train, score beside baselines, write, and load what was written."""
    adata = scforge.datasets.pbmc3k()
    scforge.models.Encoder.setup_anndata(adata)
    # Genes of a named vocabulary have ids and symbols, so that cells may have either.
    model = scforge.models.Encoder(adata, vocab="human_protein_coding", n_top_genes=2_000, seed=0, **SIZES)
    model.train(progress_bar=False, accelerator="cpu", precision="32-true")
    model.get_latent_representation()
    report = evaluate(adata, LabelPrediction("cell_type"), {"X_scforge": "model"}, title="pbmc3k-light")
    about = adata.uns["scforge_dataset"]
    model.fitted.facts = model.fitted.facts.with_given(
        license="cc-by-4.0",
        data=f"{about['title']}, 2,700 peripheral blood mononuclear cells of one healthy donor ({about['source']})",
        citation=about["citation"],
        metrics=report,
        n_epochs=model.n_epochs_,
    )
    model.fitted.write(TARGET, overwrite=True, card=model.fitted.card(name=NAME))
    for file in TARGET.iterdir():
        file.chmod(0o644)
    size = sum(file.stat().st_size for file in TARGET.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{TARGET} has {size:,} bytes, more than {MAX_BYTES:,}; lower SIZES")
    scforge.models.Encoder.load(NAME, adata)
    print(f"{TARGET.name}: {size / 1e6:.2f} MB\n{model.fitted.facts.table}")


if __name__ == "__main__":
    main()
