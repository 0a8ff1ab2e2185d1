"""A simulated perturbation screen with known effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

_BLOCKS = 20


@dataclass(frozen=True)
class SimulatedScreen:
    """Cells of a simulated screen, and the truth behind them.

    Attributes
    ----------
    adata
        Counts, CSR, float32; ``obs["perturbation"]`` is ``"control"``, a gene, or two genes joined by ``+``.
    effects
        True change of the log mean of each gene by each perturbation, one row per perturbation, shape (P, G).
    program
        Program of each perturbed gene; -1 where the perturbation has no effect.
    responses
        Change of the log means by each program at strength 1, float64, shape (n_programs, G).
    tables
        Vectors of the perturbed genes: ``"vectors"`` encode the program with noise, ``"screen"`` are noisy effects,
        as of a second screen, ``"random"`` carry no information.

    Examples
    --------
    >>> screen = simulate_screen(n_knockouts=10, n_pairs=3, n_cells=2, n_genes=50, n_programs=2)
    >>> screen.program.index.tolist() == screen.tables["vectors"].index.tolist()
    True
    """

    adata: AnnData
    effects: pd.DataFrame
    program: pd.Series
    responses: np.ndarray
    tables: Mapping[str, pd.DataFrame]


def simulate_screen(
    seed: int = 0,
    *,
    n_knockouts: int = 500,
    n_pairs: int = 60,
    n_cells: int = 25,
    n_genes: int = 1_000,
    n_programs: int = 20,
    n_response: int = 40,
) -> SimulatedScreen:
    """Simulate a screen of the shape of Norman et al. (2019) and Replogle et al. (2022).

    Each knockout shifts the log means of the response genes of one program by its strength, and those of 5 other genes;
    40 % of the knockouts do nothing. A pair shifts them by the sum of both. Counts are negative binomial.

    Parameters
    ----------
    seed
        Seed of the random numbers.
    n_knockouts
        Perturbed genes, the first ones of the panel.
    n_pairs
        Most pairs of them.
    n_cells
        Cells per perturbation; control cells are 20 times as many.
    n_genes
        Genes of the panel, at least `n_knockouts`.
    n_programs
        Programs.
    n_response
        Response genes of a program.

    Returns
    -------
    Cells and truth.

    Examples
    --------
    >>> screen = simulate_screen(n_knockouts=10, n_pairs=3, n_cells=2, n_genes=50, n_programs=2)
    >>> screen.adata.shape, screen.effects.shape
    ((64, 50), (13, 50))
    """
    import anndata as ad
    import pandas as pd
    from scipy import sparse

    rng = np.random.default_rng(seed)
    genes = [f"G{i}" for i in range(n_genes)]
    knocked = genes[:n_knockouts]
    responses = np.zeros((n_programs, n_genes))
    for response in responses:
        response[rng.choice(n_genes, n_response, replace=False)] = rng.normal(scale=0.8, size=n_response)
    program = rng.integers(n_programs, size=n_knockouts)
    strength = rng.gamma(4.0, 0.25, size=n_knockouts) * (rng.random(n_knockouts) >= 0.4)
    effects = strength[:, None] * responses[program]
    for effect in effects:
        effect[rng.choice(n_genes, 5, replace=False)] += rng.normal(scale=0.4, size=5)
    pairs = rng.choice(n_knockouts, size=(n_pairs, 2))
    pairs = np.unique(np.sort(pairs[pairs[:, 0] != pairs[:, 1]], axis=1), axis=0)
    labels = ["control", *knocked, *(f"{knocked[a]}+{knocked[b]}" for a, b in pairs)]
    changes = np.vstack([np.zeros(n_genes), effects, effects[pairs[:, 0]] + effects[pairs[:, 1]]])
    base = rng.normal(-1.5, 1.2, size=n_genes)
    numbers = np.repeat(np.arange(len(labels)), [20 * n_cells, *[n_cells] * (len(labels) - 1)])
    blocks = []
    for rows in np.array_split(numbers, _BLOCKS):
        means = np.exp(base + changes[rows]) * rng.lognormal(0, 0.3, size=(len(rows), 1))
        blocks.append(sparse.csr_matrix(rng.poisson(means * rng.gamma(4.0, 0.25, means.shape)).astype(np.float32)))
    obs = pd.DataFrame({"perturbation": np.array(labels, object)[numbers]}, [f"cell{i}" for i in range(len(numbers))])
    vectors = np.eye(n_programs)[program] + rng.normal(scale=0.5, size=(n_knockouts, n_programs))
    tables = {
        "vectors": vectors,
        "screen": effects + rng.normal(scale=0.3, size=effects.shape),
        "random": rng.normal(size=(n_knockouts, n_programs)),
    }
    return SimulatedScreen(
        ad.AnnData(sparse.vstack(blocks, format="csr"), obs, pd.DataFrame(index=genes)),
        pd.DataFrame(changes, labels, genes),
        pd.Series(np.where(strength > 0, program, -1), index=knocked),
        responses,
        {name: pd.DataFrame(table, index=knocked) for name, table in tables.items()},
    )
