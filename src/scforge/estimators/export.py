"""Export the embedding computation with ONNX or torch.export."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from scipy import sparse
from torch import nn
from torch.nn import functional as F

from scforge._checks import check_count
from scforge._io import atomic_folder, sha256_of
from scforge._version import __version__
from scforge.data.cells import CellBlock
from scforge.errors import ModelFileError, OptionError, first_line, listing
from scforge.finetuning.adapters import merged
from scforge.finetuning.mapping import QueryMapping
from scforge.models.components.gene_vectors import GeneVectorBag, check_filled
from scforge.models.scdiva.parts import GeneEmbedding

if TYPE_CHECKING:
    from scforge.estimators.fitted import FittedModel


_FORMAT = 1
_FILES = {"onnx": "model.onnx", "torch": "model.pt2"}
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
_OPSET = 20
_OUTPUT, _BATCH = "cell_embedding", "batch"
_TOLERANCE = 1e-4
"""Maximum difference from scforge, relative to the largest value of the embedding (at least 1)."""
_TRACED, _COMPARED = (3, 24), ((1, 1), (2, 7), (5, 0))
"""Number of cells and expressed genes, for the traced batch and the compared batches; 0 means as many as fit."""


type _Batch = dict[str, torch.Tensor]


class _Encode(nn.Module):
    """Wrapper of an architecture whose ``forward`` calls ``encode`` with the inputs in the order of `names`.

    With a formula, the last input is the batch of each cell, and embeddings move by a share of the correction.
    """

    def __init__(
        self, encoder: nn.Module, names: tuple[str, ...], longest: int, formula: nn.Module | None, share: float
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.names = names
        self.formula, self.share = formula, share
        # If tokens may be dropped, always drop some, so all cells have the same computation.
        room = getattr(encoder, "attended_tokens", None)
        self.padding = room if room is not None and longest > room else 0

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Return cell embeddings, shape (B, D)."""
        inputs = dict(zip(self.names, tensors, strict=True))
        batches = None if self.formula is None else inputs.pop(_BATCH)
        if self.padding:
            inputs = {name: F.pad(tensor, (0, self.padding)) for name, tensor in inputs.items()}
        embeddings = self.encoder.encode(**inputs).float()
        if self.formula is None:
            return embeddings
        return torch.lerp(embeddings, self.formula(embeddings, batches), self.share)


class _PlainBag(nn.Module):
    """The weighted sum of embeddings in ONNX operations, which requires memory for B x S x D values."""

    def __init__(self, bag: nn.EmbeddingBag | GeneVectorBag) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, input_ids: torch.Tensor, per_sample_weights: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted sum of embeddings, shape (B, D)."""
        if isinstance(self.bag, GeneVectorBag):
            embedded = F.embedding(self.bag.row[input_ids], self.bag.table())
        else:
            embedded = F.embedding(input_ids, self.bag.weight)
        if per_sample_weights is None:
            return embedded.sum(dim=1)
        return (embedded * per_sample_weights.to(embedded.dtype).unsqueeze(-1)).sum(dim=1)


def _plain_bag(part: GeneEmbedding, genes_bs: torch.Tensor, values_bs: torch.Tensor) -> torch.Tensor:
    """Compute ``bag`` in ONNX operations."""
    embedded = F.embedding(genes_bs, part.weight)
    return (embedded * values_bs.to(embedded.dtype).unsqueeze(-1)).sum(dim=1) + part.bias


def _sorted_by_topk(values: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Sort with ONNX TopK, which keeps the order of equal values, as with ``stable=True``."""
    from onnxscript import INT64
    from onnxscript import opset20 as op

    axis: Any = op.Constant(value_ints=[dim])
    size = op.Gather(op.Shape(values), axis)
    as_int64 = op.Cast(values, to=INT64.dtype)
    return op.TopK(as_int64, size, axis=dim, largest=int(descending), sorted=1)


def export_model(
    model: FittedModel,
    path: str | os.PathLike[str],
    format: str,
    *,
    max_len: int | None,
    correction: float,
    overwrite: bool,
) -> None:
    """Export a model, see :meth:`scforge.models.Encoder.export`."""
    if format not in _FILES:
        raise OptionError("is unknown; choose 'onnx', 'torch' or 'transformers'.", format=format)
    if format == "onnx" and (missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]):
        raise OptionError(f"requires {listing(missing)}; install with pip install 'scforge[onnx]'.", format="onnx")
    check_filled(model.module)
    if isinstance(getattr(model.module, "head", None), QueryMapping):
        raise OptionError(
            "a query model maps cells onto its reference and cannot be exported; export the reference model instead."
        )
    fitted = model.correction_for(correction)
    if fitted is not None and model.is_query:
        raise OptionError(
            "is for the batches of the reference; export the reference model instead.", correction=correction
        )
    longest = _longest(model, max_len)
    encoder = merged(model.backbone)
    batches = [_batch(model, n_cells, n_genes, longest) for n_cells, n_genes in (_TRACED, *_COMPARED)]
    names = tuple(name for name in batches[0] if name in inspect.signature(encoder.encode).parameters)
    if fitted is not None:
        names = (*names, _BATCH)
        for batch in batches:
            n_cells = len(batch["input_ids"])
            batch[_BATCH] = torch.arange(n_cells) % (len(fitted.batches) + 1) - 1  # the first is unknown
    formula = None if fitted is None else fitted.module
    program = _program(model, encoder, names, batches[0], longest, formula, correction)
    with atomic_folder(path, overwrite=overwrite, argument="path") as folder:
        file = folder / _FILES[format]
        if format == "onnx":
            _write_onnx(model, program, names, file)
        else:
            with _without_warnings():
                torch.export.save(program, file)
        parity = _parity(model, encoder, names, batches[1:], file, correction)
        model.spec.vocab.save(folder / "vocab.json")
        content = _description(model, names, batches[0], longest, file, parity)
        content |= {
            "correction": float(correction),
            # The code of a batch is its position; -1 is any other batch.
            "batches": None if fitted is None else fitted.batches,
        }
        (folder / "export.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _longest(model: FittedModel, max_len: int | None) -> int:
    """Return the maximum number of tokens of an exported model."""
    spec = model.spec
    made_for = spec.model_options.get("max_seq_len")
    most = made_for or model.objective.max_tokens(model.tokenizer)
    if max_len is None:
        return int(most)
    check_count("max_len", max_len, "tokens", least=2)
    if made_for is not None and max_len > made_for:
        raise OptionError(f"exceeds the {made_for} token positions of the model; lower max_len.", max_len=max_len)
    return max_len


def _batch(model: FittedModel, n_cells: int, n_genes: int, longest: int) -> _Batch:
    """Return tokens of random cells with `n_genes` expressed genes (as many as fit if 0), fewer in each next cell."""
    generator = np.random.default_rng(n_cells)
    n_all = model.spec.vocab.n_genes
    counts = np.zeros((n_cells, n_all))
    for cell in range(n_cells):
        n_here = max(1, min(n_genes or longest, n_all) - 2 * cell)
        genes = generator.choice(n_all, n_here, replace=False)
        counts[cell, genes] = generator.geometric(0.3, n_here)
    block = CellBlock.from_csr(sparse.csr_matrix(counts.astype(np.float32)))
    tokens = model.tokenizer(block)
    objective = model.objective
    arranged = objective.arrange(tokens, model.tokenizer, np.zeros(n_cells, dtype=np.int64), epoch=0, seed=0)
    return {name: tensor[:, :longest].contiguous() for name, tensor in cast(_Batch, arranged).items()}


def _program(
    model: FittedModel,
    encoder: nn.Module,
    names: tuple[str, ...],
    batch: _Batch,
    longest: int,
    formula: nn.Module | None,
    correction: float,
) -> Any:
    """Trace the computation for any number of cells, and any number of tokens up to `longest`."""
    plain = copy.deepcopy(encoder).cpu().float().eval().requires_grad_(False)
    for name, part in list(plain.named_modules()):
        if isinstance(part, nn.EmbeddingBag | GeneVectorBag):
            parent, _, last = name.rpartition(".")
            setattr(plain.get_submodule(parent), last, _PlainBag(part))
        elif isinstance(part, GeneEmbedding):
            part.bag = partial(_plain_bag, part)  # type: ignore[method-assign]
    cells, tokens = torch.export.Dim("cells", min=1), torch.export.Dim("tokens", min=1, max=longest)
    dynamic = {"tensors": tuple({0: cells} if name == _BATCH else {0: cells, 1: tokens} for name in names)}
    try:
        with _without_warnings():
            return torch.export.export(
                _Encode(plain, names, longest, formula, float(correction)),
                tuple(batch[name] for name in names),
                dynamic_shapes=dynamic,
                strict=False,
            )
    except (RuntimeError, TypeError, ValueError) as error:
        name = model.spec.architecture
        raise OptionError(f"cannot be exported ({first_line(error)}).", architecture=name) from error


def _write_onnx(model: FittedModel, program: Any, names: tuple[str, ...], file: Path) -> None:
    try:
        with _without_warnings():
            exported = torch.onnx.export(
                program,
                (),
                dynamo=True,
                input_names=list(names),
                output_names=[_OUTPUT],
                opset_version=_OPSET,
                optimize=True,
                verbose=False,
                custom_translation_table={torch.ops.aten.sort.stable: _sorted_by_topk},
            )
            exported.save(str(file), external_data=False)
    except (RuntimeError, TypeError, ValueError) as error:
        name = model.spec.architecture
        raise OptionError(
            f"cannot be exported to ONNX ({first_line(error)}); use format='torch'.", architecture=name
        ) from error


def _parity(
    model: FittedModel, encoder: nn.Module, names: tuple[str, ...], batches: list[_Batch], file: Path, correction: float
) -> dict[str, Any]:
    """Compare the results of the file and `encoder` on batches other than the traced batch."""
    computed = _runner(file, names)
    worst, scale = 0.0, 1.0
    encoder = copy.deepcopy(encoder).cpu().float().eval()
    for batch in batches:
        tokens = {name: tensor for name, tensor in batch.items() if name != _BATCH}
        codes = batch[_BATCH].numpy() if _BATCH in batch else None
        with torch.no_grad():
            wanted = model.corrected(encoder.encode(**tokens).numpy(), codes, correction)
        found = computed([batch[name] for name in names])
        # max() ignores NaN.
        if found.shape != wanted.shape or not (np.isfinite(found).all() and np.isfinite(wanted).all()):
            worst = float("inf")
            break
        worst = max(worst, float(np.abs(found - wanted).max()))
        scale = max(scale, float(np.abs(wanted).max()))
    if not worst <= _TOLERANCE * scale:
        name = model.spec.architecture
        raise ModelFileError(
            f"the output of {file.name!r} (architecture={name!r}) differs from the output of encode by up to "
            f"{worst:.1g}; please report this as a bug."
        )
    return {
        "max_abs_difference": worst,
        "largest": scale,
        "batches": [list(batch["input_ids"].shape) for batch in batches],
    }


def _runner(file: Path, names: tuple[str, ...]) -> Any:
    """Return a function that runs a file on tensors in the order of `names`."""
    if file.suffix == ".pt2":
        with _without_warnings():
            module = torch.export.load(file).module()
        return lambda tensors: module(*tensors).detach().numpy()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return lambda tensors: session.run(None, {n: t.numpy() for n, t in zip(names, tensors, strict=True)})[0]


def _description(
    model: FittedModel, names: tuple[str, ...], batch: _Batch, longest: int, file: Path, parity: dict[str, Any]
) -> dict[str, Any]:
    """Return the metadata that is needed to use the file."""
    parts = model.spec.to_json()
    dtypes = {name: str(batch[name].dtype).removeprefix("torch.") for name in names}
    shapes = {name: ["cells"] if name == _BATCH else ["cells", "tokens"] for name in names}
    return {
        "format": _FORMAT,
        "scforge_version": __version__,
        "torch_version": str(torch.__version__),
        "file": file.name,
        "sha256": {file.name: sha256_of(file)},
        "opset": _OPSET if file.suffix == ".onnx" else None,
        "architecture": parts["architecture"],
        "tokenizer": parts["tokenizer"],
        "vocab": {"file": "vocab.json", "hash": model.spec.vocab.hash, "tokens": len(model.spec.vocab)},
        "inputs": [{"name": name, "dtype": dtypes[name], "shape": shapes[name]} for name in names],
        "outputs": [{"name": _OUTPUT, "dtype": "float32", "shape": ["cells", "dimensions"]}],
        "max_len": longest,
        "parity": parity,
    }


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Silence messages of the torch exporters that are meant for their developers."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    with ExitStack() as stack:
        for logger in loggers:
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"(torch|onnx|onnxscript|onnx_ir|copyreg)(\..*)?")
        yield
