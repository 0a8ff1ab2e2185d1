"""Does fine-tuning annotate cells better than what is simpler, and do adapters do as well as all weights?

On PBMC 3k (test cells drawn within each type) and on PBMC of eight donors (whole donors are tested): a base model is
pretrained on the cells that are not tested, without labels, and fine-tuned on the labels of the training cells. Rows:

- ``full``: all weights; ``lora``: adapters and head; ``head``: the head alone, the encoder frozen;
- ``from scratch``: all weights of the same architecture, which was not pretrained;
- the baselines of ``Encoder.evaluate``: logistic regression on 50 principal components and on genes, kNN, the frozen
  embedding of the base model, the commonest type;
- with ``--scanvi``, scANVI on scVI of 2,000 highly variable genes, corrected for the donor, both by their defaults but
  for an early end of scVI. It sees the test cells, without labels, while it is trained; the others do not.

All methods learn from the same labels and are scored on the same cells, once for each seed.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import anndata
import numpy as np
import pandas as pd
from sklearn.metrics import f1_score

from scforge.finetuning.metrics import calibration_error
from scforge.finetuning.splits import split_for
from scforge.models import Encoder, count_parameters

DATASETS: dict[str, tuple[str, str, str | None]] = {
    "pbmc3k": ("pbmc3k.h5ad", "cell_type", None),
    "kang_ctrl_8donor": ("kang_ctrl_8donor.h5ad", "cluster_id", "sample_id"),
}
BASES: dict[str, dict[str, Any]] = {
    "light": {},
    "transformer": {
        "architecture": "transformer_encoder",
        "tokenizer": {"name": "rank_value", "max_len": 256},
        "n_top_genes": 2_000,
        "hidden_dim": 64,
        "num_layers": 2,
        "num_heads": 4,
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": True},
    "head": {"freeze": True},
}


def with_split(adata: anndata.AnnData, labels: str, groups: str | None, seed: int) -> anndata.AnnData:
    """Mark cells as training, validation and test; of eight donors other two are tested with each seed."""
    usable = np.asarray(adata.obs[labels].notna())
    part = np.full(adata.n_obs, None, dtype=object)
    if groups is None:
        split = split_for(
            adata.n_obs, validation_size=0.1, test_size=0.2, seed=seed, usable=usable, strata=adata.obs[labels]
        )
        for name in ("train", "validation", "test"):
            part[getattr(split, name)] = name
    else:
        donors = np.random.default_rng(seed).permutation(adata.obs[groups].unique().astype(str))
        of_cells = adata.obs[groups].astype(str)
        part[usable] = "train"
        part[usable & np.isin(of_cells, donors[:2])] = "test"
        part[usable & np.isin(of_cells, donors[2:3])] = "validation"
    adata.obs["part"] = pd.Categorical(part)
    return adata


def saved_megabytes(model: Encoder, way: str) -> float:
    """Return the size of what has to be kept of a fine-tuned model, beside its base."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "model"
        model.save(place, adapter_only=True) if way == "lora" else model.save(place)
        return sum(file.stat().st_size for file in place.rglob("*.safetensors")) / 1e6


def rows_of(name: str, adata: anndata.AnnData, labels: str, seed: int, args: argparse.Namespace) -> list[dict]:
    """Fine-tune in all ways with one split; return a row for each and for the baselines."""
    rows = []
    options = {"progress_bar": False, "accelerator": "cpu"}
    for base_name in args.bases:
        seen = adata[np.asarray(adata.obs["part"] != "test")].copy()
        Encoder.setup_anndata(seen, labels_key=labels)
        base = Encoder(seen, seed=seed, **BASES[base_name])
        scratch = Encoder(seen, seed=seed, **BASES[base_name])
        start = time.perf_counter()
        base.train(args.epochs, **options)
        pretraining = time.perf_counter() - start
        for way, how in {**WAYS, "from scratch": {}}.items():
            start, cpu = time.perf_counter(), time.process_time()
            of = scratch if way == "from scratch" else base
            model = of.finetune("annotation", adata, labels_key=labels, split_key="part", seed=seed, **how, **options)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
            wants = way == "full"
            scores = model.evaluate(baselines=wants)
            share = count_parameters(model.module) / count_parameters(model.module, trainable_only=False)
            known = {"dataset": name, "seed": seed, "base": base_name}
            rows.append(
                {
                    **known,
                    "method": f"scforge, {way}",
                    **scores.loc["scforge"].to_dict(),
                    "trained": share,
                    "MB": saved_megabytes(model, way),
                    "seconds": seconds,
                    "cpu": cpu,
                    "epochs": model.n_epochs_,
                }
            )
            for method in scores.index[1:]:
                of_base = base_name if "frozen" in method else "-"
                if of_base == "-" and base_name != args.bases[0]:
                    continue  # the same for all bases
                rows.append({**known, "base": of_base, "method": method, **scores.loc[method].to_dict()})
        print(f"{name}, seed {seed}, {base_name}: pretrained in {pretraining:.0f} s", flush=True)
    return rows


def scanvi_row(adata: anndata.AnnData, labels: str, groups: str | None, seed: int) -> dict[str, Any]:
    """Train scVI and, from it, scANVI with the labels of all cells but the test cells; return its figures on these."""
    import scvi

    from scforge.eval.baselines import variable_genes

    start, cpu = time.perf_counter(), time.process_time()
    scvi.settings.seed = seed
    work = variable_genes(adata, n_top_genes=2_000, batch_key=groups)
    work.X = work.layers.pop("counts")
    if groups is not None:
        work.obs[groups] = adata.obs[groups].to_numpy()
    tested = np.asarray(adata.obs["part"] == "test")
    known = np.asarray(adata.obs["part"].isin(["train", "validation"]))
    truth = adata.obs[labels].astype(str).to_numpy()
    work.obs["known label"] = pd.Categorical(np.where(known, truth, "no label"))
    scvi.model.SCVI.setup_anndata(work, batch_key=groups, labels_key="known label")
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    base = scvi.model.SCVI(work)
    base.train(early_stopping=True, early_stopping_patience=15, plan_kwargs={"n_epochs_kl_warmup": 50}, **quiet)
    model = scvi.model.SCANVI.from_scvi_model(base, unlabeled_category="no label")
    model.train(**quiet)
    probabilities = model.predict(soft=True).iloc[np.flatnonzero(tested)]
    predicted, truth = probabilities.columns[probabilities.to_numpy().argmax(axis=1)].to_numpy(), truth[tested]
    return {
        "base": "-",
        "method": "scANVI",
        "macro_f1": f1_score(truth, predicted, average="macro", labels=np.unique(truth), zero_division=0.0),
        "accuracy": float((predicted == truth).mean()),
        "calibration_error": calibration_error(probabilities.to_numpy().max(axis=1), predicted == truth),
        "trained": 1.0,
        "MB": sum(one.numel() * one.element_size() for one in model.module.parameters()) / 1e6,
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("SCFORGE_DATA"), help="folder with the h5ad files")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    parser.add_argument("--bases", nargs="+", default=list(BASES), choices=list(BASES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scanvi", action="store_true", help="train scANVI, too")
    parser.add_argument("--epochs", type=int, default=None, help="epochs of pretraining; the default is the model's")
    args = parser.parse_args()
    if args.data is None:
        parser.error("name the folder with the data, --data or SCFORGE_DATA")
    warnings.simplefilter("ignore")
    rows = []
    for name in args.datasets:
        file, labels, groups = DATASETS[name]
        for seed in range(args.seeds):
            adata = with_split(anndata.read_h5ad(Path(args.data) / file), labels, groups, seed)
            rows += rows_of(name, adata, labels, seed, args)
            if args.scanvi:
                rows.append({"dataset": name, "seed": seed, **scanvi_row(adata, labels, groups, seed)})
                print(f"{name}, seed {seed}: scANVI in {rows[-1]['seconds']:.0f} s", flush=True)
    table = pd.DataFrame(rows)
    print("\n| data | base | method | macro-F1 | accuracy | calibration error | trained | saved, MB | s | CPU s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for (name, base, method), part in table.groupby(["dataset", "base", "method"], sort=False):
        mean, spread = part.mean(numeric_only=True), part.std(numeric_only=True)
        cells = [
            f"{mean['macro_f1']:.3f} ± {spread['macro_f1']:.3f}",
            f"{mean['accuracy']:.3f}",
            f"{mean['calibration_error']:.3f}",
            *(
                ["", "", "", ""]
                if np.isnan(mean["trained"])
                else [f"{mean['trained']:.1%}", f"{mean['MB']:.2f}", f"{mean['seconds']:.0f}", f"{mean['cpu']:.0f}"]
            ),
        ]
        print(f"| {name} | {base} | {method} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
