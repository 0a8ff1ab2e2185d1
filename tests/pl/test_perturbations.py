import matplotlib
import numpy as np
import pandas as pd
import pytest

from scforge.errors import DataError, OptionError
from scforge.pl import in_silico_ranking, perturbation_ranks, perturbation_scatter
from scforge.pl._style import KINDS
from scforge.testing import raises


@pytest.fixture
def effects() -> pd.DataFrame:
    measured = np.random.default_rng(0).normal(0, 0.1, 100)
    measured[:4] = [2.0, 1.99, 1.98, -1.5]
    frame = pd.DataFrame({"measured": measured, "predicted": 0.5 * measured}, index=[f"g{i}" for i in range(100)])
    frame.loc["g50", "predicted"] = np.nan
    return frame


def test_each_gene_is_a_point_and_the_largest_are_named(effects: pd.DataFrame, texts) -> None:
    ax = perturbation_scatter(effects, n_labels=4, title="KO")
    drawn = {one.get_label(): np.asarray(one.get_offsets()) for one in ax.collections}
    np.testing.assert_allclose(drawn["largest effects"], effects[["measured", "predicted"]].iloc[:4])
    assert len(drawn["genes"]) == 95
    assert set(texts(ax.texts)) == {"g0", "g1", "g2", "g3"}
    assert ax.get_title() == "KO: r = 1.00"
    assert ax.get_xlabel() == "measured change\n(genes left out, without both: 1)"
    assert texts(perturbation_scatter(effects, n_labels=1).texts) == ["g0"], "no name stands on the other side"
    flat = perturbation_scatter(effects.assign(predicted=0.0), n_labels=0)
    assert flat.get_title() == "r is not defined: one value for all genes"
    assert not flat.texts
    with raises(DataError, "column"):
        perturbation_scatter(effects[["measured"]])
    with raises(DataError, "effects"):
        perturbation_scatter(effects.assign(predicted=np.nan))
    with raises(OptionError, "n_labels"):
        perturbation_scatter(effects, n_labels=-1)


def test_a_point_for_each_effect_and_the_best_method_on_top(texts) -> None:
    values = {"train_mean": [0.5] * 4, "scforge": [0.0, 0.1, 0.1, 0.4], "technical_duplicate": [0.0] * 4}
    values["nothing"] = [np.nan] * 4
    ranks = pd.DataFrame(values).melt(var_name="method", value_name="rank")
    ax = perturbation_ranks(ranks)
    names = ["nothing (0)", "train_mean (4)", "scforge (4)", "technical_duplicate (4)"]
    assert texts(ax.get_yticklabels()) == names
    drawn = {one.get_label(): one for one in ax.collections if not one.get_label().startswith("_")}
    kinds = {"train_mean": "baseline", "scforge": "model", "technical_duplicate": "ceiling"}
    for place, (method, kind) in enumerate(kinds.items(), start=1):
        points = np.asarray(drawn[method].get_offsets())
        np.testing.assert_allclose(points[:, 0], values[method])
        assert (points[:, 1] == place).all()
        assert matplotlib.colors.to_hex(drawn[method].get_facecolor()[0]).upper() == KINDS[kind]
    means = [one.get_segments()[0][0, 0] for one in ax.collections if one.get_label().startswith("_")]
    assert means == pytest.approx([0.5, 0.15, 0.0])
    assert set(texts(ax.texts)) == {"chance", "not defined"}
    table = ranks.rename(columns={"rank": "mse"}).dropna().assign(kind="model")
    ax = perturbation_ranks(table, metric="mse")
    assert ax.get_xlabel() == "mse of the measured effect (4 effects; bar: mean)"
    assert not ax.texts
    with raises(DataError, "column"):
        perturbation_ranks(table)


@pytest.mark.parametrize(("metric", "best"), [("cosine", "prediction"), ("mse", "train_mean")])
def test_the_best_stands_on_top_and_a_prediction_is_a_model(metric: str, best: str, texts) -> None:
    table = pd.DataFrame({"method": ["prediction", "train_mean"] * 2, metric: [0.8, 0.1, 0.9, 0.2]})
    ax = perturbation_ranks(table, metric=metric)
    assert texts(ax.get_yticklabels())[-1] == best


def test_the_ranking_of_a_knock_out_shows_what_an_untrained_network_does(texts) -> None:
    table = pd.DataFrame({"gene": list("abcd"), "gene_2": list("wxyz"), "shift_z": [1.0, np.nan, 5.0, -2.0]})
    table["shift_z_untrained"] = 0.5
    ax = in_silico_ranking(table, n_genes=2, title="monocytes")
    assert texts(ax.get_yticklabels()) == ["c + y", "a + w"]
    trained, untrained = (points.get_offsets().data for points in ax.collections if points.get_label()[0] != "_")
    np.testing.assert_array_equal(trained, [[5, 0], [1, 1]])
    np.testing.assert_array_equal(untrained, [[0.5, 0], [0.5, 1]])
    assert ax.get_legend() is not None
    alone = in_silico_ranking(table[["gene", "shift_z"]])
    assert texts(alone.get_yticklabels()) == ["c", "a", "d"]
    assert alone.get_legend() is None
    with raises(DataError, "table"):
        in_silico_ranking(table.assign(shift_z=np.nan))
    with raises(DataError, "column"):
        in_silico_ranking(table, metric="goal_z")
    with raises(DataError, "table"):
        in_silico_ranking(table.assign(group=["B", "B", "T", "T"]))
    with raises(OptionError, "metric"):
        in_silico_ranking(table, metric="fdr")
