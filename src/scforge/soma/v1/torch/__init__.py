"""The torch version: model, regularizer and loss."""

from __future__ import annotations

from scforge.soma.v1.configs import ModelConfig, SIGRegConfig
from scforge.soma.v1.torch.loss import compute_loss
from scforge.soma.v1.torch.model import Model
from scforge.soma.v1.torch.sigreg import SIGReg

__all__ = ["Model", "ModelConfig", "SIGReg", "SIGRegConfig", "compute_loss"]
