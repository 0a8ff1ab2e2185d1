"""ScDiVa: a transformer over genes with a variational read-out.

Shapes: B cells, S tokens, G genes, H hidden, L latent, T cell types, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

import torch

from scforge._constants import PAD_ID
from scforge.models._utils import build_from_config
from scforge.models.protocol import ModelOutput
from scforge.models.registry import register_model
from scforge.models.scdiva_config import ScDiVaConfig
from scforge.models.scdiva_denoiser import ScDiVaDenoiser
from scforge.models.scdiva_parts import (
    classification_loss,
    kl_divergence,
    mean_over_cells,
    reconstruction_loss,
    total_loss,
)
from scforge.models.scdiva_tokens import Seen, gene_logits, gene_losses

if TYPE_CHECKING:
    from scforge.config.schema import ModelConfig

__all__ = ["ScDiVaConfig", "ScDiVaModel"]

_OWN_BETA = 1e-3
"""Weight of the divergence where the latent learns from hidden genes alone."""


@register_model("scdiva")
class ScDiVaModel(ScDiVaDenoiser):
    """Variational transformer of cells, in two modes.

    ``mode="vector"``: a linear layer with a norm brings a profile of all genes to one vector, which passes through the
    transformer, a sequence of length 1. The softmax over one key is 1, so attention is a linear map of the vector, and
    queries and keys learn nothing.

    ``mode="tokens"``: the same layer is a sum of a vector for each gene, times its value. That sum is the first token,
    LAT, and its summands are tokens beside it: the vector of the gene after the norm, plus a vector of the value. So
    genes attend to each other, and LAT is read out. There are H^2 + 6 H more parameters than in the other mode.

    The read-out has a mean and a variance of L dimensions. In evaluation the latent is the mean, which is the cell
    embedding. Two heads read the latent: one the cell type, one the expression of all genes.

    All methods take either a batch of tokens, as those of every architecture, or without `attention_mask` a dense
    profile, float, (B, G), log1p of counts per 10,000.

    Parameters
    ----------
    vocab_size
        Number of tokens V, special tokens included; there are G = V - `n_special` genes.
    hidden_dim, num_layers, num_heads, ffn_dim
        Width H, layers, heads and inner width (``4 * hidden_dim`` if None) of the transformer.
    dropout
        Dropout on embeddings and residual branches.
    max_tokens
        Most tokens of a cell that are attended to beside LAT, which sums all: hidden ones, then others, in the order of
        the batch. 0 is the mode ``"vector"``.
    mode
        ``"tokens"`` or ``"vector"``.
    norm_style
        ``"post"``: norms behind each sum; or ``"pre"``: at the start of each branch, easier to train when deep.
    norm, activation, bias
        See :class:`scforge.models.components.TransformerBlock`; `norm` is that of the embedding, too.
    final_norm
        Whether a norm stands behind the last layer; None puts one with ``norm_style="pre"``.
    latent_dim
        Width L of the latent.
    num_cell_types
        Cell types T of the annotation head; 0 for no such head.
    n_batches
        Batches that the decoder of expression knows.
    variational
        False leaves out the variance, and with it all noise.
    denoising
        Adds what the objective ``masked_diffusion`` needs: a vector of hidden values, and a head that predicts them.
    layer_norm_eps
        Epsilon of the norms.
    position_embedding
        ``"none"``: the order of tokens does not matter; or ``"rotary"``: places in the order of the tokens.
    n_special
        Tokens with ids below this are special ones.
    gradient_checkpointing
        Compute each layer again in the backward pass rather than keep what it computed.
    unpad
        Whether padding is taken out of the computation; None does where it is worth its while.

    Examples
    --------
    >>> model = ScDiVaModel(vocab_size=54, hidden_dim=8, num_layers=1, num_heads=2, latent_dim=3, num_cell_types=2)
    >>> profile = torch.rand(5, 50)
    >>> model.encode(profile)["mu"].shape, model.predict(profile).shape
    (torch.Size([5, 3]), torch.Size([5, 2]))
    >>> ids, mask, values = torch.randint(4, 54, (5, 6)), torch.ones(5, 6), torch.rand(5, 6)
    >>> model.encode(ids, mask, values).shape
    torch.Size([5, 3])
    """

    @overload
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: None = None,
        values: None = None,
        labels: torch.Tensor | None = None,
        *,
        target: torch.Tensor | None = None,
        beta: float = 1.0,
    ) -> ModelOutput: ...

    @overload
    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> ModelOutput: ...

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        value_labels: torch.Tensor | None = None,
        masked_positions: torch.Tensor | None = None,
        masked_values: torch.Tensor | None = None,
        loss_weights: torch.Tensor | None = None,
        target: torch.Tensor | None = None,
        beta: float | torch.Tensor = 1.0,
        batch: torch.Tensor | None = None,
        return_logits: bool = True,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        """Predict what is hidden of a batch of tokens, or of a profile its cell type and expression.

        Parameters
        ----------
        input_ids
            Token ids, int64, shape (B, S), or a profile, float, (B, G).
        attention_mask
            Nonzero for tokens, shape (B, S). Its absence says that `input_ids` is a profile.
        values
            Value of each token, shape (B, S); 1 if None.
        labels
            Genes to predict, int64, (B, S), -100 elsewhere (labels of special tokens do not count); for a profile cell
            types, (B,).
        value_labels
            Values to predict, (B, S), with ``denoising=True``.
        masked_positions, masked_values
            Nonzero where identity and value of a token are hidden, (B, S); the second is the first if None. `input_ids`
            hold MASK where the identity is hidden. Of what is hidden neither LAT nor its token has the value.
        loss_weights
            Weight of each cell, (B,): then the losses of tokens are means over cells of its weight times the mean over
            its hidden tokens. Without, they are means over tokens.
        target
            Expression to reconstruct from the latent, (B, G), e.g. of the cell before anything was hidden.
        beta
            Weight of the divergence of the latent beside that.
        batch
            Batch of each cell for the reconstruction, (B,).
        return_logits
            If false, ``logits`` and ``expression`` of tokens are None.
        output_hidden_states, output_attentions
            Also return states and attention weights of the tokens after each layer, without LAT.
        **kwargs
            Other keys of the batch, ignored.

        Returns
        -------
        Of tokens ``logits`` (B, S, V), ``embeddings`` (B, L), the mean of the latent, and with ``denoising=True``
        ``expression`` (B, S). ``losses`` has the parts of the loss that there is a target for: ``"identity"`` (cross
        entropy), ``"value"`` (squared error), and ``"reconstruction"`` and ``"kl"`` with `target`. Where there are
        labels but neither `target` nor `loss_weights`, the latent learns from the labels: ``"latent"``, the cross
        entropy of the hidden genes given the latent alone, and ``"kl"``, weighted by 1e-3.

        Of a profile ``logits`` of cell types (B, T) or None, ``embeddings``, and ``expression`` (B, G), with a loss
        where there are `labels` (``"classification"``) or a `target`.
        """
        if attention_mask is None:
            return self._forward_dense(input_ids, labels, target, beta, batch)
        seen = self._seen(input_ids, attention_mask, values, masked_positions, masked_values)
        wanted = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
        states = self.states(seen, table=labels is not None or return_logits or self.denoising, **wanted)
        latent, mu, logvar = found = self.variational_layer(states.readout)
        losses: dict[str, torch.Tensor] = {}
        genes_bs = seen.ids.masked_fill(~seen.has_gene, PAD_ID)
        if labels is not None:
            chosen_bs = seen.tokens & (labels >= self.n_special)
            genes_bs = torch.where(chosen_bs, labels, genes_bs)
            chosen_bs = chosen_bs & states.attended
            assert states.table is not None
            of_genes, cells = gene_losses(
                states.tokens, states.table, self.token_prior, seen, labels, chosen_bs, self.n_special
            )
            losses["identity"] = mean_over_cells(of_genes, cells, loss_weights)
        if self.denoising and value_labels is not None:
            chosen_bs = seen.hidden_value & states.attended & (genes_bs >= self.n_special)
            error = self.values_of(states, genes_bs, chosen_bs) - value_labels[chosen_bs].float()
            losses["value"] = mean_over_cells(error.square(), chosen_bs.nonzero()[:, 0], loss_weights)
        if target is not None:
            losses["reconstruction"] = reconstruction_loss(self.decode(latent, batch), target)
            if self.variational:
                losses["kl"] = kl_divergence(mu, logvar)
        elif labels is not None and loss_weights is None:
            beta = _OWN_BETA
            losses |= self._latent_losses(seen, labels, found, batch)
        loss = _sum(losses, beta)
        logits = expression = None
        if return_logits:
            assert states.table is not None
            logits = gene_logits(states.tokens, states.table, self.token_prior, seen, self.n_special)
            expression = self._expected_values(states, seen, logits)
        return ModelOutput(
            loss=loss,
            logits=logits,
            embeddings=mu,
            hidden_states=states.hidden_states,
            expression=expression,
            attentions=states.attentions,
            losses=losses or None,
        )

    def _forward_dense(
        self,
        x_bg: torch.Tensor,
        labels: torch.Tensor | None,
        target: torch.Tensor | None,
        beta: float | torch.Tensor,
        batch: torch.Tensor | None,
    ) -> ModelOutput:
        found = self.infer(x_bg)
        expression = self.decode(found["latent"], batch)
        logits = self.classify(found["latent"]) if self.annotation_head is not None else None
        losses: dict[str, torch.Tensor] = {}
        if labels is not None:
            losses["classification"] = classification_loss(self.classify(found["latent"]), labels)
        if target is not None:
            losses["reconstruction"] = reconstruction_loss(expression, target)
        if losses and self.variational:
            losses["kl"] = kl_divergence(found["mu"], found["logvar"])
        return ModelOutput(
            loss=_sum(losses, beta),
            logits=logits,
            embeddings=found["mu"],
            expression=expression,
            losses=losses or None,
        )

    def _latent_losses(
        self,
        seen: Seen,
        labels: torch.Tensor,
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        batch: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return how well the latent alone predicts the labelled genes: so it learns though nobody gives a profile."""
        chosen_bs = seen.tokens & (labels >= self.n_special)
        log_share_bg = self.decode(found[0], batch).float().log_softmax(dim=1)
        of_tokens_bs = log_share_bg.gather(1, (labels - self.n_special).clamp(min=0))
        n_chosen = chosen_bs.sum()
        losses = {"latent": -of_tokens_bs.masked_fill(~chosen_bs, 0.0).sum() / n_chosen.clamp(min=1)}
        if self.variational:
            losses["kl"] = kl_divergence(found[1], found[2]) * (n_chosen > 0)
        return losses

    @classmethod
    def from_config(cls, config: ModelConfig | ScDiVaConfig) -> ScDiVaModel:
        """Make the model that `config` describes; raises ``ValueError`` if ``config.vocab_size`` is None."""
        if isinstance(config, ScDiVaConfig):
            return cls(**config.options())
        return build_from_config(cls, config)


def _sum(losses: dict[str, torch.Tensor], beta: float | torch.Tensor) -> torch.Tensor | None:
    """Return the sum of the parts, the divergence weighted by `beta`; None without any."""
    if not losses:
        return None
    task = torch.stack([part for name, part in losses.items() if name != "kl"]).sum()
    return total_loss(task, losses["kl"], beta) if "kl" in losses else task
