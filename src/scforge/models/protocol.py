"""The protocol and the output shared by all architectures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig


@dataclass(frozen=True)
class ModelOutput:
    """Output of ``forward`` for all architectures.

    Attributes
    ----------
    loss
        Scalar, present only if labels were given.
    logits
        Predictions for each token, shape (B, S, V), or (B, S) for continuous values. None unless requested.
    embeddings
        One vector per cell, shape (B, H).
    hidden_states
        Hidden states after each layer, each of shape (B, S, H), if requested.
    expression
        Predicted expression of each token in addition to its gene, if the architecture predicts it: values, shape (B,
        S), or bin logits, shape (B, S, number of bins).
    attentions
        Attention weights of each layer, float32, each of shape (B, heads, S, S), if requested.
    losses
        A mapping from name to loss term, a scalar, if an architecture has several terms.

    Examples
    --------
    >>> import torch
    >>> from scforge.models import TransformerEncoder
    >>> model = TransformerEncoder(vocab_size=50, hidden_dim=8, num_layers=2, num_heads=2)
    >>> output = model(torch.randint(4, 50, (3, 5)), torch.ones(3, 5), output_hidden_states=True)
    >>> output.embeddings.shape, len(output.hidden_states), output.loss is None
    (torch.Size([3, 8]), 2, True)
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    embeddings: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    expression: torch.Tensor | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    losses: dict[str, torch.Tensor] | None = None


@runtime_checkable
class CellModule(Protocol):
    """The protocol of an architecture: an ``nn.Module`` with ``forward``, ``encode`` and ``from_config``.

    These attributes are optional: ``uses_order`` (false if the order of the tokens does not matter), ``config_names``
    (mapping from fields of ``ModelConfig`` to constructor names, e.g. ``{"hidden_dim": "encoder_dim"}``),
    ``labels_name_genes`` (true if labels are the names of masked genes, not targets), ``init_token_prior`` (initializes
    the head at token frequencies), ``token_table`` (returns the vectors of all tokens, (V, H), if no embedding of the
    module contains them), ``attended_tokens`` (maximum number of attended tokens per cell, None for all), and
    ``model_class`` (the class of ``scforge.models`` that trains it, ``"Encoder"`` by default). An architecture that
    generates cells is a :class:`GeneratingModule`. :func:`scforge.testing.check_model` checks an architecture against
    this protocol.

    Examples
    --------
    >>> import torch
    >>> from scforge.models import ModelOutput
    >>> class MeanValue(torch.nn.Module):
    ...     def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs):
    ...         return ModelOutput(embeddings=self.encode(input_ids, attention_mask, values))
    ...
    ...     def encode(self, input_ids, attention_mask, values=None, **kwargs):
    ...         return (values * attention_mask).sum(dim=1, keepdim=True) / attention_mask.sum(dim=1, keepdim=True)
    ...
    ...     @classmethod
    ...     def from_config(cls, config):
    ...         return cls()
    >>> isinstance(MeanValue(), CellModule)
    True
    >>> MeanValue().encode(torch.tensor([[4, 5, 0]]), torch.tensor([[1, 1, 0]]), torch.tensor([[1.0, 2.0, 0.0]]))
    tensor([[1.5000]])
    """

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput:
        """Return the loss (with `labels`), logits and embeddings.

        Parameters
        ----------
        input_ids
            Token ids, int64, shape (B, S).
        attention_mask
            Nonzero for tokens, shape (B, S).
        values
            Expression value of each token, float32, shape (B, S).
        labels
            Token ids to predict, int64, shape (B, S); -100 at positions without a target.
        **kwargs
            Other keys of a batch; keys that the architecture does not use are ignored.

        Returns
        -------
        A :class:`ModelOutput`; its ``loss`` is None without labels.
        """
        ...

    def encode(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, values: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return cell embeddings, shape (B, H).

        Parameters
        ----------
        input_ids, attention_mask, values, **kwargs
            See :meth:`forward`.

        Returns
        -------
        The cell embeddings, float, shape (B, H).
        """
        ...

    @classmethod
    def from_config(cls, config: ModelConfig) -> Any:
        """Create the module that `config` describes.

        Parameters
        ----------
        config
            The ``model`` section of a configuration, with ``vocab_size`` set.

        Returns
        -------
        The module, with random weights.
        """
        ...


@runtime_checkable
class GeneratingModule(CellModule, Protocol):
    """The protocol of an architecture that also generates cells: a :class:`CellModule` with ``generate``.

    It is required by :meth:`scforge.models.Encoder.generate` and the benchmark ``generation``. An architecture with
    bins also has ``bin_values``, the expression values of the bins, float32, shape (number of bins,).

    Examples
    --------
    >>> from scforge.models import AutoregressiveTransformer, TransformerEncoder
    >>> sizes = {"vocab_size": 50, "hidden_dim": 8, "num_layers": 1, "num_heads": 2}
    >>> [isinstance(cls(**sizes), GeneratingModule) for cls in (AutoregressiveTransformer, TransformerEncoder)]
    [True, False]
    """

    def generate(
        self,
        n_cells: int,
        prompt: Mapping[str, torch.Tensor] | None = None,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        first_id: int | None = None,
        first_cell: int = 0,
        **options: Any,
    ) -> GeneratedCells:
        """Generate cells.

        Parameters
        ----------
        n_cells
            Number of cells B.
        prompt
            Tokens that the cells begin with: ``input_ids``, ``values`` and ``attention_mask``, shape (B, P).
        temperature
            Divisor of the logits; below 1, likely values become more likely.
        top_k
            Number of most likely genes to sample from.
        seed
            Random seed. A cell depends only on the seed and its index.
        first_id
            Token that cells begin with.
        first_cell
            Index of the first cell, if cells are generated in several calls.
        **options
            ``max_len``, ``eos_id``, ``n_special`` and ``condition`` for autoregressive models; ``n_tokens``,
            ``n_steps`` and ``mask_id`` for models trained with ``masked_diffusion``.

        Returns
        -------
        Tokens, values and bins; see :class:`~scforge.models.protocol.GeneratedCells`.
        """
        ...


class GeneratedCells(NamedTuple):
    """Tokens of generated cells, padded to the longest cell, shape (B, S).

    Parameters
    ----------
    input_ids
        Token ids, int64, 0 (PAD) at padding.
    values
        Expression values of the bins, float32, 0 at special tokens and padding.
    bin_ids
        Expression bins, int64, 0 at special tokens and padding.
    attention_mask
        True for tokens, bool.

    Examples
    --------
    >>> import torch
    >>> from scforge.models import AutoregressiveTransformer
    >>> model = AutoregressiveTransformer(vocab_size=24, hidden_dim=8, num_layers=1, num_heads=2, n_bins=5)
    >>> cells = model.generate(3, max_len=6, seed=0)
    >>> cells.input_ids.shape, cells.input_ids[:, 0].tolist()
    (torch.Size([3, 6]), [3, 3, 3])
    """

    input_ids: torch.Tensor
    values: torch.Tensor
    bin_ids: torch.Tensor
    attention_mask: torch.Tensor
