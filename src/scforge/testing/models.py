"""Check that an architecture satisfies the rules."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from scforge._constants import CLS_ID, IGNORE_LABEL, MASK_ID, N_SPECIAL
from scforge._registry import check_options
from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models.components.gene_vectors import GeneVectorEmbedding
from scforge.models.protocol import ModelOutput
from scforge.models.registry import MODELS
from scforge.testing._rules import apply_rules, class_of, require

Batch = dict[str, torch.Tensor]

N_TOKENS, VOCAB_SIZE = 12, 60
_BLANKS = {"labels": IGNORE_LABEL, "bin_labels": IGNORE_LABEL}
_LENGTHS = (12, 12, 9, 5, 3)
_N_BINS = 5
_TOLERANCE = 1e-4

_TOKENS = ("input_ids", "attention_mask", "values")

_SIZES = {"hidden_dim": 16, "num_layers": 2, "num_heads": 4}


@dataclass(frozen=True)
class Subject:
    """A model to check, in evaluation mode and without gradients for each rule.

    ``again`` creates a model with different weights. ``tokens`` is a batch to encode, ``masked`` is the same batch with
    masked tokens, and ``shown`` contains labels at all tokens but no masked tokens.
    """

    model: nn.Module
    again: Callable[[], nn.Module]
    tokens: Batch
    masked: Batch
    shown: Batch


def subject_of(model: nn.Module, remake: Callable[[], nn.Module] | None) -> Subject:
    """Return a copy of `model` for the checks, so that `model` itself is not modified."""
    vocab_size = getattr(model, "vocab_size", VOCAB_SIZE)
    if vocab_size < N_SPECIAL + N_TOKENS:
        raise OptionError(f"is too small for the checks; use vocab_size={VOCAB_SIZE}.", vocab_size=vocab_size)
    model = jittered(_filled(copy.deepcopy(model).cpu()))

    def again() -> nn.Module:
        return jittered(_filled(remake()) if remake is not None else copy.deepcopy(model), std=0.1).eval()

    return Subject(model, again, *_batches(model, vocab_size))


def jittered(model: nn.Module, std: float = 0.02) -> nn.Module:
    """Perturb all weights slightly, because weights that are initialized to zero would pass no signal."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=std)
    return model


def _filled(model: nn.Module) -> nn.Module:
    """Set random vectors in gene vector embeddings without vectors."""
    for part in model.modules():
        if isinstance(part, GeneVectorEmbedding) and not part.scale:
            vectors = torch.randn(part.vocab_size, part.vectors.embedding_dim)
            vectors[: part.n_learned] = torch.nan
            part.fill(vectors)
    return model


def _batches(model: nn.Module, vocab_size: int) -> tuple[Batch, Batch, Batch]:
    generator = torch.Generator().manual_seed(1)
    n_cells = len(_LENGTHS)
    mask = torch.arange(N_TOKENS) < torch.tensor(_LENGTHS)[:, None]
    ids = torch.stack([torch.randperm(vocab_size - N_SPECIAL, generator=generator)[:N_TOKENS] for _ in range(n_cells)])
    ids += N_SPECIAL
    ids[:, 0] = CLS_ID
    genes = mask & (ids != CLS_ID)
    n_bins = min(getattr(model, "n_bins", _N_BINS), _N_BINS)
    tokens = {
        "input_ids": ids * mask,
        "attention_mask": mask,
        # Whole numbers, as some models take them for counts.
        "values": torch.randint(1, 9, ids.shape, generator=generator).float() * genes,
        "bin_ids": torch.randint(1, n_bins, ids.shape, generator=generator) * genes,
    }
    if "condition" in inspect.signature(model.forward).parameters:
        tokens["condition"] = torch.arange(n_cells) % (1 + int(getattr(model, "n_conditions", 0) or 0))
    hidden = torch.zeros_like(mask)
    hidden[:, 1], hidden[:3, 4] = True, True
    masked = tokens | {
        "input_ids": tokens["input_ids"].masked_fill(hidden, MASK_ID),
        "values": tokens["values"].masked_fill(hidden, 0.0),
        "bin_ids": tokens["bin_ids"].masked_fill(hidden, 0),
        "masked_positions": hidden,
        **_labels(tokens, hidden),
    }
    return tokens, masked, tokens | {"masked_positions": torch.zeros_like(mask), **_labels(tokens, mask)}


def _labels(tokens: Batch, chosen: torch.Tensor) -> Batch:
    return {
        "labels": tokens["input_ids"].masked_fill(~chosen, IGNORE_LABEL),
        "bin_labels": tokens["bin_ids"].masked_fill(~chosen, IGNORE_LABEL),
        "value_labels": tokens["values"].masked_fill(~chosen, 0.0),
    }


def _per_token(batch: Batch) -> Batch:
    """Return the tensors of shape (B, S) in a batch."""
    return {key: tensor for key, tensor in batch.items() if tensor.ndim == 2}


def _widened(batch: Batch, width: int) -> Batch:
    """Return a batch with more padding, or with less if `width` is negative."""
    return batch | {
        key: nn.functional.pad(tensor, (0, width), value=_BLANKS.get(key, 0))
        for key, tensor in _per_token(batch).items()
    }


def _encode(model: nn.Module, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        embeddings: torch.Tensor = model.encode(**batch)
    return embeddings


def _took_part(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a nonzero gradient."""
    return parameter.grad is not None and bool(parameter.grad.any())


def _require_close(first: torch.Tensor, second: torch.Tensor, sentence: str, *, tolerance: float = _TOLERANCE) -> None:
    """Raise an error if two tensors differ by more than rounding."""
    require(first.shape == second.shape, f"{sentence} (shapes: {tuple(first.shape)} and {tuple(second.shape)}).")
    first, second = first.detach().double(), second.detach().double()
    require(first.isfinite().all() and second.isfinite().all(), f"{sentence} (some values are NaN or infinite).")
    if first.numel():
        most = float((first - second).abs().max())
        require(most <= tolerance * (1 + float(second.abs().max())), f"{sentence} (by up to {most:.2g}).")


def _require_finite(loss: torch.Tensor, when: str) -> None:
    require(loss.isfinite(), f"the loss is {loss.detach().item():g} {when}.")


def check_model(model: str | type[nn.Module] | nn.Module, **options: Any) -> None:
    """Check that an architecture satisfies the requirements of objectives, model classes and fine-tuning.

    Call this function in the tests of a package that provides an architecture. It runs five cells of up to 12 tokens
    through the model: together and individually, with more padding, with masks of other dtypes, with other labels
    (except labels that the model reads as names of masked genes if ``labels_name_genes = True``), with genes in a
    different order (if ``uses_order = False``), without any token (individually and together with other cells), after a
    round trip of the weights through safetensors, with LoRA adapters on all linear layers, and exported with
    ``torch.export``. Weights are perturbed slightly first, because some are initialized to zero on purpose.

    Parameters
    ----------
    model
        Registered name, class or instance. For a name or a class, the model is created by ``from_config`` with a
        vocabulary of 60 tokens. An instance is copied, and is not modified.
    **options
        Options to create the model if `model` is a name or a class. By default, it has a width of 16, 2 layers and 4
        heads.

    Raises
    ------
    AssertionError
        If a rule is broken; the message describes the rule and how it was broken.
    OptionError
        If the name or an option is unknown, or options are given with an instance.

    Examples
    --------
    >>> import scforge
    >>> check_model("gene_pooling", hidden_dim=8, num_layers=1, pooling="weighted_sum")
    >>> check_model(scforge.models.TransformerEncoder(vocab_size=60, hidden_dim=8, num_layers=1, num_heads=2))
    """
    # The tests around it continue with the random numbers that they would have had.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        instance, remake = _make(model, options)
        apply_rules(type(instance).__name__, {"it is a model": _rule_protocol}, instance)
        subject = subject_of(instance, remake)
        for rule, check in _RULES.items():
            torch.default_generator.manual_seed(1)
            subject.model.eval().zero_grad(set_to_none=True)
            apply_rules(type(instance).__name__, {rule: check}, subject)


def _make(
    model: str | type[nn.Module] | nn.Module, options: dict[str, Any]
) -> tuple[nn.Module, Callable[[], nn.Module] | None]:
    """Return the model, and a function that creates another model (None for an instance)."""
    cls = class_of("model", model, options, nn.Module, MODELS)
    if cls is None:
        return cast(nn.Module, model), None
    parameters = inspect.signature(cls).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        accepted = [name for name in parameters if name != "vocab_size"]
        check_options("option", cls.__name__, options, [*accepted, *getattr(cls, "config_names", {})])
    name = model if isinstance(model, str) else None
    config = ModelConfig(architecture=name, vocab_size=VOCAB_SIZE, **(options or _SIZES))
    apply_rules(cls.__name__, {"it can be created": _rule_from_config}, cls)
    from_config = cast(Any, cls).from_config
    return from_config(config), lambda: from_config(config)


def _rule_from_config(model: type[nn.Module] | nn.Module) -> None:
    exists = callable(getattr(model, "from_config", None))
    require(exists, "it has no method 'from_config' that creates it from a ModelConfig.")


def _rule_protocol(model: nn.Module) -> None:
    for name in ("forward", "encode"):
        method = getattr(model, name, None)
        require(callable(method), f"it has no method {name!r}.")
        parameters = inspect.signature(method).parameters  # type: ignore[arg-type]
        given = tuple(parameters)[: len(_TOKENS)]
        require(given == _TOKENS, f"the first arguments of {name} are {given} instead of {_TOKENS}.")
        rest = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        require(rest, f"{name} does not accept **kwargs, but a batch may contain additional keys.")
    require("labels" in inspect.signature(model.forward).parameters, "forward does not accept 'labels'.")
    _rule_from_config(model)


def _rule_output(subject: Subject) -> None:
    model, batch = subject.model, subject.masked
    n_cells, n_tokens = batch["input_ids"].shape
    for given in (batch, subject.tokens):
        output = model(**given)
        require(isinstance(output, ModelOutput), f"forward returns {type(output).__name__}, not ModelOutput.")
        for part in ("logits", "embeddings"):
            require(getattr(output, part) is not None, f"forward returns no {part}.")
        shape = tuple(output.logits.shape)
        fits = shape[:2] == (n_cells, n_tokens) and len(shape) in (2, 3)
        require(fits, f"the logits of {n_cells} cells and {n_tokens} tokens have shape {shape}.")
        shape = tuple(output.embeddings.shape)
        require(len(shape) == 2 and shape[0] == n_cells, f"the embeddings of {n_cells} cells have shape {shape}.")
        for part in ("logits", "embeddings"):
            require(getattr(output, part).isfinite().all(), f"the {part} contain NaN or infinite values.")
    require(output.loss is None, "forward returns a loss without labels.")
    loss = model(**batch).loss
    require(loss is not None, "forward returns no loss, although labels are passed.")
    require(loss.ndim == 0, f"the loss has shape {tuple(loss.shape)}, but it must be a scalar.")
    _require_finite(loss, "with labels")


def _rule_without_logits(subject: Subject) -> None:
    expected = subject.model(**subject.masked).loss
    loss = subject.model(**subject.masked, return_logits=False).loss
    require(loss is not None, "forward returns no loss with return_logits=False.")
    _require_close(loss, expected, "return_logits=False changes the loss")


def _rule_batch_is_left_alone(subject: Subject) -> None:
    for name, method, batch in (
        ("forward", subject.model, subject.masked),
        ("encode", subject.model.encode, subject.tokens),
    ):
        before = {key: tensor.clone() for key, tensor in batch.items()}
        with torch.no_grad():
            method(**batch)
        for key, tensor in before.items():
            same = key in batch and torch.equal(tensor, batch[key])
            require(same, f"{name} modifies its input batch ({key!r}).")


def _rule_encode(subject: Subject) -> None:
    embeddings = _encode(subject.model, subject.tokens)
    _require_close(
        subject.model(**subject.tokens).embeddings, embeddings, "forward and encode return different embeddings"
    )


def _rule_determinism(subject: Subject) -> None:
    model, outputs = subject.model, []
    for seed in (1, 2):
        torch.default_generator.manual_seed(seed)
        with torch.no_grad():
            output = model(**subject.masked)
        outputs.append([_encode(model, subject.tokens), output.embeddings, output.logits, output.loss])
    for part, first, second in zip(("embeddings", "embeddings", "logits", "loss"), *outputs, strict=True):
        require(torch.equal(first, second), f"the output {part!r} is random in evaluation mode.")


def _rule_cells(subject: Subject) -> None:
    embeddings = _encode(subject.model, subject.tokens).double()
    nearest = float(torch.pdist(embeddings).min())
    length = float(embeddings.norm(dim=1).max())
    require(nearest > 1e-5 * length, "cells with different genes have the same embedding.")


def _rule_labels(subject: Subject) -> None:
    batch = subject.masked
    chosen = batch["masked_positions"]
    other = batch | {
        "labels": batch["labels"].where(~chosen, N_SPECIAL),
        "bin_labels": batch["bin_labels"].where(~chosen, 0),
        "value_labels": batch["value_labels"] * 7,
    }
    if getattr(subject.model, "labels_name_genes", False):
        # Then the labels name the gene whose value is predicted, and values may remain at masked positions.
        other |= {"labels": batch["labels"], "values": batch["values"].masked_fill(chosen, 5.0)}
    with torch.no_grad():
        first, second = subject.model(**batch), subject.model(**other)
    for part in ("logits", "embeddings", "expression"):
        if getattr(first, part) is not None:
            _require_close(getattr(second, part), getattr(first, part), f"labels leak into the {part}", tolerance=1e-6)


def _rule_gradients(subject: Subject) -> None:
    _backward(subject.model.train(), subject)
    for name, parameter in subject.model.named_parameters():
        if parameter.requires_grad:
            require(_took_part(parameter), f"the parameter {name!r} does not contribute to the loss.")
            require(parameter.grad.isfinite().all(), f"the gradient of {name!r} is not finite.")


def _backward(model: nn.Module, subject: Subject) -> None:
    for batch in (subject.masked, subject.shown):
        loss = model(**batch).loss
        _require_finite(loss, "in training mode")
        loss.backward()


def _rule_padding(subject: Subject) -> None:
    model, tokens, masked = subject.model, subject.tokens, subject.masked
    mask, expected = tokens["attention_mask"], _encode(model, tokens)
    _require_close(_encode(model, _widened(tokens, 3)), expected, "more padding changes the embeddings")
    for row, length in enumerate(mask.sum(dim=1).tolist()):
        alone = _widened({key: tensor[row : row + 1] for key, tensor in tokens.items()}, length - mask.shape[1])
        sentence = f"the embedding of cell {row} alone differs from its embedding in a batch"
        _require_close(_encode(model, alone), expected[row : row + 1], sentence)
    for key, other in (("input_ids", N_SPECIAL + 7), ("values", 5.0), ("bin_ids", 1)):
        changed = tokens | {key: tokens[key].masked_fill(~mask, other)}
        _require_close(_encode(model, changed), expected, f"{key!r} at padding positions change the embeddings")
    with torch.no_grad():
        narrow, wide = model(**masked), model(**_widened(masked, 3))
    _require_close(wide.loss, narrow.loss, "more padding changes the loss")
    logits = wide.logits[:, : mask.shape[1]]
    _require_close(logits[mask], narrow.logits[mask], "more padding changes the logits of tokens")


def _rule_masks(subject: Subject) -> None:
    model, expected = subject.model, _encode(subject.model, subject.tokens)
    with torch.no_grad():
        loss = model(**subject.masked).loss
        for dtype in (torch.int64, torch.uint8, torch.float32):
            mask = {"attention_mask": subject.tokens["attention_mask"].to(dtype)}
            sentence = f"a mask of dtype {dtype} gives different results than a mask of dtype torch.bool"
            _require_close(_encode(model, subject.tokens | mask), expected, sentence)
            _require_close(model(**subject.masked | mask).loss, loss, sentence)


def _rule_order(subject: Subject) -> None:
    if getattr(subject.model, "uses_order", True):
        return
    # The genes of a cell change places; CLS stays in front, and padding behind.
    first, rows = torch.zeros(1, dtype=torch.int64), []
    for n_tokens in subject.tokens["attention_mask"].sum(dim=1).tolist():
        rows.append(torch.cat([first, 1 + torch.randperm(n_tokens - 1), torch.arange(n_tokens, N_TOKENS)]))
    order = torch.stack(rows)
    moved = subject.tokens | {key: tensor.gather(1, order) for key, tensor in _per_token(subject.tokens).items()}
    sentence = "uses_order is False, but the order of the genes changes the embeddings"
    _require_close(_encode(subject.model, moved), _encode(subject.model, subject.tokens), sentence)


def _rule_empty_cell(subject: Subject) -> None:
    model, row = subject.model, 2
    others = torch.arange(len(subject.tokens["input_ids"])) != row
    expected = _encode(model, subject.tokens)
    embeddings = _encode(model, _emptied(subject.tokens, row))
    require(embeddings.isfinite().all(), "the embedding of a cell without tokens is not finite.")
    _require_close(embeddings[others], expected[others], "a cell without tokens changes the embeddings of other cells")
    alone = {key: tensor[row : row + 1] for key, tensor in _emptied(subject.tokens, row).items()}
    for width in (0, 3):
        sentence = "the embedding of a cell without tokens alone differs from its embedding in a batch"
        _require_close(_encode(model, _widened(alone, width)), embeddings[row : row + 1], sentence)
    loss = model.train()(**_emptied(subject.masked, row)).loss
    _require_finite(loss, "if a cell has no tokens")
    loss.backward()
    for name, parameter in model.named_parameters():
        finite = parameter.grad is None or parameter.grad.isfinite().all()
        require(finite, f"the gradient of {name!r} is not finite if a cell has no tokens.")


def _emptied(batch: Batch, row: int) -> Batch:
    empty = {key: tensor.clone() for key, tensor in batch.items()}
    for key, tensor in _per_token(empty).items():
        tensor[row] = -100 if key in ("labels", "bin_labels") else 0
    return empty


def _rule_weights(subject: Subject) -> None:
    from safetensors.torch import load, save

    weights = {name: tensor.contiguous() for name, tensor in subject.model.state_dict().items()}
    again = subject.again()
    again.load_state_dict(load(save(weights)), strict=True)
    sentence = "a model with the same weights embeds cells differently; state_dict() must contain all of its state"
    _require_close(_encode(again, subject.tokens), _encode(subject.model, subject.tokens), sentence, tolerance=1e-6)


def _rule_lora(subject: Subject) -> None:
    from peft import LoraConfig, get_peft_model

    model, tokens = subject.model, subject.tokens
    layers = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and not any(part.children())]
    if not layers:
        return
    plain = _encode(model, tokens)
    _backward(model, subject)
    used = [name for name in layers if _took_part(model.get_submodule(name).weight)]
    model.zero_grad(set_to_none=True)
    config = LoraConfig(r=2, lora_alpha=16, target_modules=layers, init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), config).eval()
    inner = adapted.get_base_model()
    with_lora = _encode(inner, tokens)
    require(not torch.allclose(with_lora, plain, atol=1e-4), "LoRA adapters do not change the embeddings.")
    _backward(inner, subject)
    for name in used:
        reached = _took_part(inner.get_submodule(name).lora_B["default"].weight)
        require(reached, f"a LoRA adapter of {name!r} has no effect; call the layer instead of reading its weight.")
    with adapted.disable_adapter():
        _require_close(
            _encode(inner, tokens), plain, "disabling the LoRA adapters does not restore the original embeddings"
        )
    merged = adapted.merge_and_unload()
    _require_close(_encode(merged, tokens), with_lora, "merging LoRA adapters into the weights changes the embeddings")


class _Encode(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.model.encode(input_ids, attention_mask, values)
        return embeddings


def _rule_export(subject: Subject) -> None:
    batch = {key: subject.tokens[key] for key in _TOKENS}
    dynamic = {key: {0: torch.export.Dim("cells")} for key in _TOKENS}
    program = torch.export.export(_Encode(subject.model), (), batch, dynamic_shapes=dynamic)
    fewer = {key: tensor[1:4] for key, tensor in batch.items()}
    with torch.no_grad():
        embeddings = program.module()(**fewer)
    _require_close(
        embeddings,
        _encode(subject.model, fewer),
        "encode returns different embeddings after the export for any number of cells",
    )


_RULES: dict[str, Callable[[Subject], None]] = {
    "forward returns a loss, logits and embeddings": _rule_output,
    "the batch does not change": _rule_batch_is_left_alone,
    "evaluation is deterministic": _rule_determinism,
    "logits are omitted if they are not requested": _rule_without_logits,
    "encode returns the same embeddings as forward": _rule_encode,
    "cells have different embeddings": _rule_cells,
    "labels affect only the loss": _rule_labels,
    "every parameter is trained": _rule_gradients,
    "padding has no effect": _rule_padding,
    "a mask may have any dtype": _rule_masks,
    "the order of genes only matters if the model declares it": _rule_order,
    "a cell may have no tokens": _rule_empty_cell,
    "weights are saved and loaded": _rule_weights,
    "LoRA adapts the linear layers": _rule_lora,
    "encode can be exported for any number of cells": _rule_export,
}
