"""Ways to compute the same thing, for the time of a training: compiled layers, checkpointed gradients."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from scforge._checks import check_bool
from scforge.errors import OptionError
from scforge.models.components.transformer import TransformerBlock

__all__ = ["checkpointed", "compiled", "unchanged"]


@contextmanager
def compiled(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Compile the layers of a transformer with torch.compile, or another module as a whole, if `wanted`.

    Layers are alike, so that one is compiled and all use it; names of weights stay as they are.

    Raises
    ------
    OptionError
        If there is no compiler.
    """
    check_bool("compile", wanted)
    if not wanted:
        yield
        return
    on_cpu = next(module.parameters()).device.type == "cpu"
    if on_cpu and shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        raise OptionError(
            "compile=True needs a C++ compiler such as g++, and there is none; install one, or leave it out."
        )
    blocks = [part for part in module.modules() if isinstance(part, TransformerBlock)]
    for block in blocks or [module]:
        block.compile()
    if not blocks and hasattr(module, "encode"):
        module.encode = torch.compile(module.encode)  # some objectives ask for embeddings alone
    try:
        yield
    finally:
        for block in blocks or [module]:
            block._compiled_call_impl = None
        module.__dict__.pop("encode", None)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Put back, after a trial, what a forward pass may change: random numbers, and buffers such as of batch norms."""
    devices = [parameter.device for parameter in module.parameters()][:1]
    cuda = [device for device in devices if device.type == "cuda"]
    before = {name: value.detach().clone() for name, value in module.named_buffers()}
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        with torch.no_grad():
            for name, value in module.named_buffers():
                value.copy_(before[name])


@contextmanager
def checkpointed(module: nn.Module, wanted: bool | None) -> Iterator[None]:
    """Compute the activations of each layer again in the backward pass, or keep them; None leaves it to the model.

    Raises
    ------
    OptionError
        If the architecture cannot.
    """
    if wanted is None:
        yield
        return
    check_bool("gradient_checkpointing", wanted)
    parts = [part for part in module.modules() if hasattr(part, "gradient_checkpointing")]
    if wanted and not parts:
        raise OptionError(
            f"gradient_checkpointing=True, but {type(module).__name__} cannot compute layers again; leave it out."
        )
    before = [part.gradient_checkpointing for part in parts]
    for part in parts:
        part.gradient_checkpointing = wanted
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.gradient_checkpointing = value
