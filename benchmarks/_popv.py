"""Label cells with popV in an environment of its own; called by ``label_transfer.py``.

popV 0.6 needs an older scikit-learn and harmonypy than scforge is tested with, and TensorFlow. All its methods are
trained on the reference and vote, except OnClass, which needs terms of the Cell Ontology. Cells with fewer than 30
counts get no label.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
from scipy import sparse


def main() -> None:
    import popv
    import scvi

    warnings.simplefilter("ignore")
    folder, (seed, scvi_epochs, scanvi_epochs) = Path(sys.argv[1]), map(int, sys.argv[2:])
    began = time.process_time()
    scvi.settings.seed = seed
    popv.settings.n_jobs = 1
    popv.settings.compute_umap_embedding = False
    parts = {}
    for name in ("reference", "query"):
        counts = sparse.csr_matrix(sparse.load_npz(folder / f"{name}.npz"))
        obs = pd.read_csv(folder / f"{name}.csv", dtype=str).set_index(pd.Index(np.arange(counts.shape[0]).astype(str)))
        obs.index = name + obs.index
        parts[name] = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=np.arange(counts.shape[1]).astype(str)))
    names = parts["query"].obs_names
    parts["query"].obs["label"] = "unknown"
    with tempfile.TemporaryDirectory() as models:
        adata = popv.preprocessing.Process_Query(
            parts["query"],
            parts["reference"],
            ref_labels_key="label",
            ref_batch_key="batch",
            query_batch_key="batch",
            cl_obo_folder=False,
            save_path_trained_models=models,
        ).adata
        kwargs = {
            "CELLTYPIST": {"method_kwargs": {"n_jobs": 1}},  # its ten processes would not be on the clock
            "KNN_SCVI": {"train_kwargs": {"max_epochs": scvi_epochs}},
            "SCANVI_POPV": {"train_kwargs": {"max_epochs": scanvi_epochs}},
        }
        popv.annotation.annotate_data(adata, methods_kwargs=kwargs)
    found = adata.obs.reindex(names)
    score = found["popv_majority_vote_score"].astype(float) / len(adata.uns["methods"])
    labels = found["popv_majority_vote_prediction"].astype(object)
    table = pd.DataFrame({"label": labels.fillna(""), "probability": score.fillna(0.0)})
    table["cpu_seconds"] = time.process_time() - began
    table.to_csv(folder / "predicted.csv", index=False)


if __name__ == "__main__":
    main()
