"""How often genes are tokens, and the entropy of that."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import entropy

from scforge.errors import OptionError
from scforge.training import token_counts, token_entropy
from scforge.training.objectives import token_frequencies


def test_token_counts(masked_setup):
    counts = token_counts(masked_setup.cells, masked_setup.tokenizer)
    assert not counts[:4].any()
    np.testing.assert_array_equal(counts[4:], np.asarray((masked_setup.cells.counts > 0).sum(axis=0)).ravel())


def test_no_more_cells_than_the_most(masked_setup, monkeypatch):
    monkeypatch.setattr(token_frequencies, "_MOST_CELLS", 7)
    counts = token_counts(masked_setup.cells, masked_setup.tokenizer)
    assert 0 < counts.max() <= 7
    np.testing.assert_array_equal(counts, token_counts(masked_setup.cells, masked_setup.tokenizer))


def test_entropy_is_that_of_the_shares():
    counts = np.array([0, 5, 1, 0, 14])
    assert token_entropy(counts) == pytest.approx(entropy(counts))
    assert token_entropy(np.array([0, 3])) == 0.0


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_entropy_of_no_tokens_is_refused(counts):
    with pytest.raises(OptionError, match="counts has no token above zero"):
        token_entropy(counts)
