"""Which weight of the alignment of batches integrates best, beside PCA, Harmony and scVI?

A light encoder is pretrained on all cells without labels, and fine-tuned for ``"integration"`` with several
weights of ``alignment``: 0 leaves the decoder that knows the batch alone. Rows are means over trainings with different
seeds; scib-metrics' figures are over the same cells, drawn once, and baselines are fitted on all cells. Kang has eight
donors of one experiment as batches, sc_mixology five batches of two protocols with three or five cell lines::

    python benchmarks/integration.py --data FOLDER
"""

from __future__ import annotations

import argparse
import os
import time
import warnings

import numpy as np

from scforge.datasets import get_card, load
from scforge.eval import Scib, evaluate
from scforge.models import Encoder

DATASETS = ("sc_mixology", "kang_ctrl_8donor")
BASELINES = ["pca", "harmony", "scvi"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--alignments", nargs="+", type=float, default=[0.0, 0.001, 0.02])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cells", type=int, default=4_000, help="cells that are scored")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    options = {"progress_bar": False, "accelerator": "cpu"}
    for name in args.datasets:
        card, adata = get_card(name), load(name, args.data)
        Encoder.setup_anndata(adata, labels_key=card.labels_key, batch_key=card.batch_key)
        rows: dict[str, list[str]] = {}
        seconds: dict[str, list[float]] = {}
        for seed in range(args.seeds):
            start = time.perf_counter()
            base = Encoder(adata, seed=seed)
            base.train(**options)
            pretraining = time.perf_counter() - start
            keep(rows, seconds, adata, "pretrained", base.get_latent_representation(key_added=None), pretraining)
            for weight in args.alignments:
                start = time.perf_counter()
                task = {"name": "integration", "alignment": weight}
                model = base.finetune(task, test_size=0.0, seed=seed, **options)
                embedding = model.predict()
                spent = pretraining + time.perf_counter() - start
                keep(rows, seconds, adata, f"alignment {weight:g}", embedding, spent)
        scored = np.sort(np.random.default_rng(0).permutation(adata.n_obs)[: args.cells])
        report = evaluate(
            adata,
            Scib(card.labels_key, card.batch_key),
            [key for keys in rows.values() for key in keys],
            baselines=BASELINES,
            batch_key=card.batch_key,
            replicates=rows,
            rows=scored,
            intervals=False,
            key_added=None,
            title=f"Integration of {card.title}",
        )
        print(report.to_markdown(), flush=True)
        print("\n".join(f"{key}: {np.mean(spent):.0f} s" for key, spent in seconds.items()), flush=True)


def keep(rows: dict, seconds: dict, adata, name: str, embedding: np.ndarray, spent: float) -> None:
    """Put an embedding beside those of the same method with other seeds."""
    key = f"{name}, seed {len(rows.setdefault(name, []))}"
    adata.obsm[key] = embedding
    rows[name].append(key)
    seconds.setdefault(name, []).append(spent)


if __name__ == "__main__":
    main()
