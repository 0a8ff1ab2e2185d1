"""The sizes of ScDiVa."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from scforge._constants import N_SPECIAL

if TYPE_CHECKING:
    from scforge.models.scdiva import ScDiVaModel

__all__ = ["ScDiVaConfig"]


@dataclass(frozen=True, kw_only=True)
class ScDiVaConfig:
    """Sizes and options of a ScDiVa model, by the names that its publication uses.

    Parameters
    ----------
    num_genes
        Number of genes G.
    hidden_size, num_hidden_layers, num_attention_heads
        Width H, layers and heads of the encoder.
    intermediate_size
        Width of the feed-forward layers; four times `hidden_size` if None.
    latent_dim
        Width L of the latent.
    num_cell_types
        Cell types of the annotation head; 0 for none.
    n_batches
        Batches that the expression decoder knows; 0 for none.
    dropout
        Dropout on embeddings and residual branches.
    layer_norm_eps
        Epsilon of the norms.
    mode, norm_style, max_tokens, norm, activation, bias, final_norm, variational, denoising, position_embedding
        See :class:`scforge.models.ScDiVaModel`.

    Examples
    --------
    >>> import torch
    >>> with torch.device("meta"):
    ...     model = ScDiVaConfig.base(num_cell_types=100, mode="vector").build()
    >>> model.num_parameters()
    343921540
    """

    num_genes: int = 20_000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int | None = None
    latent_dim: int = 128
    num_cell_types: int = 0
    n_batches: int = 0
    dropout: float = 0.1
    layer_norm_eps: float = 1e-12
    mode: str = "tokens"
    norm_style: str = "post"
    max_tokens: int = 1200
    norm: str = "layer"
    activation: str = "gelu"
    bias: bool = True
    final_norm: bool | None = None
    variational: bool = True
    denoising: bool = False
    position_embedding: str = "none"

    @classmethod
    def base(cls, **changes: Any) -> ScDiVaConfig:
        """Return the base size, nominally 350 million parameters; `changes` go over it.

        Parameters
        ----------
        **changes
            Fields of the class with other values.
        """
        return cls(**changes)

    @classmethod
    def large(cls, **changes: Any) -> ScDiVaConfig:
        """Return the large size, nominally 1.5 billion parameters (1.74 with feed-forward layers four times as wide).

        `intermediate_size` of three times `hidden_size` makes it 1.47 billion.

        Parameters
        ----------
        **changes
            Fields of the class with other values.

        Examples
        --------
        >>> ScDiVaConfig.large(num_cell_types=10).num_hidden_layers
        32
        """
        sizes = {"num_genes": 30_000, "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 32}
        return cls(**{**sizes, "latent_dim": 256, **changes})

    def options(self) -> dict[str, Any]:
        """Return the arguments of :class:`scforge.models.ScDiVaModel`, with the usual special tokens."""
        options = asdict(self)
        renamed = {
            "hidden_size": "hidden_dim",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "num_heads",
            "intermediate_size": "ffn_dim",
        }
        options = {renamed.get(name, name): value for name, value in options.items() if name != "num_genes"}
        return {"vocab_size": self.num_genes + N_SPECIAL, **options}

    def build(self) -> ScDiVaModel:
        """Make the model."""
        from scforge.models.scdiva import ScDiVaModel

        return ScDiVaModel(**self.options())
