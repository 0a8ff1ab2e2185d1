"""What the tasks of cz-benchmarks take, made from columns of an AnnData.

Shapes: N cells, D dimensions, G genes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from scforge._constants import TARGET_SUM
from scforge.data.checks import counts_of
from scforge.errors import DataError, OptionError, did_you_mean, first_line, listing
from scforge.eval.base import check_column

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = ["EXPRESSION_TASK", "KEYS", "TWO_ORGANISMS", "by_organism", "representation_of", "task_input"]

EXPRESSION_TASK = "perturbation_expression_prediction"
TWO_ORGANISMS = ("cross-species_integration", "cross-species_label_prediction")
KEYS = {
    "batch_integration": ("labels_key", "batch_key"),
    "clustering": ("labels_key",),
    "cross-species_integration": ("labels_key", "organism_key"),
    "cross-species_label_prediction": ("labels_key", "organism_key"),
    "embedding": ("labels_key",),
    "label_prediction": ("labels_key",),
    EXPRESSION_TASK: ("perturbation_key", "control"),
    "sequential_organization": ("labels_key",),
}

_MOST_P, _LEAST_CHANGE = 1e-4, 1.0
"""Genes that count as changed, as SingleCellPerturbationDataset of cz-benchmarks has it."""

_FEWEST_CELLS = 2


def representation_of(name: str, adata: AnnData, key: str) -> np.ndarray:
    """Return what a task scores: an embedding, float, shape (N, D), or predicted expression, shape (N, G)."""
    where, place = ("layers", adata.layers) if name == EXPRESSION_TASK else ("obsm", adata.obsm)
    if key not in place:
        known = [one for one in place if one is not None]
        raise DataError(
            f"keys names {key!r}, which is not in adata.{where}{did_you_mean(key, known)} "
            f"(adata.{where} has: {listing(known)})"
        )
    values = place[key]
    values = np.asarray(values.toarray() if hasattr(values, "toarray") else values)
    if not np.isfinite(values).all():
        raise DataError(f"adata.{where}[{key!r}] holds values that are not numbers; it cannot be scored.")
    return values


def task_input(
    name: str,
    adata: AnnData,
    model: Any,
    keys: Mapping[str, str | None],
    *,
    layer: str | None,
    seed: int,
    options: Mapping[str, Any],
) -> Any:
    """Return the input of a task, an instance of its pydantic `model`.

    Raises
    ------
    DataError
        If a column is missing or incomplete.
    OptionError
        If a key that the task needs is None, or an option is unknown or cannot be used.
    """
    from pydantic import ValidationError

    for argument in KEYS.get(name, ()):
        if keys[argument] is None:
            raise OptionError(f"the task {name!r} needs {argument}; give it.")
    made = _made(name, adata, keys, layer=layer, seed=seed)
    known = [option for option in model.model_fields if option not in made or option == "pred_effect_operation"]
    for option in options:
        if option not in known:
            raise OptionError(
                f"the task {name!r} takes no option {option!r}{did_you_mean(option, known)} "
                f"(it takes: {listing(known)})"
            )
    try:
        return model(**{**made, **options})
    except ValidationError as error:
        problem = error.errors()[0]
        told = first_line(ValueError(problem["msg"]))
        raise OptionError(f"{problem['loc'][0]}={problem['input']!r} is refused by {name!r}: {told}.") from None


def _made(name: str, adata: AnnData, keys: Mapping[str, str | None], *, layer: str | None, seed: int) -> dict[str, Any]:
    if name == EXPRESSION_TASK:
        cells = _with_effects(adata, str(keys["perturbation_key"]), str(keys["control"]), layer=layer, seed=seed)
        # The layer holds logs, whose differences are the log ratios that the true effects are.
        return {"adata": cells, "pred_effect_operation": "difference"}
    labels = _column(adata, "labels_key", str(keys["labels_key"]))
    if name in TWO_ORGANISMS:
        return _of_organisms(name, adata, labels, keys)
    if name == "batch_integration":
        return {"labels": labels, "batch_labels": _column(adata, "batch_key", str(keys["batch_key"]))}
    if name == "label_prediction":
        return {"labels": labels}
    if name == "sequential_organization":
        numbers = pd.to_numeric(labels, errors="coerce")
        if numbers.isna().any():
            raise DataError(
                f"labels_key={keys['labels_key']!r} holds {labels[numbers.isna()].iloc[0]!r}, which has no order; "
                "choose a column of numbers, e.g. of time points."
            )
        return {"obs": adata.obs[[]], "input_labels": numbers.to_numpy(dtype=float)}
    return {"obs": adata.obs[[]], "input_labels": labels} if name == "clustering" else {"input_labels": labels}


def _column(adata: AnnData, argument: str, key: str) -> pd.Series:
    """Return a complete column as text, numbered from 0."""
    check_column(argument, key, adata.obs)
    column = adata.obs[key]
    if column.isna().any():
        raise DataError(f"{argument}={key!r} is missing for {int(column.isna().sum())} cells; leave them out first.")
    return column.astype(str).astype(object).reset_index(drop=True)


def by_organism(organisms: pd.Series) -> dict[str, np.ndarray]:
    """Return the rows of each organism, in the order in which they are met."""
    names = organisms.astype(str).to_numpy()
    return {name: np.flatnonzero(names == name) for name in dict.fromkeys(names)}


def _of_organisms(name: str, adata: AnnData, labels: pd.Series, keys: Mapping[str, str | None]) -> dict[str, Any]:
    from czbenchmarks.datasets.types import Organism

    column = _column(adata, "organism_key", str(keys["organism_key"]))
    known, rows = {str(organism): organism for organism in Organism}, by_organism(column)
    for organism in rows:
        if organism not in known:
            raise DataError(
                f"obs[{keys['organism_key']!r}] holds {organism!r}, which cz-benchmarks does not know"
                f"{did_you_mean(organism, known)} (organisms: {listing(known, most=6)})"
            )
    if len(rows) < 2:
        raise DataError(f"obs[{keys['organism_key']!r}] holds one organism; {name} compares at least 2.")
    parts = [labels.iloc[found].reset_index(drop=True) for found in rows.values()]
    organisms = [known[organism] for organism in rows]
    if name == "cross-species_integration":
        return {"labels": parts, "organism_list": organisms}
    sets = [set(part) for part in parts]
    if alone := set.union(*sets) - set.intersection(*sets):
        raise DataError(
            f"obs[{keys['labels_key']!r}] has labels that not all organisms have ({listing(sorted(alone), most=3)}); "
            "leave their cells out."
        )
    made = {"labels": parts, "organisms": organisms, "aggregation_method": "none"}
    if keys["groups_key"] is not None:
        groups = _column(adata, "groups_key", keys["groups_key"])
        if (labels.groupby(groups.to_numpy()).nunique() > 1).any():
            raise DataError(
                f"groups_key={keys['groups_key']!r} has groups with several labels, of which the task would take the "
                "first; make a column of sample and label."
            )
        made |= {
            "sample_ids": [groups.iloc[found].reset_index(drop=True) for found in rows.values()],
            "aggregation_method": "mean",
        }
    return made


def _log_counts(adata: AnnData, layer: str | None) -> AnnData:
    """Return the cells with log1p CP10K as ``X``, CSR float32."""
    import anndata
    import scanpy as sc

    counts = counts_of(adata, layer).astype(np.float32)
    cells = anndata.AnnData(counts.copy(), obs=adata.obs[[]].copy(), var=adata.var[[]].copy())
    sc.pp.normalize_total(cells, target_sum=TARGET_SUM)
    sc.pp.log1p(cells)
    return cells


def _with_effects(adata: AnnData, perturbation_key: str, control: str, *, layer: str | None, seed: int) -> AnnData:
    """Return cells with what the task reads: changed genes of each perturbation, and a control for each cell.

    Genes are those of a Wilcoxon test against the controls, by the limits of cz-benchmarks; all of them are targets.
    Controls are drawn at random, without replacement where there are enough.
    """
    import scanpy as sc

    conditions = _column(adata, "perturbation_key", perturbation_key)
    names = [str(name) for name in np.unique(conditions) if name != control]
    if len(names) == len(np.unique(conditions)):
        raise DataError(f"control={control!r} is not in obs[{perturbation_key!r}] (there: {listing(names)})")
    sizes = conditions.value_counts()
    if len(names) < 2 or sizes.min() < _FEWEST_CELLS:
        raise DataError(
            f"{EXPRESSION_TASK} needs 2 perturbations and controls of {_FEWEST_CELLS} cells each, but obs"
            f"[{perturbation_key!r}] has {len(names)} perturbations, of {sizes.min()} cells at least; take more cells."
        )
    cells = _log_counts(adata, layer)
    cells.obs["condition"] = pd.Categorical(conditions)
    sc.tl.rank_genes_groups(cells, "condition", reference=control, method="wilcoxon")
    tested = sc.get.rank_genes_groups_df(cells, group=names)
    if "group" not in tested:
        tested.insert(0, "group", names[0])
    changed = tested[(tested["pvals_adj"] < _MOST_P) & (tested["logfoldchanges"].abs() >= _LEAST_CHANGE)]
    if changed.empty:
        raise DataError(
            f"no gene changes in any perturbation of obs[{perturbation_key!r}] (p < {_MOST_P}, log2 fold change of "
            f"{_LEAST_CHANGE:g}); take more cells."
        )
    rng, ids = np.random.default_rng(seed), adata.obs_names.astype(str)
    controls = ids[conditions == control]
    pairs = {}
    for name in names:
        treated = ids[conditions == name]
        drawn = rng.choice(controls, size=len(treated), replace=len(treated) > len(controls))
        pairs[name] = dict(zip(treated, (str(one) for one in drawn), strict=True))
    effects = pd.DataFrame(
        {
            "condition": changed["group"].astype(str).to_numpy(),
            "gene_id": changed["names"].astype(str).to_numpy(),
            "logfoldchange": changed["logfoldchanges"].to_numpy(dtype=float),
        }
    )
    cells.uns = {
        "config": {"condition_key": "condition", "control_name": control},
        "de_results": effects,
        "metric_column": "logfoldchange",
        "control_cells_map": pairs,
        "target_conditions_dict": {name: genes.tolist() for name, genes in effects.groupby("condition")["gene_id"]},
    }
    return cells
