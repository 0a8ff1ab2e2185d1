"""Metadata of named data sets: source, columns and split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

from scforge._checks import check_choice, check_known
from scforge.errors import OptionError

RULES = ("stratified", "groups", "perturbations", "targets")

type Amount = float | int | tuple[str, ...]
"""Amount to hold out: a fraction, a number, or a list of names."""


@dataclass(frozen=True)
class SplitRule:
    """Rule that divides the cells of a data set into training, validation and test.

    Sampling uses the SHA-256 of names, so it depends neither on the order of the cells nor on the machine.

    Attributes
    ----------
    kind
        ``"stratified"``
            A fraction of the cells for each value of `column`; cells without a value are treated as a separate value.
        ``"groups"``
            All cells of some values of `column`, e.g. of whole donors. Cells without a value are left out.
        ``"perturbations"``
            All cells of some perturbations; with `context_key`, of some perturbations in some contexts. Each held-out
            part has its own control cells. Cells without a value are left out.
        ``"targets"``
            All cells of every perturbation that contains one of the held-out genes. `validation` and `test` count these
            genes, and no training cell has a perturbation of them. In addition, a fraction `combination_share` of the
            combinations of other genes is held out. Therefore, 0, 1 or 2 genes of a test pair occur in training cells,
            as in GEARS (Roohani et al. 2024).
    column
        Column of ``obs``.
    validation, test
        Held-out cells, groups, perturbations or genes: a fraction (below 1), a number, or a list of names.
    context_key
        Column of the contexts of perturbations, e.g. cell types.
    control_share
        Fraction of the control cells in each held-out part, in every context with held-out cells of this part.
    separator
        Separator between the names in a combined perturbation. With ``"perturbations"``, only combinations are held
        out.
    combination_share
        With ``"targets"``, fraction of the combinations without a held-out gene in each held-out part.

    Raises
    ------
    OptionError
        If `kind` is unknown, or an option cannot be used with it.

    Examples
    --------
    >>> SplitRule("groups", column="donor", validation=1, test=["donor_3"]).test
    ('donor_3',)
    >>> get_card("pbmc3k").split.kind
    'stratified'
    """

    kind: str
    column: str
    validation: Amount
    test: Amount
    context_key: str | None = None
    control_share: float = 0.25
    separator: str | None = None
    combination_share: float = 0.25

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, RULES)
        if self.kind == "targets" and (self.separator is None or self.context_key is not None):
            raise OptionError("requires separator and does not work with context_key.", kind="targets")
        for name in ("validation", "test"):
            amount = getattr(self, name)
            if isinstance(amount, list):
                object.__setattr__(self, name, tuple(amount))
            elif not isinstance(amount, tuple) and not (0 < amount < 1 or (amount >= 1 and amount == int(amount))):
                raise OptionError("must be a fraction, a number or a list of names.", argument=name, value=amount)
            if self.kind == "stratified" and not (isinstance(amount, float) and amount < 0.5):
                raise OptionError(
                    "is not valid for a stratified split; pass a fraction below 0.5.", argument=name, value=amount
                )


@dataclass(frozen=True)
class PertpySource:
    """Description of a data set that is read with pertpy, which downloads it.

    Attributes
    ----------
    function
        Name of the function in ``pertpy.data``.
    layer
        Layer with the counts. If None, uses ``X``.
    suffix
        Regular expression for the text that follows the gene in a label, e.g. a plasmid name; None if labels contain
        only the gene.
    controls
        Labels (without suffix) of untreated cells.
    unassigned
        Labels of cells with no known perturbation; these cells are removed, as are cells without a label.

    Examples
    --------
    >>> get_card("adamson").pertpy.controls
    ('62(mod)', '63(mod)', 'Gal4-4(mod)')
    """

    function: str
    layer: str | None = None
    suffix: str | None = None
    controls: tuple[str, ...] = ()
    unassigned: tuple[str, ...] = ()


@dataclass(frozen=True)
class DatasetCard:
    """Metadata of a data set; uncertain facts are None.

    Attributes
    ----------
    name, title
        Name in scforge, and title.
    organism
        Organism, e.g. ``"Homo sapiens"``.
    n_cells, n_genes
        Number of cells and genes.
    genes
        Kind of ``var_names``, ``"symbol"`` or ``"ensembl"``.
    labels_key, batch_key, groups_key, perturbation_key, control
        Columns of ``obs`` with cell types, technical batches, groups of cells of the same origin (donors) and
        perturbations, and the label of untreated cells in the last.
    source, url, license
        Source, URL and license of the data set.
    sha256
        SHA-256 of the file ``<name>.h5ad``.
    embedded
        Whether the file is part of the package.
    how_to_get
        How to obtain the data set, in one sentence.
    pertpy
        How to read the data set with pertpy; None if pertpy does not provide it.
    split
        Rule that divides the cells.
    more_splits
        A mapping from version to split rule, for rules that differ from `split`.
    splits
        A mapping from version to the SHA-256 of the bundled file with cell ids, ``splits/<name>-v<version>.csv.gz``.
    shares_cells_with
        Names of data sets that contain some of the same cells; do not train on one of them and test on the other.
    note
        Additional information for users.

    Examples
    --------
    >>> card = DatasetCard(
    ...     "my_cells",
    ...     title="Cells of my study",
    ...     organism="Homo sapiens",
    ...     source="my laboratory",
    ...     how_to_get="ask me for it",
    ...     labels_key="cell_type",
    ...     split=SplitRule("stratified", "cell_type", 0.1, 0.2),
    ... )
    >>> card.columns, card.split.test
    ({'labels_key': 'cell_type'}, 0.2)
    """

    name: str
    title: str
    organism: str
    source: str
    how_to_get: str
    n_cells: int | None = None
    n_genes: int | None = None
    genes: str | None = None
    labels_key: str | None = None
    batch_key: str | None = None
    groups_key: str | None = None
    perturbation_key: str | None = None
    control: str | None = None
    url: str | None = None
    license: str | None = None
    sha256: str | None = None
    embedded: bool = False
    pertpy: PertpySource | None = None
    split: SplitRule | None = None
    more_splits: Mapping[int, SplitRule] = field(default_factory=dict, hash=False)
    splits: Mapping[int, str] = field(default_factory=dict, hash=False)
    shares_cells_with: tuple[str, ...] = ()
    note: str | None = None

    @property
    def columns(self) -> dict[str, str]:
        """Return a mapping from argument name to the column of obs that the card specifies."""
        keys = {name: getattr(self, name) for name in ("labels_key", "batch_key", "groups_key", "perturbation_key")}
        return {name: key for name, key in keys.items() if key is not None}

    def rule(self, version: int) -> SplitRule | None:
        """Return the rule of a version of the split."""
        return self.more_splits.get(version, self.split)


def list_cards() -> list[str]:
    """Return the names of the data sets that have a card.

    Returns
    -------
    The names, sorted.

    Examples
    --------
    >>> "pbmc3k" in list_cards()
    True
    """
    folder = resources.files("scforge.datasets").joinpath("cards")
    return sorted(file.name.removesuffix(".yaml") for file in folder.iterdir() if file.name.endswith(".yaml"))


@cache
def get_card(name: str) -> DatasetCard:
    """Return the card of a data set.

    Parameters
    ----------
    name
        Name of a card, see :func:`list_cards`.

    Returns
    -------
    The card, with the properties of the data set and the rule of its split.

    Raises
    ------
    OptionError
        If there is no card with this name.

    Examples
    --------
    >>> card = get_card("kang_ctrl_8donor")
    >>> card.n_cells, card.labels_key, card.groups_key
    (12261, 'cluster_id', 'sample_id')
    """
    import yaml

    check_known("name", name, list_cards(), "the data sets with a card", error=OptionError)
    text = resources.files("scforge.datasets").joinpath("cards", f"{name}.yaml").read_text(encoding="utf-8")
    facts = yaml.safe_load(text)
    source, rule = facts.pop("pertpy", None), facts.pop("split", None)
    facts["shares_cells_with"] = tuple(facts.get("shares_cells_with", ()))
    facts["more_splits"] = {number: SplitRule(**other) for number, other in facts.get("more_splits", {}).items()}
    if source is not None:
        lists = {key: tuple(value) for key, value in source.items() if isinstance(value, list)}
        facts["pertpy"] = PertpySource(**(source | lists))
    return DatasetCard(name=name, split=None if rule is None else SplitRule(**rule), **facts)
