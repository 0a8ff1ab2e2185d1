import json
import shutil
from pathlib import Path

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import yaml

from scforge.errors import HubError, MissingFileError, ModelFileError, NotTrainedWarning, OptionError
from scforge.estimators import Encoder
from scforge.eval.report import Report, Row
from scforge.hub import upload
from scforge.hub.uploading import is_own_card
from scforge.testing import raises
from scforge.workflows.models import pull_folder

# huggingface_hub sends large files with an argument that its HTTP client has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")

TABLE = pd.DataFrame({"accuracy": [0.9, 0.5], "n_scored": [6, 6]}, index=["scforge", "majority_class"])
LONG = Report("", rows=[Row("scforge", "model", {"f1": 0.9}), Row("pca", "baseline", {"f1": 0.5})]).to_frame()


@pytest.fixture
def annotator(model: Encoder, quick: dict) -> Encoder:
    return model.finetune("annotation", lora={"r": 2}, **quick)


def front_matter(hub, repo_id: str) -> dict:
    return yaml.safe_load(hub.files(repo_id)["README.md"].decode().split("---\n")[1])


def embedding(model: Encoder, adata: ad.AnnData) -> np.ndarray:
    return model.get_latent_representation(adata, key_added=None)


def written(model: Encoder, folder: Path) -> str:
    model.save(folder, overwrite=True)
    return (folder / "README.md").read_text()


def same_predictions(one: Encoder, two: Encoder, adata: ad.AnnData) -> None:
    pd.testing.assert_frame_equal(one.predict(adata), two.predict(adata))


@pytest.mark.slow
def test_there_and_back(hub, model: Encoder, build, quick: dict) -> None:
    assert model.push_to_hub("org/light") == f"{hub.url}/org/light"
    again, first = Encoder.load("hf://org/light", model.adata), embedding(model, model.adata)
    np.testing.assert_array_equal(embedding(again, model.adata), first)
    assert repr(again) == repr(model)
    again.push_to_hub("org/copy")
    for name in ("model.safetensors", "vocab.json", "config.json"):
        assert hub.files("org/copy")[name] == hub.files("org/light")[name]
    model.push_to_hub("org/light", revision="v1")
    model.train(**quick)
    model.push_to_hub("org/light")
    np.testing.assert_array_equal(embedding(Encoder.load("hf://org/light", revision="v1"), model.adata), first)
    assert np.abs(embedding(Encoder.load("hf://org/light"), model.adata) - first).max() > 0
    with pytest.warns(NotTrainedWarning, match="its random weights will be pushed"):
        build().push_to_hub("org/random")
    assert "its weights are random" in hub.files("org/random")["README.md"].decode()


def test_labeled_cells_are_pushed_on_request_only(hub, model: Encoder, tmp_path: Path) -> None:
    model.push_to_hub("org/light")
    assert "reference.safetensors" not in hub.files("org/light")
    model.push_to_hub("org/light", reference=True)
    assert "those of 60 labeled" in " ".join(hub.files("org/light")["README.md"].decode().split())
    loaded = Encoder.load("hf://org/light")
    expected = model.transfer_labels(model.adata[:20].copy())
    pd.testing.assert_frame_equal(loaded.transfer_labels(model.adata[:20].copy()), expected)
    model.save(tmp_path / "model")
    upload(tmp_path / "model", "org/light")
    assert "reference.safetensors" not in hub.files("org/light"), "it is removed from the repository"
    with pytest.raises(OptionError, match="nor saved reference cells"):
        Encoder.load("hf://org/light").transfer_labels(model.adata[:20].copy())
    upload(tmp_path / "model", "org/light", reference=True)
    pulled = pull_folder("hf://org/light", tmp_path / "pulled")
    assert (pulled / "reference.safetensors").exists()


def test_what_was_told_is_on_the_card_and_stays_with_the_model(hub, model: Encoder, tmp_path: Path) -> None:
    told = {"license": "Apache-2.0", "data": ["org/cells", "others"], "citation": "Somebody 2026", "metrics": TABLE}
    model.push_to_hub("org/light", **told)
    card = hub.files("org/light")["README.md"].decode()
    front = front_matter(hub, "org/light")
    assert (front["library_name"], front["license"], front["datasets"]) == ("scforge", "apache-2.0", ["org/cells"])
    assert {"single-cell", "gene_pooling", "neighbor_denoising"} <= set(front["tags"])
    (result,) = front["model-index"][0]["results"]
    assert result["metrics"] == [
        {"type": "accuracy", "value": 0.9, "name": "accuracy (baselines: majority_class=0.500)"}
    ]
    for words in ('load("hf://org/light")', "| majority_class | 0.5 | 6 |", "Somebody 2026", "org/cells, others"):
        assert words in card
    assert "40 gene symbols" in card
    again = Encoder.load("hf://org/light")
    saved = written(again, tmp_path / "saved")
    place = '"path/to/folder")  # the folder that this file is in'
    expected = card.replace('"hf://org/light")', place).replace("# light", "# gene_pooling")
    expected = expected.replace("name: light", "name: gene_pooling")
    assert saved.splitlines()[:-1] == expected.splitlines()[:-1]  # the last line has the checksum of those above
    assert is_own_card(saved)
    assert not is_own_card(saved.partition("<!-- Written by")[0])
    again.push_to_hub("org/other", license="my own")
    front = front_matter(hub, "org/other")
    assert (front["license"], front["license_name"], front["datasets"]) == ("other", "my own", ["org/cells"])


def test_figures_are_of_the_model_as_it_is_now(hub, model: Encoder, quick: dict, tmp_path: Path) -> None:
    model.push_to_hub("org/light", metrics=TABLE, license="mit")
    assert "majority_class" in written(model, tmp_path / "before")
    for again in (model, Encoder.load(tmp_path / "before", model.adata)):
        again.train(**quick)
        text = written(again, tmp_path / "after")
        assert "majority_class" not in text
        assert "license: mit" in text
        assert "majority_class" not in (tmp_path / "after" / "config.json").read_text()


ROWS = [Row("scforge", "model", {"f1": 0.9, "b": 0.1}), Row("pca", "baseline", {"f1": 0.8, "b": 0.2})]


@pytest.mark.parametrize(
    ("metrics", "data", "names"),
    [
        (
            Report("Cells", {"data": "PBMC 3k"}, rows=ROWS),
            "PBMC 3k",
            ["f1 (baselines: pca=0.800)", "b (baselines: pca=0.200)"],
        ),
        (
            Report("Cells", rows=ROWS).to_frame(),
            "not stated",
            ["f1 (baselines: pca=0.800)", "b (baselines: pca=0.200)"],
        ),
        (TABLE[::-1], "not stated", ["accuracy (baselines: majority_class=0.500)"]),
    ],
)
def test_figures_of_a_report(hub, model: Encoder, metrics: object, data: str, names: list[str]) -> None:
    model.push_to_hub("org/light", data="what it learned from", metrics=metrics)
    results = front_matter(hub, "org/light")["model-index"][0]["results"]
    assert {result["dataset"]["name"] for result in results} == {data}
    found = [figure for result in results for figure in result["metrics"]]
    assert [figure["name"] for figure in found] == names
    assert found[0]["value"] == 0.9
    assert ("### Cells" in hub.files("org/light")["README.md"].decode()) == isinstance(metrics, Report)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": LONG.drop(columns="kind")}, "metrics must contain exactly one row named 'scforge'"),
        (
            {"metrics": LONG[LONG["kind"] == "model"]},
            "metrics must contain exactly one row named 'scforge' .* and rows for baselines",
        ),
        ({"base": "org/other"}, "base='org/other' has no effect if the model was not fine-tuned"),
        ({"metrics": TABLE[:1]}, "and rows for baselines .rows: 'scforge'"),
        ({"metrics": {"f1": 1.0}}, r"metrics is of type 'dict'; pass the table returned by evaluate\(\)"),
        ({"adapter_only": True}, "the model has no adapters|the base model has no public location"),
        ({"base": "somewhere"}, "base='somewhere' is not the name of a public model"),
    ],
)
def test_what_cannot_be_told(hub, model: Encoder, options: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        model.push_to_hub("org/light", **options)
    assert not hub.repos


@pytest.mark.slow
def test_adapters_bring_their_model(hub, model: Encoder, annotator: Encoder, quick: dict) -> None:
    with pytest.raises(OptionError, match="the base model has no public location"):
        annotator.push_to_hub("org/groups", adapter_only=True)
    model.push_to_hub("org/light")
    annotator.push_to_hub("org/groups", adapter_only=True, metrics=annotator.evaluate())
    names = {"adapter.json", "adapter.safetensors", "split.safetensors", "README.md", ".gitattributes"}
    assert set(hub.files("org/groups")) == names
    front = front_matter(hub, "org/groups")
    assert (front["base_model"], front["base_model_relation"]) == ("org/light", "adapter")
    model.train(**quick)
    model.push_to_hub("org/light")  # adapters sit on the commit that they were trained on
    again = Encoder.load("hf://org/groups", model.adata)
    same_predictions(again, annotator, model.adata)
    model.train(**quick)  # it is not what was sent
    with pytest.raises(OptionError, match="the base model has no public location"):
        model.finetune("annotation", lora={"r": 2}, **quick).push_to_hub("org/later", adapter_only=True)
    with pytest.raises(ModelFileError, match="were trained on a base model with other weights or genes"):
        Encoder.load("hf://org/groups", base="hf://org/light")
    again.push_to_hub("org/again", adapter_only=True)
    assert json.loads(hub.files("org/again")["adapter.json"])["base"]["name"] == "org/light"


def test_a_failed_push_leaves_the_model_as_it_was(hub, model: Encoder, tmp_path: Path) -> None:
    with pytest.raises(HubError):
        model.push_to_hub("org/light", license="mit", token="hf_wrong")
    assert "license" not in written(model, tmp_path / "saved")


def test_whole_fine_tuned_models_name_their_base(hub, model: Encoder, annotator: Encoder) -> None:
    model.push_to_hub("org/light")
    annotator.push_to_hub("org/groups")
    front = front_matter(hub, "org/groups")
    assert (front["base_model"], front["base_model_relation"]) == ("org/light", "finetune")
    assert front["pipeline_tag"] == "tabular-classification"
    again = Encoder.load("hf://org/groups", model.adata)
    same_predictions(again, annotator, model.adata)
    assert len(again.evaluate(base=model)) > 1, "the cells that were held out are known again"
    annotator.push_to_hub("org/guess", adapter_only=True, base="org/other")
    assert json.loads(hub.files("org/guess")["adapter.json"])["base"]["name"] == "org/other"


def test_adapters_in_folders_know_the_way_to_their_model(model: Encoder, annotator: Encoder, tmp_path: Path) -> None:
    annotator.save(tmp_path / "before", adapter_only=True)
    model.save(tmp_path / "model")
    with raises(OptionError, "base"):
        Encoder.load(tmp_path / "model", base="hf://org/light")
    with pytest.raises(OptionError, match="does not contain the name of the base model; pass the base model as base"):
        Encoder.load(tmp_path / "before")
    model.save(tmp_path / "a" / "base")
    annotator.save(tmp_path / "a" / "adapter", adapter_only=True)
    (tmp_path / "a").rename(tmp_path / "b")
    again = Encoder.load(tmp_path / "b" / "adapter", model.adata)
    same_predictions(again, annotator, model.adata)
    shutil.rmtree(tmp_path / "b" / "base")
    with pytest.raises(MissingFileError):
        Encoder.load(tmp_path / "b" / "adapter")
    for base in (model, Encoder.load(tmp_path / "b" / "adapter", base=model).base_model):
        again = Encoder.load(tmp_path / "before", base=base)
        same_predictions(again, annotator, model.adata)


@pytest.mark.slow
def test_a_copy_knows_where_it_was_fetched(hub, model, annotator, quick: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model.save("base")
    annotator.save("adapter", adapter_only=True)
    upload("adapter", "org/groups")
    assert pull_folder("org/groups", "groups") == Path("groups")
    with pytest.raises(MissingFileError, match="is a folder that does not exist; pass the base model as base"):
        Encoder.load("hf://org/groups")
    for name in ("hf://org/groups", "groups"):
        assert Encoder.load(name, base="base").spec.tuning is not None
    model.push_to_hub("org/light")
    pull_folder("org/light", "light")
    tuned = Encoder.load("light", model.adata).finetune("annotation", lora={"r": 2}, **quick)
    tuned.push_to_hub("org/again", adapter_only=True)
    named = json.loads(hub.files("org/again")["adapter.json"])["base"]
    assert named == {"name": "org/light", "revision": hub.repos["org/light"].branches["main"]}
    shutil.copytree("light", "other")
    model.train(**quick)
    model.save("later")
    shutil.copytree("later", "other", dirs_exist_ok=True)
    assert Encoder.load("other").fitted.origin.name is None, "it is another model now"
