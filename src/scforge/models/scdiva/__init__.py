"""ScDiVa: a transformer that generates cells by denoising masked genes and values."""

from scforge.models.scdiva.model import ScDiVaConfig, ScDiVaModel
from scforge.models.scdiva.parts import what_is_seen

__all__ = ["ScDiVaConfig", "ScDiVaModel", "what_is_seen"]
