import anndata as ad
import numpy as np
import pytest
from scipy.stats import spearmanr
from torchmetrics.functional.text import bleu_score

from scforge.errors import DataError, OptionError, ScforgeWarning
from scforge.eval import RankReconstruction
from scforge.eval.rank_reconstruction import evaluate_reconstruction, ranking_baselines
from scforge.testing import raises

TRUE = np.array([[0, 1, 2, 3, 4, 5], [9, 8, 7, 6, -1, -1]])


def score(made: list[int], true: list[int]) -> dict[str, float]:
    return RankReconstruction().run(np.array([made + [-1] * (8 - len(made))]), np.array([true]))


@pytest.fixture(scope="module")
def orders(pbmc: ad.AnnData) -> np.ndarray:
    """The 40 highest genes of 60 cells of PBMC 3k."""
    counts = pbmc.X[:60].toarray()
    order = np.argsort(-counts, axis=1, kind="stable")[:, :40]
    return np.where(np.take_along_axis(counts, order, axis=1) > 0, order, -1)


def test_edits_are_those_of_the_full_table(orders: np.ndarray) -> None:
    made = orders[::-1].copy()
    made[20:25, 30:] = made[25] = -1  # some are shorter, and one is empty
    edits, shares = [], []
    for one, other in zip(made, orders, strict=True):
        one, other = one[one >= 0], other[other >= 0]
        table = np.add.outer(np.arange(len(one) + 1), np.arange(len(other) + 1))
        for i, gene in enumerate(one, 1):
            for j, true in enumerate(other, 1):
                table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, table[i - 1, j - 1] + (gene != true))
        edits.append(table[-1, -1])
        shares.append(edits[-1] / max(len(one), len(other)))
    scores = RankReconstruction().run(made, orders)
    assert scores["l_dist_edits"] == pytest.approx(np.mean(edits))
    assert scores["l_dist"] == pytest.approx(np.mean(shares))
    assert score([1, 0, 2, 3], [0, 1, 2, 3])["l_dist_edits"] == 2, "a change of places is no single edit"


@pytest.mark.parametrize("shift", [0, 1, 5])
def test_bleu_is_that_of_torchmetrics(shift: int, orders: np.ndarray) -> None:
    made = orders.copy()
    made[:, 10:12] = made[:, 11:9:-1]
    made[:, 40 - shift :] = -1
    texts, references = ([" ".join(map(str, row[row >= 0])) for row in some] for some in (made, orders))
    expected = float(bleu_score(texts, [[text] for text in references]))
    assert RankReconstruction().run(made, orders)["bleu"] == pytest.approx(expected, abs=1e-6)


def test_bleu_counts_a_repeated_gene_once() -> None:
    """Four genes, of which two are right once: 2/4, and of the three pairs only (0, 1) is there."""
    assert score([0, 1, 0, 1], [0, 1, 2, 3])["bleu"] == 0.0, "no run of three"
    expected = (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert score([0, 1, 2, 3, 0], [0, 1, 2, 3, 4])["bleu"] == pytest.approx(expected)
    assert score([0, 1, 2, 3], [0, 1, 2, 3, 4])["bleu"] == pytest.approx(np.exp(1 - 5 / 4))


@pytest.mark.parametrize(
    ("made", "places"),
    [
        ([0, 1, 2], [0, 1, 2, 4, 4, 4]),  # what is missing shares the last place
        ([8, 0, 9, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]),  # what does not belong is passed over
        ([1, 0, 1, 2, 3, 4, 5], [1, 0, 2, 3, 4, 5]),  # the first place counts
    ],
)
def test_spearman_of_missing_and_invented_genes(made: list[int], places: list[int]) -> None:
    expected = spearmanr(places, range(6)).statistic
    assert score(made, [0, 1, 2, 3, 4, 5])["spearman"] == pytest.approx(expected)


def test_spearman_is_that_of_scipy_and_draws_are_of_cells(orders: np.ndarray) -> None:
    made, benchmark = np.random.default_rng(0).permuted(orders, axis=1), RankReconstruction()
    scores = benchmark.run(made, orders)
    expected = [
        spearmanr([list(one).index(gene) for gene in other], range(len(other))).statistic
        for one, other in zip(made, orders, strict=True)
    ]
    assert scores["spearman"] == pytest.approx(np.mean(expected))
    draws = benchmark.resampled(made, orders, n=200, seed=0)
    assert list(draws) == list(scores)
    for name in ("l_dist", "l_dist_edits", "spearman"):
        assert draws[name].mean() == pytest.approx(scores[name], abs=draws[name].std() / 3), name
        assert draws[name].std() > 0
    assert benchmark.resampled(orders, orders, n=3, seed=0)["bleu"].tolist() == pytest.approx([1.0] * 3)


def test_nothing_right_scores_nothing() -> None:
    made = np.array([[20, 21, 22, 23], [24, 25, 26, 27]])
    assert RankReconstruction().run(made, TRUE) == {"l_dist": 1.0, "l_dist_edits": 5.0, "bleu": 0.0, "spearman": 0.0}
    assert RankReconstruction().run(np.full((2, 4), -1), TRUE)["bleu"] == 0.0
    single = score([3], [3])
    assert np.isnan([single["spearman"], single["bleu"]]).all()


def test_orders_of_expression_and_baselines(orders: np.ndarray) -> None:
    known, chance = "mean order of the cell's genes", "random order of the cell's genes"
    made = ranking_baselines(orders[:30], orders[30:])
    scores = {name: RankReconstruction().run(some, orders[30:]) for name, some in made.items()}
    assert scores[known]["spearman"] > 0.4 > 0.1 > abs(scores[chance]["spearman"])
    assert scores[known]["l_dist"] < scores[chance]["l_dist"]
    assert (made["mean order"] == made["mean order"][0]).all(), "the same for all cells"
    for name in (known, chance):
        assert (np.sort(made[name], axis=1) == np.sort(orders[30:], axis=1)).all(), name
    toy = ranking_baselines(np.array([[5, 3, 1], [3, 5, 1]]), np.array([[1, 3, 5], [7, 1, -1]]))
    assert toy["mean order"].tolist() == [[3, 5, 1], [3, 5, -1]], "3 and 5 share the mean rank 5/6, 1 has 1/3"
    assert toy[known].tolist() == [[3, 5, 1], [1, 7, -1]]


def test_the_report(orders: np.ndarray) -> None:
    made = orders[30:].copy()
    made[:, [0, 1]] = made[:, [1, 0]]
    report = evaluate_reconstruction(made, orders[30:], orders[:30])
    assert [row.kind for row in report.rows] == ["model", "baseline", "baseline", "baseline"]
    (verdict,) = report.verdicts()
    assert verdict.startswith("reconstructed is better than mean order in spearman")
    with raises(OptionError, "reconstructed"):
        evaluate_reconstruction({"mean order": made}, orders[30:], orders[:30])
    with raises(OptionError, "kinds"):
        evaluate_reconstruction(made, orders[30:], orders[:30], kinds={"mine": "model"})


def test_training_cells_among_the_true_ones(orders: np.ndarray) -> None:
    wider = np.pad(orders[:31], ((0, 0), (0, 3)), constant_values=-1)
    with pytest.raises(DataError, match="1 of 30 true orders are identical to the order of a training cell; remove"):
        evaluate_reconstruction(orders[30:], orders[30:], wider)
    many = np.array([*orders[30:], *(np.random.default_rng(0).permutation(40) for _ in range(90))])
    with pytest.warns(ScforgeWarning, match="1 of 120 true orders .* check whether"):
        evaluate_reconstruction(many, many, wider, intervals=False)
    short = orders[:, :5]
    evaluate_reconstruction(short[30:], short[30:], short[:31], intervals=False)


@pytest.mark.parametrize(
    ("made", "true", "message"),
    [
        (TRUE[:1], TRUE, "there are 1 reconstructed and 2 true gene orders"),
        (TRUE, np.array([[0, 1], [2, 2]]), "the true orders have a duplicate gene in row 1"),
        (TRUE, np.array([[0, 1], [-1, 2]]), "have -1 before a gene in row 1"),
        (TRUE, np.array([[0, 1], [-1, -1]]), "have no gene in row 1"),
        (TRUE - 1, TRUE, "pass gene indices from 0"),
        (TRUE.astype(float), TRUE, "have dtype float64 and shape"),
    ],
)
def test_bad_orders(made: np.ndarray, true: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        RankReconstruction().run(made, true)
