"""What kind of gene names data have: Ensembl ids or symbols, and of which species."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from scforge.data.gene_tables import SPECIES, gene_table

__all__ = ["OTHER_NAMES", "n_of_species", "recognise_ids"]

OTHER_NAMES = "names of no known kind"
"""Kind of names that are neither Ensembl ids, nor symbols of man or mouse, nor numbers."""

_ENSEMBL = re.compile(r"^ENS([A-Z]*)G\d{11}(\.\d+)?(_PAR_Y)?$", re.IGNORECASE)
_SPECIES_OF = {"": "human", "MUS": "mouse"}

_SAMPLE = 2000
"""Names that are looked at, spread over all of them."""

_LEAST_SYMBOLS = 0.2
"""Share of names that are symbols of a species from which on the names are taken for its symbols.

Names of an old annotation still have some 0.6; those of the other species have less than 0.02.
"""


def recognise_ids(names: Sequence[str] | np.ndarray) -> str:
    """Return what most of `names` are.

    Returns
    -------
    ``"human Ensembl ids"``, ``"mouse Ensembl ids"``, ``"Ensembl ids of another species"``, ``"human gene symbols"``,
    ``"mouse gene symbols"``, ``"numbers (Entrez ids?)"`` or ``"names of no known kind"``.

    Examples
    --------
    >>> recognise_ids(["ENSMUSG00000032094.8", "ENSMUSG00000059552"]), recognise_ids(["CD3D", "LYZ", "my gene"])
    ('mouse Ensembl ids', 'human gene symbols')
    """
    step = max(1, len(names) // _SAMPLE)
    sample = [str(name) for name in names[::step]]
    kinds: Counter[str] = Counter()
    for name in sample:
        if match := _ENSEMBL.match(name):
            species = _SPECIES_OF.get(match[1].upper())
            kinds["Ensembl ids of another species" if species is None else f"{species} Ensembl ids"] += 1
        elif name.isdecimal():
            kinds["numbers (Entrez ids?)"] += 1
    kind, most = kinds.most_common(1)[0] if kinds else ("", 0)
    if most > len(sample) / 2:
        return kind
    symbols = {species: sum(name in gene_table(species).ids for name in sample) for species in SPECIES}
    species = max(symbols, key=lambda key: symbols[key])
    return f"{species} gene symbols" if symbols[species] > _LEAST_SYMBOLS * len(sample) else OTHER_NAMES


def n_of_species(names: Sequence[str] | np.ndarray) -> dict[str, int]:
    """Return how many of `names` are ids or symbols of one species only.

    Examples
    --------
    >>> n_of_species(["CD3D", "Cd3d", "ENSMUSG00000032094.8", "my gene"])
    {'human': 1, 'mouse': 2}
    """
    found = dict.fromkeys(SPECIES, 0)
    for name in map(str, names):
        if match := _ENSEMBL.match(name):
            owners = [_SPECIES_OF.get(match[1].upper())]
        else:
            owners = [species for species in SPECIES if name in gene_table(species).ids]
        if len(owners) == 1 and owners[0] is not None:
            found[owners[0]] += 1
    return found
