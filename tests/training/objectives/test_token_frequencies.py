"""How often genes are tokens, and the entropy of that."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import entropy

from scforge.errors import OptionError
from scforge.training import token_counts, token_entropy
from scforge.training.objectives import token_frequencies


def test_token_counts(masked_setup, monkeypatch):
    counts = token_counts(masked_setup.cells, masked_setup.tokenizer)
    assert not counts[:4].any()
    np.testing.assert_array_equal(counts[4:], np.asarray((masked_setup.cells.counts > 0).sum(axis=0)).ravel())
    assert token_entropy(counts) == pytest.approx(entropy(counts))
    monkeypatch.setattr(token_frequencies, "_MOST_CELLS", 7)
    counts = token_counts(masked_setup.cells, masked_setup.tokenizer)
    assert 0 < counts.max() <= 7
    np.testing.assert_array_equal(counts, token_counts(masked_setup.cells, masked_setup.tokenizer))
    assert token_entropy(np.array([0, 3])) == 0.0
    for nothing in ([], [0, 0]):
        with pytest.raises(OptionError, match="counts has no token above zero"):
            token_entropy(nothing)
