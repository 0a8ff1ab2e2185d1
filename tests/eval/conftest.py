from collections.abc import Callable, Sequence

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse


@pytest.fixture(scope="session")
def perturbed() -> Callable[..., ad.AnnData]:
    """Make counts of cells under perturbations of single genes and of pairs, each of which moves genes of its own."""

    def make(
        labels: Sequence[str] = ("g0", "g1", "g2", "g3"),
        *,
        n_cells: int = 40,
        n_controls: int = 60,
        n_genes: int = 60,
        contexts: Sequence[str] = ("all",),
        prefix: str = "cell",
        seed: int = 0,
    ) -> ad.AnnData:
        rng = np.random.default_rng(seed)
        base = np.random.default_rng(7).gamma(2.0, 8.0, n_genes)
        counts, obs = [], []
        for number, context in enumerate(contexts):
            rate = base * np.random.default_rng(100 + number).uniform(0.7, 1.4, n_genes)
            for label in ("control", *labels):
                moved = rate.copy()
                for part in () if label == "control" else label.split("+"):
                    own = np.random.default_rng(1_000 + int(part[1:]))
                    moved[own.permutation(n_genes)[:12]] *= 2.0 ** own.choice([-1.5, 1.5], 12)
                n = n_controls if label == "control" else n_cells
                counts.append(rng.poisson(moved, (n, n_genes)))
                obs += [(label, context)] * n
        frame = pd.DataFrame(obs, columns=["target", "type"], index=[f"{prefix}{i}" for i in range(len(obs))])
        var = pd.DataFrame(index=[f"g{i}" for i in range(n_genes)])
        return ad.AnnData(sparse.csr_matrix(np.concatenate(counts).astype(np.float32)), obs=frame, var=var)

    return make
