"""What a ScDiVa trained by denoising does besides: predicting hidden values, and making cells.

Shapes: B cells, S tokens, P tokens of a prompt, M tokens with a hidden value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from scforge._constants import MASK_ID, PAD_ID
from scforge.errors import OptionError
from scforge.models.generation import GeneratedCells
from scforge.models.scdiva_body import ScDiVaBody, States
from scforge.models.scdiva_generation import unmask_cells
from scforge.models.scdiva_tokens import Seen

__all__ = ["ScDiVaDenoiser"]


class ScDiVaDenoiser(ScDiVaBody):
    """The part of :class:`scforge.models.ScDiVaModel` that ``denoising=True`` is for."""

    def values_of(self, states: States, genes_bs: torch.Tensor, chosen_bs: torch.Tensor) -> torch.Tensor:
        """Return the predicted values of the chosen tokens, given their genes, (M,)."""
        assert states.table is not None
        assert self.value_head is not None
        vectors_mh = states.table[genes_bs[chosen_bs]]
        return self.value_head(states.tokens[chosen_bs] + vectors_mh).float()

    def _expected_values(self, states: States, seen: Seen, logits_bsv: torch.Tensor) -> torch.Tensor | None:
        """Return the predicted value of every token; of a hidden gene that of the mean vector of what it may be."""
        if self.value_head is None or states.table is None:
            return None
        table = states.table
        mean_bsh = logits_bsv.softmax(dim=-1) @ table.to(logits_bsv.dtype)
        own_bsh = table[seen.ids.masked_fill(~seen.has_gene, PAD_ID)].to(mean_bsh.dtype)
        vectors_bsh = torch.where(seen.has_gene.unsqueeze(-1), own_bsh, mean_bsh)
        return self.value_head(states.tokens + vectors_bsh).float()

    def predict_values(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        values: torch.Tensor | None = None,
        *,
        masked_values: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the values of genes that are known, and whose values are hidden, (B, S), zeros elsewhere.

        Parameters
        ----------
        input_ids, attention_mask, values
            See :meth:`forward`.
        masked_values
            Nonzero where the value is to be predicted, shape (B, S); more than `max_tokens` of a cell have no room.

        Raises
        ------
        OptionError
            If the model has no head for it, or a cell has too many.
        """
        if not self.denoising:
            raise OptionError("denoising=False leaves nothing to predict values with; train with 'masked_diffusion'.")
        seen = self._seen(input_ids, attention_mask, values, None, masked_values)
        states = self.states(seen, table=True)
        chosen_bs = seen.hidden_value & seen.has_gene
        if bool((chosen_bs & ~states.attended).any()):
            raise OptionError(
                f"masked_values hides more than max_tokens={self.max_tokens} values of a cell; ask for less."
            )
        predicted_bs = torch.zeros_like(seen.values)
        predicted_bs[chosen_bs] = self.values_of(states, seen.ids, chosen_bs).to(predicted_bs.dtype)
        return predicted_bs

    @torch.no_grad()
    def init_lengths(self, quantiles: torch.Tensor) -> None:
        """Set the 101 percentiles of the number of tokens of a cell, from which ``generate`` draws lengths."""
        quantiles = torch.as_tensor(quantiles)
        if self.length_quantiles is None or tuple(quantiles.shape) != (101,):
            raise OptionError(f"quantiles has the shape {tuple(quantiles.shape)}; give 101 to a denoising model.")
        self.length_quantiles.copy_(quantiles)

    @torch.no_grad()
    def init_token_prior(self, token_counts: torch.Tensor) -> None:
        """Start the prediction of genes at the token frequencies, of counts (V,); unused in mode ``"vector"``."""
        if self.token_prior is not None:
            smoothed = token_counts.double() + 1.0
            self.token_prior.copy_((smoothed / smoothed.sum()).log())

    def init_value_prior(self, mean: float) -> None:
        """Start the prediction of hidden values from the mean of those to predict."""
        if self.value_head is not None:
            nn.init.constant_(self.value_head.decoder.bias, mean)

    def generate(
        self,
        n_cells: int,
        prompt: Mapping[str, torch.Tensor] | None = None,
        *,
        n_tokens: int | torch.Tensor | None = None,
        n_steps: int = 16,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        first_cell: int = 0,
        first_id: int | None = None,
        mask_id: int = MASK_ID,
    ) -> GeneratedCells:
        """Draw cells by iterative unmasking.

        In the beginning all tokens but the prompt are hidden. In each step a gene is drawn for every hidden token, and
        the surest are kept, as many as bring the hidden ones down evenly over the steps; in the next step they get the
        value that is predicted for them. No gene comes twice in a cell. The random numbers of a cell depend on `seed`
        and its number alone.

        Parameters
        ----------
        n_cells
            Number of cells B.
        prompt
            What is known of the cells: ``input_ids``, (P,) for all cells or (B, P), and if given ``values`` (NaN where
            they are to be predicted; without them all are) and ``attention_mask``, of the same shape.
        n_tokens
            Tokens of a cell, prompt and `first_id` included, or of each, int64, (B,); None draws from the lengths that
            the model was trained on.
        n_steps
            Steps of the unmasking; a few more where draws collide.
        temperature
            Logits are divided by it, and the noise of the order is multiplied by it.
        top_k
            Draw among so many of the likeliest genes only.
        seed
            Seed of what is drawn.
        first_cell
            Number of the first cell, where cells are generated in several calls.
        first_id
            Special token that all cells begin with, where the tokenizer puts one there.
        mask_id
            Id of MASK.

        Raises
        ------
        OptionError
            If the model was made without ``denoising=True``, or an argument cannot be used.
        """
        options = {"n_tokens": n_tokens, "n_steps": n_steps, "temperature": temperature, "top_k": top_k}
        return unmask_cells(
            self, n_cells, prompt, **options, seed=seed, first_cell=first_cell, first_id=first_id, mask_id=mask_id
        )
