"""Muon for the matrices of hidden layers, AdamW for everything else, as one optimizer.

Muon makes the update of a matrix orthogonal (Jordan 2024, "Muon: an optimizer for hidden layers in neural networks");
its step is scaled so that it is as large as one of AdamW and takes the same learning rate (Liu et al. 2025, "Muon is
scalable for LLM training").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scforge.errors import OptionError
from scforge.models.components.transformer import TransformerBlock
from scforge.training.optimizers import parameter_groups

__all__ = ["MuonWithAdamW"]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the weight matrices inside transformer layers, or between hidden layers, and AdamW for the rest.

    Parameters
    ----------
    module
        Its parameters are optimised, but for frozen ones. Embeddings, heads (matrices outside the transformer's
        layers), norms and biases go to AdamW. In a module without transformer layers all weights of
        :class:`torch.nn.Linear` go to Muon.
    lr, weight_decay
        Learning rate, and weight decay of what decays.
    fused
        Use fused kernels of AdamW.

    Raises
    ------
    OptionError
        If this torch has no Muon, or there is no matrix for it, or none that is not frozen.
    """

    def __init__(self, module: nn.Module, *, lr: float, weight_decay: float, fused: bool) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise OptionError("optimizer='muon' needs torch 2.9 or later; update torch, or choose 'adamw'.")
        matrices = _hidden_matrices(module)
        if not matrices:
            raise OptionError(f"optimizer='muon': {type(module).__name__} has no hidden matrices; choose 'adamw'.")
        hidden = [matrix for matrix in matrices if matrix.requires_grad]
        if not hidden:
            raise OptionError(
                "optimizer='muon' is for the matrices of hidden layers, which are all frozen; choose 'adamw', or "
                "freeze fewer layers (freeze=False)."
            )
        ids = {id(parameter) for parameter in hidden}
        rest = [
            {**group, "params": [p for p in group["params"] if id(p) not in ids]}
            for group in parameter_groups(module, weight_decay)
        ]
        self._muon = torch.optim.Muon(hidden, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW([group for group in rest if group["params"]], lr=lr, fused=fused)
        super().__init__([{"params": hidden}], {})
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with each of the two."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._muon.step()
        self._adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the two."""
        return {"muon": self._muon.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states of the two."""
        self._muon.load_state_dict(state_dict["muon"])
        self._adamw.load_state_dict(state_dict["adamw"])
        self._share()

    def _share(self) -> None:
        # A schedule that sets the learning rate of a group here sets it where it is used.
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]
        self.state = _Both(self._muon.state, self._adamw.state)


class _Both(dict[Any, Any]):
    """The states of two optimizers, for those who look."""

    def __init__(self, *states: Any) -> None:
        super().__init__()
        self._states = states

    def items(self) -> Any:
        return [item for state in self._states for item in state.items()]

    def values(self) -> Any:
        return [value for _, value in self.items()]


def _hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    layers: list[nn.Module] = [part for part in module.modules() if isinstance(part, TransformerBlock)]
    found: dict[int, nn.Parameter] = {}
    for layer in layers or [module]:
        for part in layer.modules():
            if isinstance(part, nn.Linear):
                found[id(part.weight)] = part.weight
    return list(found.values())
