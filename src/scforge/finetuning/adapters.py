"""Low-rank adapters (LoRA, Hu et al. 2021) inside an architecture, with peft."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from scforge._checks import check_bool, check_count, check_positive, check_share
from scforge._registry import check_options
from scforge.errors import OptionError, suggest
from scforge.models.components.transformer import TransformerBlock

_DEFAULTS: dict[str, Any] = {"r": 8, "alpha": 16.0, "dropout": 0.0, "targets": None, "use_dora": False}
_NAME = "default"
_MARKS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".lora_embedding_")


def lora_options(encoder: nn.Module, lora: bool | Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the full `lora` options: False for no adapters, True for the defaults, or a mapping with some options.

    Parameters
    ----------
    encoder
        The architecture, without adapters.
    lora
        ``r`` (rank, 8), ``alpha`` (16; outputs are scaled by alpha / r), ``dropout`` (0), ``targets`` (names or name
        suffixes of linear layers; if None, the linear layers of all transformer layers, or all linear layers of an
        architecture without transformer layers), ``use_dora`` (also learn the norms of weights, Liu et al. 2024).

    Returns
    -------
    All options, with ``targets`` as full names, or None for no adapters.

    Raises
    ------
    OptionError
        If an option cannot be used, or a target is not a linear layer of the architecture.
    """
    if lora is False or lora is None:
        return None
    if lora is not True and not isinstance(lora, Mapping):
        raise OptionError("must be True, False or a dict of options, e.g. {'r': 8}.", lora=lora)
    given = {} if lora is True else dict(lora)
    check_options("option of lora", "lora", given, list(_DEFAULTS))
    options = _DEFAULTS | given
    check_count("lora['r']", options["r"], "ranks")
    check_positive("lora['alpha']", options["alpha"])
    check_share("lora['dropout']", options["dropout"])
    check_bool("lora['use_dora']", options["use_dora"])
    wanted, kind, targets = options["targets"], type(encoder).__name__, []
    linear = [name for name, part in encoder.named_modules() if isinstance(part, nn.Linear)]
    if wanted is None:
        blocks = [name for name, part in encoder.named_modules() if isinstance(part, TransformerBlock)]
        inside = [name for name in linear if any(name.startswith(f"{block}.") for block in blocks)]
        targets = inside or [name for name in linear if not any("head" in part for part in name.split("."))]
    for target in [wanted] if isinstance(wanted, str) else wanted or ():
        of_target = [name for name in linear if name == target or name.endswith(f".{target}")]
        if not of_target:
            hint = suggest(target, sorted({name.rpartition(".")[2] for name in linear}), "available")
            raise OptionError(
                f"['targets'] contains {target!r}, which is not a linear layer of {kind}{hint}", argument="lora"
            )
        targets += of_target
    if not targets:
        raise OptionError(
            f"['targets']={wanted!r} matches no linear layer of {kind}; fine-tune without lora.", argument="lora"
        )
    options["targets"] = sorted(set(targets), key=linear.index)
    return options


def inject_lora(encoder: nn.Module, options: Mapping[str, Any]) -> None:
    """Insert adapters into an architecture, in place, and freeze all other parameters.

    Adapters are initialized at zero, so the output of the architecture does not change.
    """
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=options["r"],
        lora_alpha=options["alpha"],
        lora_dropout=options["dropout"],
        target_modules=list(options["targets"]),
        use_dora=options["use_dora"],
        bias="none",
    )
    inject_adapter_in_model(config, encoder, adapter_name=_NAME)


def has_lora(encoder: nn.Module) -> bool:
    """Return whether an architecture contains adapters."""
    return any(_is_lora(part) for part in encoder.modules())


def _is_lora(part: nn.Module) -> bool:
    return hasattr(part, "lora_A") and hasattr(part, "base_layer")


def merge_lora(encoder: nn.Module) -> None:
    """Merge the adapters of an architecture into its weights, in place; plain layers with the original names remain."""
    for name, part in list(encoder.named_modules()):
        if _is_lora(part):
            base = part.get_base_layer()
            base.weight = nn.Parameter(base.weight.detach().clone())  # the memory may be that of another model
            part.merge()
            parent, _, last = name.rpartition(".")
            setattr(encoder.get_submodule(parent), last, part.get_base_layer())


def merged(encoder: nn.Module) -> nn.Module:
    """Return a copy of an architecture with merged adapters, or the architecture itself if it contains no adapters."""
    if not has_lora(encoder):
        return encoder
    encoder = copy.deepcopy(encoder)
    merge_lora(encoder)
    return encoder


@contextmanager
def adapters_disabled(encoder: nn.Module) -> Iterator[None]:
    """Disable the adapters of an architecture within the context."""
    parts = [part for part in encoder.modules() if _is_lora(part)]
    for part in parts:
        part.enable_adapters(False)
    try:
        yield
    finally:
        for part in parts:
            # This also asks for gradients of adapters, which frozen models do not want back.
            wanted = {name: parameter.requires_grad for name, parameter in part.named_parameters()}
            part.enable_adapters(True)
            for name, parameter in part.named_parameters():
                parameter.requires_grad_(wanted[name] or is_adapter(name))


def is_adapter(name: str) -> bool:
    """Return whether the weight with this name belongs to an adapter."""
    return any(mark in f".{name}." for mark in _MARKS)


def base_state(encoder: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of an architecture by their plain names, without adapter weights."""
    state = encoder.state_dict()
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if not is_adapter(name)}


def load_base(encoder: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Load plain weights into an architecture that may contain adapters."""
    own = {name: name.replace(".base_layer.", ".") for name in encoder.state_dict() if not is_adapter(name)}
    encoder.load_state_dict({name: weights[plain] for name, plain in own.items()}, strict=False)


def digest_of(encoder: nn.Module) -> str:
    """Return a checksum of the weights of an architecture, without adapter weights."""
    total = hashlib.sha256()
    for name, value in sorted(base_state(encoder).items()):
        total.update(name.encode())
        total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
