"""Devices, multi-process strategies, compiled modules, and gradient checkpointing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.tensor import DTensor

from scforge._checks import check_bool, check_choice
from scforge.errors import OptionError
from scforge.models.components.transformer import TransformerBlock, TransformerStack

STRATEGIES = ("auto", "ddp", "fsdp")


def check_devices(accelerator: str, devices: Any) -> None:
    """Raise an error if more GPUs are requested than available.

    Raises
    ------
    OptionError
        If fewer GPUs are available; the message states their number.
    """
    if accelerator not in ("gpu", "cuda"):
        return
    n_gpus = torch.cuda.device_count() or int(torch.backends.mps.is_available())
    if (devices if isinstance(devices, int) and devices > 0 else 1) > n_gpus:
        others = f"devices={n_gpus}" if n_gpus else "accelerator='cpu'"
        raise OptionError(
            f"with accelerator={accelerator!r} requires more GPUs than this machine has ({n_gpus}); pass {others}.",
            devices=devices,
        )


def n_processes(accelerator: str, devices: Any, num_nodes: int) -> int:
    """Return the number of training processes."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if (named := _named(devices)) is not None:
        return len(named) * num_nodes
    if str(devices).isdecimal():
        return int(devices) * num_nodes
    return num_nodes if accelerator in ("cpu", "mps") else max(1, torch.cuda.device_count()) * num_nodes


def _named(devices: Any) -> list[Any] | None:
    """Return the device indices in a list or a string such as "0,1" (as in Lightning), or None."""
    if isinstance(devices, str) and "," in devices:
        return [part.strip() for part in devices.split(",") if part.strip()]
    return devices if isinstance(devices, list) else None


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error indicates that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("not enough memory", "can't allocate memory", "out of memory")
    )


def root_device(accelerator: str, devices: Any) -> torch.device:
    """Return the device of the first training process.

    Examples
    --------
    >>> root_device("cpu", 1)
    device(type='cpu')
    """
    if accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        first = next(iter(_named(devices) or []), 0)
        return torch.device("cuda", int(first) if str(first).isdecimal() else 0)
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


def make_strategy(name: str, *, n_processes: int) -> Any:
    """Return the strategy for the Lightning Trainer.

    Parameters
    ----------
    name
        ``"auto"`` (DDP if there is more than one process), ``"ddp"`` or ``"fsdp"``.
    n_processes
        Number of processes.

    Raises
    ------
    OptionError
        If `name` is unknown.
    """
    check_choice("strategy", name, STRATEGIES)
    if name == "fsdp":
        # Each process reads other cells, so all of them are data-parallel.
        sizes = {"data_parallel_size": n_processes, "tensor_parallel_size": 1}
        return ModelParallelStrategy(**sizes, save_distributed_checkpoint=False)
    # With DDP, an embedding that a loss does not use may have separate parameters.
    return "auto" if n_processes == 1 else DDPStrategy(find_unused_parameters=True)


def shard(module: nn.Module, mesh: Any) -> None:
    """Shard a module over the processes of a device mesh: each transformer layer separately, then the rest.

    Each layer is gathered before it computes and released afterwards. A process therefore stores its shard of the
    parameters, gradients and optimizer states, and one complete layer at a time.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            if parameter.ndim == 0:  # a scalar cannot be sharded, a tensor of one element can
                setattr(part, name, nn.Parameter(parameter.detach().reshape(1), parameter.requires_grad))
        if isinstance(part, TransformerStack):
            # Groups of cells of similar length are computed one after the other, and a process with more groups than
            # the others would wait for them forever.
            part.unpad = False
    for part in module.modules():
        if isinstance(part, TransformerBlock):
            fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    # Some objectives call only `encode`, or `infer` and the decoders.
    for name in ("encode", "infer", "decode", "squared_errors", "classify", "project"):
        if hasattr(module, name):
            register_fsdp_forward_method(module, name)


def is_sharded(module: nn.Module) -> bool:
    """Return whether the module is sharded over processes."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def copy_of_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the weights on the CPU; a sharded module is gathered on the first process only.

    All processes must call this function. For a sharded module, scalars are returned as tensors with one element.
    """
    if is_sharded(module):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return {name: value.clone() for name, value in get_model_state_dict(module, options=options).items()}
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


@contextmanager
def compiled(module: nn.Module, wanted: bool) -> Iterator[None]:
    """Compile the layers of a transformer, or any other module as a whole, with torch.compile if `wanted`.

    All layers share one compiled function; the names of the weights do not change.

    Raises
    ------
    OptionError
        If no compiler is available.
    """
    check_bool("compile", wanted)
    if not wanted:
        yield
        return
    on_cpu = next(module.parameters()).device.type == "cpu"
    if on_cpu and shutil.which(os.environ.get("CXX", "g++")) is None and shutil.which("clang++") is None:
        raise OptionError(
            "requires a C++ compiler such as g++, but none is installed; install a compiler, or omit compile.",
            compile=True,
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
    """Restore random states and buffers (e.g. of batch norms) after a trial forward pass."""
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
def gradient_checkpointing(module: nn.Module, wanted: bool | None) -> Iterator[None]:
    """Recompute the activations of each layer in the backward pass, or keep them. If None, uses the model's setting.

    Raises
    ------
    OptionError
        If the architecture does not support gradient checkpointing.
    """
    if wanted is None:
        yield
        return
    check_bool("gradient_checkpointing", wanted)
    parts = [part for part in module.modules() if hasattr(part, "gradient_checkpointing")]
    if wanted and not parts:
        raise OptionError(
            f"is not supported by {type(module).__name__}; omit gradient_checkpointing.", gradient_checkpointing=True
        )
    before = [part.gradient_checkpointing for part in parts]
    for part in parts:
        part.gradient_checkpointing = wanted
    try:
        yield
    finally:
        for part, value in zip(parts, before, strict=True):
            part.gradient_checkpointing = value
