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
    """Cells of a simulated screen, with the ground truth.

    Attributes
    ----------
    adata
        Counts as a float32 CSR matrix. ``obs["perturbation"]`` is ``"control"``, a gene, or two genes joined by ``+``.
    effects
        True change in the log mean of each gene for each perturbation, one row per perturbation, shape (P, G).
    program
        Program of each perturbed gene; -1 if the perturbation has no effect.
    responses
        Change in the log means for each program at strength 1, float64, shape (n_programs, G).
    tables
        Vectors of the perturbed genes: ``"vectors"`` encodes the program with noise, ``"screen"`` contains noisy
        effects, as from a second screen, and ``"random"`` contains no information.

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
    """Simulate a screen similar to Norman et al. (2019) and Replogle et al. (2022).

    Each knockout shifts the log means of the response genes of one program by its strength, and the log means of 5
    other genes; 40% of the knockouts have no effect. A pair shifts the log means by the sum of both effects. Counts
    are negative binomial.

    Parameters
    ----------
    seed
        Random seed.
    n_knockouts
        Number of perturbed genes, which are the first genes of the panel.
    n_pairs
        Maximum number of pairs of perturbed genes.
    n_cells
        Number of cells per perturbation; there are 20 times as many control cells.
    n_genes
        Number of genes in the panel, at least `n_knockouts`.
    n_programs
        Number of programs.
    n_response
        Number of response genes per program.

    Returns
    -------
    The cells and the ground truth.

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
