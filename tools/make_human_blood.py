"""Train the model behind ``scforge://human-blood`` on three data sets of blood cells, and write its folder.

Usage: ``python tools/make_human_blood.py --data FOLDER``

FOLDER contains ``zheng_facs_pbmc.h5ad``, ``pbmc10k_cite.h5ad`` and, for the scores in the card, ``kang_ifnb.h5ad``,
which nothing is trained on. (``kang_ctrl_8donor.h5ad`` has only 136 of the 2,000 genes.) The same versions of scforge
and its dependencies give the same weights on the same kind of processor.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from sklearn.metrics import f1_score

import scforge
from scforge.estimators.transfer import reference_to_save

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from _transfer_tasks import BATCH, BLOOD, IFNB_TO_PBMC, LABEL, prepared, with_symbols
from label_transfer import VIEWS, linear

NAME = "scforge://human-blood"
TARGET = Path(scforge.__file__).parent / "hub" / "models" / "human-blood"
MAX_BYTES = 4_000_000
"""Maximum size in a wheel, which is a zip file."""
N_REFERENCE, N_HELD_OUT = 4_000, 300
"""Number of labeled cells in the folder, and of cells of PBMC 3k that are left out for the quickstart."""
# Narrower than the default light encoder, so that the folder stays small.
SIZES = {"hidden_dim": 128, "ffn_dim": 256, "latent_dim": 32, "decoder_dim": 64}
NAMES = {
    "CD4 T": "CD4 T cell",
    "CD8 T": "CD8 T cell",
    "B": "B cell",
    "NK": "NK cell",
    "CD14 monocyte": "CD14 monocyte",
    "FCGR3A monocyte": "CD16 monocyte",
    "dendritic": "dendritic cell",
    "megakaryocyte": "platelet or megakaryocyte",
}
ABOUT = (
    "PBMC 3k (10x Genomics; 2,338 cells labeled by clusters), Fresh 68k PBMC, sorted populations (10x Genomics, Zheng "
    "et al. 2017; 3,173 cells labeled by FACS), 10k PBMCs with TotalSeq-B (10x Genomics; 6,328 cells labeled by gates "
    "on proteins): healthy adults, 10x Chromium 3' v1, v2 and v3. CC BY 4.0"
)
SCORED = (
    "Macro-F1 of the labels of 1,975 blood cells of eight lupus patients, as they are (control) and after interferon "
    "(Kang et al. 2018), seven types. Nothing was trained on these cells, but options of `transfer_labels` were chosen "
    "on them as another task. The baselines learn from the same three data sets."
)
CITATION = "Zheng et al. (2017), Nature Communications 8, 14049; 10x Genomics data sets under CC BY 4.0."


def reference(folder: str) -> ad.AnnData:
    """Return the labeled cells of the three data sets in the genes of all, without those that the quickstart labels."""
    parts = [with_symbols(name, folder, *rest) for name, *rest in (BLOOD[key] for key in ("pbmc3k", "facs", "cite"))]
    cells = ad.concat([parts[0][:-N_HELD_OUT], *parts[1:]])
    return prepared(cells, cells.obs[LABEL].map(NAMES), cells.obs[BATCH])


def scores(folder: str) -> pd.DataFrame:
    """Return the scores of the written model, and of baselines that learn from the same cells, on other donors."""
    adata = scforge.datasets.load("kang_ifnb", folder)
    query = prepared(adata, adata.obs["cell_type"].map(IFNB_TO_PBMC), adata.obs["condition"])
    truth = query.obs[LABEL].map(NAMES).astype(str).to_numpy()
    is_control = (query.obs[BATCH] == "control").to_numpy()
    table = scforge.annotate(query, NAME, query_batch_key=BATCH).labels
    found = {"scforge": table["label"].astype(str).to_numpy()}
    known = reference(folder)
    shared = known.var_names.intersection(query.var_names)
    pair = known[:, shared].copy(), query[:, shared].copy()
    for name in ("genes", "Harmony"):
        learned, to_label = VIEWS[name](pair, 0)
        batches = pair[0].obs[BATCH].astype(str).to_numpy()
        labels = linear(learned, pair[0].obs[LABEL].astype(str).to_numpy(), batches, to_label, 0)
        found[f"{name}, logistic regression"] = labels["label"].astype(str).to_numpy()
    rows = {
        name: {
            f"macro_f1_{part}": f1_score(truth[of], labels[of], labels=np.unique(truth), average="macro")
            for part, of in {"control": is_control, "interferon": ~is_control}.items()
        }
        for name, labels in found.items()
    }
    return pd.DataFrame(rows).T


def main() -> None:
    """Train, write, score beside baselines, and write again with the scores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of the data sets")
    folder = parser.parse_args().data
    cells = reference(folder)
    cells.obs = cells.obs.rename(columns={LABEL: "cell_type", BATCH: "study"})
    scforge.models.Encoder.setup_anndata(cells, labels_key="cell_type", batch_key="study")
    # Genes of a named vocabulary have ids and symbols, so that cells may have either.
    model = scforge.models.Encoder(cells, vocab="human_protein_coding", n_top_genes=2_000, seed=0, **SIZES)
    model.train(progress_bar=False, accelerator="cpu", precision="32-true")
    model.fitted.facts = model.fitted.facts.with_given(license="cc-by-4.0", data=ABOUT, citation=CITATION)
    kept = reference_to_save(model, N_REFERENCE)
    model.fitted.write(TARGET, overwrite=True, card=model.fitted.card(name=NAME, reference=kept), reference=kept)
    table = scores(folder)
    facts = model.fitted.facts.with_given(metrics=table, n_epochs=model.n_epochs_)
    named = tuple(replace(score, data="Kang et al. 2018, PBMC") for score in facts.scores)
    model.fitted.facts = replace(facts, scores=named, table=f"{SCORED}\n\n{facts.table}")
    model.fitted.write(TARGET, overwrite=True, card=model.fitted.card(name=NAME, reference=kept), reference=kept)
    packed = BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in TARGET.iterdir():
            file.chmod(0o644)
            wheel.write(file, file.name)
    size = packed.tell()
    if size > MAX_BYTES:
        raise ValueError(f"{TARGET} takes {size:,} bytes in a wheel, more than {MAX_BYTES:,}; lower SIZES")
    scforge.models.Encoder.load(NAME)
    print(f"{TARGET.name}: {size / 1e6:.2f} MB in a wheel, {model.vocab.n_genes} genes\n{table}")


if __name__ == "__main__":
    main()
