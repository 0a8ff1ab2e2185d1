"""Generate cells from prompts and classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from anndata import AnnData
from scipy import sparse

from scforge._checks import check_count, check_positive, check_seed
from scforge._constants import UNS_KEY
from scforge.data.cells import Cells
from scforge.data.vocab import GeneVocab
from scforge.errors import DataError, OptionError, suggest
from scforge.estimators.fitted import FittedModel
from scforge.estimators.genes import gene_numbers
from scforge.estimators.setup import Model
from scforge.models.components.gene_vectors import check_filled
from scforge.models.protocol import GeneratedCells, GeneratingModule
from scforge.tokenizers.base import Tokenizer
from scforge.training.objectives.base import Objective

Prompt = dict[str, torch.Tensor]
"""A prompt with ``input_ids``, ``values`` and ``attention_mask`` of shape (B, P)."""


def generate_with(
    model: Model,
    n_cells: int | None,
    *,
    prompt: Sequence[str] | Mapping[str, float] | AnnData | None,
    condition: str | Sequence[str | None] | None,
    batch_size: int,
    **options: Any,
) -> AnnData:
    """Generate cells, see :meth:`scforge.models.Encoder.generate`."""
    fitted = model.fitted
    module: Any = fitted.backbone
    tokenizer, objective = fitted.tokenizer, fitted.pretraining
    check_generates(fitted)
    check_seed(options["seed"])
    check_count("batch_size", batch_size, "cells")
    tokens = None
    if isinstance(prompt, AnnData):
        if n_cells is not None:
            raise OptionError("has no effect if prompt is an AnnData; omit n_cells.", n_cells=n_cells)
        n_cells = prompt.n_obs
    else:
        n_cells = check_count("n_cells", n_cells, "cells")
    fitted.check_ready("its generated cells are")
    asked, vocab, unmasks = dict(options), tokenizer.vocab, objective.denoises_values
    n_steps, max_len = options.pop("n_steps"), options["max_len"]
    if unmasks:
        room = min(vocab.n_genes + tokenizer.append_cls, getattr(module, "max_generated", None) or math.inf)
        if max_len is not None and check_count("max_len", max_len, "tokens") > room:
            raise OptionError(f"exceeds the {room} tokens that the model accepts; lower max_len.", max_len=max_len)
        options |= {"n_tokens": options.pop("max_len"), "mask_id": vocab.mask_id}
        options |= {} if n_steps is None else {"n_steps": n_steps}
    else:
        if n_steps is not None:
            raise OptionError("has no effect for models without 'masked_diffusion'; omit n_steps.", n_steps=n_steps)
        if not tokenizer.append_eos and max_len is None:
            raise OptionError(
                ", but the cells of this model have no end token; pass the number of tokens.", max_len=None
            )
        if not tokenizer.append_cls and not isinstance(prompt, Mapping | AnnData):
            raise OptionError(
                "must contain values, because the model has no CLS token; pass a dict that maps genes to values.",
                argument="prompt",
            )
        options |= {"eos_id": vocab.eos_id if tokenizer.append_eos else None, "n_special": vocab.n_special}
    if isinstance(prompt, AnnData):
        tokens = prompt_of_cells(model.open_cells(prompt), tokenizer, objective, options["seed"])
        empty = ~tokens["attention_mask"].any(dim=1)
        if not unmasks and empty.any():
            row = int(empty.nonzero()[0])
            raise DataError(
                f"has no counts in cell {row}, and the model has no CLS token to start with; remove this cell.",
                argument="prompt",
            )
    elif prompt is not None:
        bin_values = None if unmasks else module.bin_values.cpu().numpy()
        tokens = _prompt_of_genes(prompt, n_cells, model, bin_values, options["seed"])
    classes = class_numbers(condition, getattr(objective, "conditions", None), n_cells)
    parts = []
    for start in range(0, n_cells, batch_size):
        some = slice(start, min(start + batch_size, n_cells))
        cells_of_batch = module.generate(
            some.stop - some.start,
            None if tokens is None else {name: tensor[some] for name, tensor in tokens.items()},
            first_id=vocab.cls_id if tokenizer.append_cls else None,
            first_cell=start,
            **({} if classes is None else {"condition": torch.from_numpy(classes[some])}),
            **options,
        )
        parts.append(_matrices(cells_of_batch, vocab))
    values, bins = (sparse.vstack(blocks, format="csr") for blocks in zip(*parts, strict=True))
    var = pd.DataFrame(index=pd.Index(vocab.genes, dtype=str))
    if vocab.symbols is not None:
        var["symbol"] = list(vocab.symbols)
    names = prompt.obs_names if isinstance(prompt, AnnData) else [f"generated_{i}" for i in range(n_cells)]
    obs = pd.DataFrame({"n_genes": np.diff(values.indptr)}, index=names)
    adata = AnnData(X=values, obs=obs, var=var, layers=None if unmasks else {"bins": bins})
    if classes is not None:
        of_cells: Any = objective
        adata.obs[of_cells.condition_key] = pd.Categorical.from_codes(classes - 1, of_cells.conditions)
    prompt_type = None if prompt is None else type(prompt).__name__
    facts = {**fitted.provenance(), **asked, "batch_size": batch_size, "prompt": prompt_type}
    # h5ad cannot store None.
    adata.uns[UNS_KEY] = {"generated": {name: value for name, value in facts.items() if value is not None}}
    return adata


def check_generates(fitted: FittedModel) -> None:
    """Raise an OptionError if the architecture, objective or fine-tuning of a model does not support generation."""
    spec, module = fitted.spec, fitted.backbone
    if not isinstance(module, GeneratingModule) or not fitted.pretraining.generates:
        raise OptionError(
            f"a model with architecture={spec.architecture!r} and objective={spec.objective!r} cannot generate cells; "
            "choose architecture='autoregressive_transformer', or 'scdiva' with objective='masked_diffusion'."
        )
    check_filled(module)
    if spec.tuning is not None and spec.tuning.task != "adaptation":
        raise OptionError(f"the model was fine-tuned for {spec.tuning.task!r} and cannot generate; use its base model.")


def _matrices(cells: GeneratedCells, vocab: GeneVocab) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    """Return the values (float32) and bins (int32) of gene tokens, shape (B, G)."""
    ids, values, bins = (tensor.cpu().numpy() for tensor in cells[:3])
    cell, place = np.nonzero(ids >= vocab.n_special)
    where = (cell, ids[cell, place] - vocab.n_special)
    shape = (len(ids), vocab.n_genes)
    return (
        sparse.csr_matrix((values[cell, place].astype(np.float32), where), shape=shape),
        sparse.csr_matrix((bins[cell, place].astype(np.int32), where), shape=shape),
    )


def _prompt_of_genes(
    genes: Sequence[str] | Mapping[str, float], n_cells: int, model: Model, bin_values: np.ndarray | None, seed: int
) -> Prompt:
    """Return a prompt of named genes for each of `n_cells` cells.

    A list keeps its order, and its values are sampled. A mapping sets the values, which are replaced by the nearest bin
    if there are `bin_values`; its genes are arranged in the order of the objective.
    """
    tokenizer, objective = model.fitted.tokenizer, model.fitted.pretraining
    # A set has no order that stays, and of a Series either names or values could be meant.
    if not isinstance(genes, (Sequence, Mapping, np.ndarray, pd.Index)) or isinstance(genes, str):
        raise OptionError(
            f"is of type {type(genes).__name__}; pass a list of genes, a dict that maps genes to values, or an "
            "AnnData.",
            argument="prompt",
        )
    index = gene_numbers(model, list(genes), argument="prompt")
    ids = torch.from_numpy(index.astype(np.int64) + tokenizer.vocab.n_special).expand(n_cells, -1)
    values = torch.full(ids.shape, torch.nan)
    batch = {"input_ids": ids, "values": values, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    if isinstance(genes, Mapping):
        for name, value in genes.items():
            check_positive(f"prompt[{name!r}]", value)
        wanted = np.array([float(value) for value in genes.values()])
        if bin_values is not None:
            wanted = 1 + np.abs(bin_values[None, 1:] - wanted[:, None]).argmin(axis=1)
        batch["values"] = torch.from_numpy(wanted.astype(np.float32)).expand(n_cells, -1)
        rows = np.arange(n_cells)
        batch = dict(objective.arrange(batch, tokenizer, rows, epoch=0, seed=seed))  # type: ignore[arg-type]
    return batch


def prompt_of_cells(cells: Cells, tokenizer: Tokenizer, objective: Objective, seed: int) -> Prompt:
    """Return the tokens of cells, in the order of the objective and without end tokens."""
    block = cells.block(np.arange(len(cells)))
    n_genes = np.diff(block.indptr)
    if (n_genes > tokenizer.most_genes).any():
        cell = int(np.flatnonzero(n_genes > tokenizer.most_genes)[0])
        raise DataError(
            f"has {n_genes[cell]} genes in cell {cell}, but at most {tokenizer.most_genes} are allowed; remove "
            "some genes of this cell.",
            argument="prompt",
        )
    tokens = objective.arrange(tokenizer(block), tokenizer, block.rows, epoch=0, seed=seed)
    mask = tokens["attention_mask"]
    if tokenizer.append_eos:
        mask = mask & (tokens["input_ids"] != tokenizer.vocab.eos_id)
    return {"input_ids": tokens["input_ids"], "values": tokens["values"], "attention_mask": mask}


def class_numbers(condition: Any, conditions: Sequence[str] | None, n_cells: int) -> np.ndarray | None:
    """Return the class code of each cell, int64, shape (B,), or None without classes."""
    if _is_missing(condition):
        return None
    if not conditions:
        raise OptionError("has no effect, because the model has no classes; omit condition.", argument="condition")
    names = list(condition) if pd.api.types.is_list_like(condition) else [str(condition)] * n_cells
    if len(names) != n_cells:
        raise OptionError(
            f"has {len(names)} classes for {n_cells} cells; pass one class, or one per cell.", argument="condition"
        )
    numbers_of = {name: i + 1 for i, name in enumerate(conditions)}
    if unknown := [name for name in names if not _is_missing(name) and name not in numbers_of]:
        raise OptionError(f"is not a class of the model{suggest(unknown[0], conditions)}", condition=unknown[0])
    return np.array([0 if _is_missing(name) else numbers_of[name] for name in names], dtype=np.int64)


def _is_missing(name: Any) -> bool:
    """Return whether a class is None or a missing value."""
    return bool(pd.api.types.is_scalar(name) and pd.isna(name))
