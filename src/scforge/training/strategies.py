"""One process, several with the whole model each (DDP), or several with a part of it each (FSDP2)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from scforge.errors import OptionError, did_you_mean, listing
from scforge.models.components.transformer import TransformerBlock, TransformerStack

__all__ = ["STRATEGIES", "copy_of_weights", "is_sharded", "make_strategy", "shard"]

STRATEGIES = ("auto", "ddp", "fsdp")


def make_strategy(name: str, *, n_processes: int | None) -> Any:
    """Return what Lightning's Trainer takes as its strategy.

    Parameters
    ----------
    name
        ``"auto"`` (DDP if there is more than one process), ``"ddp"`` or ``"fsdp"``.
    n_processes
        Number of processes, or None if it is not known yet.

    Raises
    ------
    OptionError
        If `name` is not known.
    """
    if name not in STRATEGIES:
        raise OptionError(
            f"strategy={name!r} is not known{did_you_mean(name, STRATEGIES)} (known: {listing(STRATEGIES)})"
        )
    if name == "fsdp":
        # Each process reads other cells, so all of them are data-parallel.
        size: Any = "auto" if n_processes is None else n_processes
        return ModelParallelStrategy(data_parallel_size=size, tensor_parallel_size=1, save_distributed_checkpoint=False)
    if n_processes == 1:
        return "auto"  # there is nothing to share
    if name == "ddp" or n_processes is not None:
        # An embedding that a loss does not use may have parameters of its own.
        return DDPStrategy(find_unused_parameters=True)
    return "auto"


def shard(module: nn.Module, mesh: Any) -> None:
    """Shard a module over the processes of a device mesh: each layer of a transformer by itself, then the rest.

    A layer is gathered just before it computes and let go right after, so that a process holds its share of the
    parameters, gradients and optimizer states, and one whole layer at a time.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.ndim == 0:  # a number cannot be shared out; one in a list can
                setattr(part, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
        if isinstance(part, TransformerStack):
            # Groups of cells of like length are computed one after the other, and a process with more groups than the
            # others would wait for them forever.
            part.unpad = False
    for part in module.modules():
        if isinstance(part, TransformerBlock):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    # Some objectives ask for embeddings alone, or for a latent and what is behind it.
    for name in ("encode", "infer", "decode", "classify", "project"):
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)


def is_sharded(module: nn.Module) -> bool:
    """Return whether each process has a share of the module only."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def copy_of_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the weights on the CPU; of a sharded module whole ones, on the first process only.

    All processes have to call it. Numbers of a sharded module are in lists of one.
    """
    if is_sharded(module):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {name: value.clone() for name, value in get_model_state_dict(module, options=options).items()}
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
