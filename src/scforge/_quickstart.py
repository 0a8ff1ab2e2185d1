"""The quickstart: train on four batches, integrate and annotate a fifth batch, and compare with baselines."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from scforge._constants import REPORT_FILES
from scforge._io import atomic_path, check_files, is_model, sha256_of
from scforge.data.readers import write_h5ad
from scforge.errors import OptionError, spelled
from scforge.eval import Benchmark

if TYPE_CHECKING:
    from anndata import AnnData

    from scforge.eval import Report


logger = logging.getLogger("scforge")

_LABELS, _BATCH, _NEW = "cell_line", "batch", "sc_dropseq"
_PREDICTED = f"scforge_{_LABELS}_transferred"
_FILES = ("umap.png", "blood.png", "cells.h5ad", "quickstart.json")
"""Files next to the report; the last lists the others with checksums."""
_SEEDS = (0, 1, 2)
_KEYS = ("X_scforge", *(f"X_scforge_{seed}" for seed in _SEEDS[1:]))
_MAPPED, _TRANSFERRED = "scforge, new sample mapped", "scforge, label transfer"
_BASELINES = {"pca_scaled": "PCA of scaled genes", "harmony": "Harmony"}
_CLASSIFIERS = {
    "logistic_regression_genes": "logistic regression on genes",
    "logistic_regression_pca": "logistic regression on PCA",
    "knn_pca": "nearest neighbors on PCA",
}


_BLOOD, _N_BLOOD = "scforge://human-blood", 300
_BLOOD_NAMES = {
    "Naive CD4 T": "CD4 T cell",
    "Memory CD4 T": "CD4 T cell",
    "CD8 T": "CD8 T cell",
    "B": "B cell",
    "NK": "NK cell",
    "CD14+ Mono": "CD14 monocyte",
    "FCGR3A+ Mono": "CD16 monocyte",
    "DC": "dendritic cell",
    "Platelet": "platelet or megakaryocyte",
}
"""Types of PBMC 3k and their names in the shipped reference, which was not trained on the last 300 labeled cells."""


class Annotation(Benchmark):
    """Macro-F1 and accuracy of predicted labels compared with the true labels of the same cells."""

    subject = "annotation"
    metrics = ("macro_f1", "accuracy")
    n_draws = 200

    def run(self, made: pd.Series, reference: pd.Series) -> dict[str, float]:
        """Return the scores."""
        return self._scores(made, reference, None)

    def resampled(self, made: pd.Series, reference: pd.Series, *, n: int, seed: int) -> pd.DataFrame:
        """Return the scores of bootstrap samples of the cells."""
        from scforge.eval.report import bootstrap_weights

        weights = bootstrap_weights(len(reference), n, seed=seed)
        return pd.DataFrame([self._scores(made, reference, drawn) for drawn in weights])

    def _scores(self, made: pd.Series, reference: pd.Series, weights: np.ndarray | None) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, f1_score

        # Labels that no cell has count as errors of the cells that got them, not as classes with an F1 of 0.
        options = {"labels": sorted(set(reference)), "average": "macro", "zero_division": 0.0}
        return {
            "macro_f1": float(f1_score(reference, made, sample_weight=weights, **options)),
            "accuracy": float(accuracy_score(reference, made, sample_weight=weights)),
        }


def run(output: str | os.PathLike[str] = "quickstart", *, overwrite: bool = False) -> Report:
    """Integrate the bundled cell lines, annotate a new sample and blood cells, and write the results into a folder.

    Parameters
    ----------
    output
        Folder for ``umap.png``, ``blood.png``, ``report.md``, ``report.html``, ``report.json``, ``report.csv``,
        ``cells.h5ad``, ``quickstart.json`` (checksums of pictures and cells) and the saved model ``model``.
    overwrite
        Whether to replace the results of an earlier run.

    Returns
    -------
    The report, which is also written into the folder.

    Raises
    ------
    OptionError
        If the folder contains results and `overwrite` is False, or files with these names by others.
    """
    import matplotlib.pyplot as plt

    import scforge

    folder = Path(output)
    check_files("output", folder, REPORT_FILES, described_by="report.json", overwrite=overwrite)
    check_files("output", folder, _FILES, described_by=_FILES[-1], overwrite=overwrite)
    model_folder = folder / "model"
    if os.path.lexists(model_folder) and not (overwrite and is_model(model_folder)):
        raise OptionError(
            f"already contains 'model'; choose another folder, or pass "
            f"{spelled('overwrite=True', '--overwrite')} to replace what scforge wrote.",
            output=str(folder),
        )
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    cells = scforge.datasets.lung_cell_lines()
    new = (cells.obs[_BATCH] == _NEW).to_numpy()
    cells = cells[np.argsort(new, kind="stable")].copy()  # the reference first
    n_reference = int((~new).sum())
    reference, query = _part(cells[:n_reference]), _part(cells[n_reference:])
    logger.info(
        "Reference: %d cells of %d batches. New sample %r: %d cells.",
        *(reference.n_obs, reference.obs[_BATCH].nunique(), _NEW, query.n_obs),
    )
    scforge.models.Encoder.setup_anndata(reference, batch_key=_BATCH, labels_key=_LABELS)
    models, seconds, predicted = [], [], []
    for seed, key in zip(_SEEDS, _KEYS, strict=True):
        begin = time.perf_counter()
        model = scforge.models.Encoder(reference, seed=seed)
        model.train(progress_bar=False)
        seconds.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        mapped = scforge.models.Encoder.load_query_data(query, model)
        parts = [encoder.get_latent_representation(key_added=None) for encoder in (model, mapped)]
        cells.obsm[key] = np.concatenate(parts)
        predicted.append(mapped.transfer_labels()["label"].astype(str))
        models.append(model)
        logger.info(
            "Seed %d: trained on the reference in %.0f s, mapped and annotated the new sample in %.1f s.",
            *(seed, seconds[-1], time.perf_counter() - begin),
        )
    cells.obs[_PREDICTED] = predicted[0].astype("category").reindex(cells.obs_names)
    logger.info("Comparing with baselines ...")
    report = _report(cells, reference, query, predicted, float(np.mean(seconds)))
    logger.info("Labeling blood cells by %s ...", _BLOOD)
    blood = scforge.datasets.pbmc3k()
    blood = blood[blood.obs["cell_type"].notna()][-_N_BLOOD:].copy()
    truth = blood.obs.pop("cell_type").map(_BLOOD_NAMES).astype(str)
    is_right = scforge.annotate(blood, _BLOOD).labels["label"].astype(str) == truth
    report.facts["blood"] = (
        f"{_N_BLOOD} cells of PBMC 3k, labeled by {_BLOOD}, which was trained on other cells of this donor and on two "
        f"more data sets: {is_right.mean():.1%} of the labels are those of the published clusters (blood.png)"
    )
    logger.info("Plotting ...")
    models[0].save(folder / "model", overwrite=overwrite)
    with contextlib.ExitStack() as written:
        *paths, listed = (
            written.enter_context(atomic_path(folder / name, overwrite=overwrite, argument="output")) for name in _FILES
        )
        _plot(cells, paths[0])
        figure = scforge.pl.annotation(blood)[0].figure
        figure.savefig(paths[1], dpi=110)
        plt.close(figure)
        write_h5ad(paths[2], cells)
        sums = {name: sha256_of(path) for name, path in zip(_FILES, paths, strict=False)}
        listed.write_text(json.dumps({"scforge_version": scforge.__version__, "sha256": sums}) + "\n", encoding="utf-8")
    report.write(folder, overwrite=overwrite)
    print(report.to_markdown())
    look = ", ".join(str(folder / name) for name in ("umap.png", "blood.png", "report.md"))
    print(f"Done in {time.perf_counter() - start:.0f} s. Look at {look}.")
    return report


def _part(cells: AnnData) -> AnnData:
    part = cells.copy()
    for key in (_BATCH, _LABELS):
        part.obs[key] = part.obs[key].cat.remove_unused_categories()
    return part


def _report(cells: AnnData, reference: AnnData, query: AnnData, predicted: list[pd.Series], seconds: float) -> Report:
    from scforge.eval import Report, Scib, compare, embedding_baselines
    from scforge.eval.harness import Replicates

    embeddings = {_MAPPED: Replicates(cells.obsm[key] for key in _KEYS)}
    for name, embedding in embedding_baselines(cells, list(_BASELINES), batch_key=_BATCH).items():
        cells.obsm[f"X_{name}"] = embeddings[_BASELINES[name]] = embedding
    labels = {_TRANSFERRED: Replicates(predicted), **_classified(reference, query)}
    parts = {
        "integration": (Scib(_LABELS, _BATCH, leiden=False), embeddings, cells.obs),
        "annotation": (Annotation(), labels, query.obs[_LABELS].astype(str)),
    }
    report = Report("scforge quickstart")
    for name, (benchmark, outputs, truth) in parts.items():
        kinds = {
            method: "model" if isinstance(output, Replicates) else "baseline" for method, output in outputs.items()
        }
        report.extend(compare(benchmark, outputs, truth, kinds=kinds), name)
    report.facts |= {
        "data": f"{cells.n_obs} cells of {cells.obs[_LABELS].nunique()} lung cancer cell lines in "
        f"{cells.obs[_BATCH].nunique()} batches; 3% of the measured counts",
        "reference": f"{reference.n_obs} cells, CEL-seq2",
        "new sample": f"{query.n_obs} cells, Drop-seq",
        "training": f"{len(predicted)} runs of {seconds:.0f} s on average; scores are means over runs",
    }
    report.notes = [
        "Integration: scIB scores of all cells. scforge was trained on the reference only and maps the new sample; PCA "
        "and Harmony are fitted on all cells. Annotation: labels of the new sample, predicted from the labels of the "
        "reference. No method saw the labels of the new sample. Intervals are over cells and training runs. The "
        "defaults of scforge were chosen on four data sets, and the full counts of these cells were one of them.",
    ]
    return report


def _classified(reference: AnnData, query: AnnData) -> dict[str, pd.Series]:
    """Return the labels predicted for the new sample by classifiers on genes and on principal components."""
    from scforge.data import open_cells
    from scforge.eval.baselines import BaselineInputs, classification_baselines

    labels = reference.obs[_LABELS].cat
    genes = open_cells(reference).vocab
    rows = [np.arange(part.n_obs) for part in (reference, query)]
    inputs = BaselineInputs.of(open_cells(reference, genes), rows[0], open_cells(query, genes), rows[1])
    probabilities = classification_baselines(inputs, labels.codes.to_numpy(), len(labels.categories))
    return {
        title: pd.Series(labels.categories[probabilities[name].argmax(axis=1)], index=query.obs_names)
        for name, title in _CLASSIFIERS.items()
    }


def _plot(cells: AnnData, path: Path) -> None:
    import matplotlib.pyplot as plt

    import scforge

    titles = {f"X_{name}": title for name, title in _BASELINES.items()} | {_KEYS[0]: _MAPPED}
    figure, axes = plt.subplots(2, len(titles), figsize=(13, 7.5), layout="constrained")
    scforge.pl.embeddings(cells, titles, color=[_BATCH, _LABELS], axes=axes.ravel())
    figure.suptitle("Lung cancer cell lines, UMAP: colored by batch (top) and by cell line (bottom)")
    figure.savefig(path, dpi=110)
    plt.close(figure)
