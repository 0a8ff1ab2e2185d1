"""Files and overrides: what they mean, and one sentence for each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scforge.config import Config, dump_config, load_config
from scforge.errors import ConfigError

DATA = "data: {paths: cells.h5ad}\n"

TUTORIAL = (Path(__file__).parent / "custom_model.yaml").read_text(encoding="utf-8")

PROPOSAL = """
data:
  paths: [cells.h5ad]
  preprocessing:
    hvg_selection: 2000
tokenizer:
  strategy: rank_value      # geneformer-style
  max_genes: 2048
  gene_vocab: human_protein_coding
model:
  architecture: transformer_encoder
  hidden_dim: 512
  num_layers: 12
  num_heads: 8
  pretraining_task: masked_gene_prediction
  mask_ratio: 0.15
training:
  batch_size: 64
  max_epochs: 10
  precision: bf16-mixed
  num_gpus: 4
  lr: 1e-4
"""

CENSUS = """
data:
  source: cellxgene_census
  organism: homo_sapiens
  filters:
    tissue: [lung, heart, liver]
    is_primary_data: true
  preprocessing:
    normalize: library_size
    hvg_selection: 2000
"""

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load(content: str | bytes, *overrides: str) -> Config:
        path = tmp_path / "recipe.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_config(path, overrides)

    return load


def message(load: Load, content: str | bytes, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(content, *overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 500
    return text


def test_the_tutorial_file(load: Load) -> None:
    config = load(TUTORIAL)
    written = yaml.safe_load(TUTORIAL)
    written["training"]["optimizer"]["lr"] = 0.0001
    assert config.user_set() == written
    assert config.model.user_options() == {k: v for k, v in written["model"].items() if k != "architecture"}


def test_the_proposal_file_with_local_data(load: Load) -> None:
    config = load(PROPOSAL)
    assert config.data.max_genes == 2048
    assert config.data.gene_vocab == "human_protein_coding"
    assert config.data.preprocessing.hvg_selection == 2000
    assert config.objective.name == "masked_gene_prediction"
    assert config.tokenizer.masking.mask_ratio == 0.15
    assert (config.training.accelerator, config.training.devices) == ("gpu", 4)
    assert config.training.optimizer.lr == 1e-4
    assert config.tokenizer.user_options() == {}
    assert config.model.user_options() == {"hidden_dim": 512, "num_layers": 12, "num_heads": 8}


def test_the_proposal_file_with_census_data(load: Load) -> None:
    config = load(CENSUS + PROPOSAL[PROPOSAL.index("tokenizer:") :])
    assert (config.data.source, config.data.organism) == ("cellxgene_census", "homo_sapiens")
    assert config.data.filters == {"tissue": ["lung", "heart", "liver"], "is_primary_data": True}
    assert config.data.preprocessing.user_set() == {"normalize": "library_size", "hvg_selection": 2000}
    assert config.data.paths is None
    assert config.data.gene_vocab == "human_protein_coding"


def test_everything_about_data(load: Load) -> None:
    content = """
source: local
paths: [s3://bucket/store.zarr, "cells/*.h5ad"]
obs: donor_id
storage_options: {anon: true, client_kwargs: {endpoint_url: "http://127.0.0.1"}}
modality: rna
memory: 16GB
cache: store.zarr
sampling: {balance_key: cell_type, warmup_epochs: 3, start: 0, end: 0.5}
split: {by: donor_id}
num_workers: 2
pin_memory: false
"""
    data = load("data: " + content.replace("\n", "\n  ") + "\ntraining: {max_tokens_per_batch: 8192}").data
    assert data.paths == ["s3://bucket/store.zarr", "cells/*.h5ad"]
    assert data.obs_columns == ["donor_id"]
    assert data.storage_options == {"anon": True, "client_kwargs": {"endpoint_url": "http://127.0.0.1"}}
    assert (data.modality, data.memory, data.cache) == ("rna", "16GB", "store.zarr")
    assert data.sampling.user_set() == {"balance_key": "cell_type", "warmup_epochs": 3, "start": 0.0, "end": 0.5}
    assert data.split.by == "donor_id"
    assert (data.num_threads, data.pin_memory, data.max_tokens_per_batch) == (2, False, 8192)


@pytest.mark.parametrize("number", ["1e-4", "1E-4", "1.e-4", "1.0e-4", ".1e-3", "0.0001", "+1e-4", "'1e-4'"])
def test_numbers_with_an_exponent_are_numbers(load: Load, number: str) -> None:
    config = load(f"{DATA}training: {{lr: {number}}}\n")
    assert config.training.optimizer.lr == 1e-4


def test_numbers_with_an_exponent_are_numbers_in_free_options_too(load: Load) -> None:
    assert load(f"{DATA}model: {{temperature: 1e-4, label: 1e-4b}}").model.user_options() == {
        "temperature": 1e-4,
        "label": "1e-4b",
    }


def test_empty_sections_are_defaults(load: Load) -> None:
    config = load(DATA + "training:\n  # batch_size: 3\ntokenizer:\n  masking:\n")
    assert config.training.batch_size is None
    assert config.tokenizer.masking.mask_ratio == 0.15


@pytest.mark.parametrize(
    ("content", "start"),
    [
        (
            "training: {max_epoch: 4}",
            "training.max_epoch=4 is not a known option; did you mean 'training.max_epochs'? (",
        ),
        (
            "batch_size: 3",
            "batch_size=3 is not a known option; did you mean 'training.batch_size'? (a configuration has",
        ),
        ("trainnig: {}", "trainnig={} is not a known option; did you mean 'training'? ("),
        (
            "training: {mask_ratio: 0.2}",
            "training.mask_ratio=0.2 is not a known option; did you mean 'tokenizer.masking.mask_ratio'? (training has",
        ),
        ("data: {paths: a, layr: b}", "data.layr='b' is not a known option; did you mean 'data.layer'? (data has: "),
        ("training: {zzz: 1}", "training.zzz=1 is not a known option (training has: 'batch_size', "),
        ("training: {batch_size: abc}", "training.batch_size='abc' is not an integer."),
        ("training: {batch_size: 1.5}", "training.batch_size=1.5 is not a whole number."),
        ("training: {batch_size: yes}", "training.batch_size=True is not a number."),
        ("training: {batch_size: 0}", "training.batch_size=0 is out of range; it must be at least 1."),
        ("training: {lr: fast}", "training.optimizer.lr='fast' is not a number."),
        ("training: {lr: .nan}", "training.optimizer.lr=nan is not a finite number."),
        ("training: {early_stopping: 3}", "training.early_stopping=3 is not true or false."),
        ("training: 5", "training=5 is not a section with options."),
        ("training: {precision: bf16}", "training.precision='bf16' is not known; did you mean 'bf16-mixed'? (known: "),
        ("training: {scheduler: {name: cosine_warmpu}}", "training.scheduler.name='cosine_warmpu' is not known; did "),
        ("training: {strategy: ddp}", "training.strategy='ddp' is not supported yet; "),
        ("training: {1: 2}", "training has the key 1, which is not the name of an option."),
        ("model: {1: 2}", "model has the key 1, which is not the name of an option."),
        ("eval: {every_n_epochs: 2}", "eval={'every_n_epochs': 2} is not supported yet; "),
        ("data: {source: s3, paths: a}", "data.source='s3' is not known (known: 'local', 'cellxgene_census')."),
        (
            "data: {source: cellxgene_census, paths: a}",
            "data.paths='a' has no use with data.source='cellxgene_census'; ",
        ),
        ("data: {source: local}", "data.paths is missing; "),
        ("data: {paths: a, organism: x}", "data.organism='x' has no use without data.source='cellxgene_census'; set "),
        ("data: {paths: a, uri: x}", "data.uri='x' has no use without data.source='cellxgene_census'"),
        ("data: {source: cellxgene_census, memory: 1GB}", "data.memory='1GB' has no use without data.source='local'; "),
        ("data: {source: cellxgene_census, filters: [a]}", "data.filters=['a'] is neither columns with their values"),
        ("data: {source: cellxgene_census, filter: {a: b}}", "data.filter={'a': 'b'} is not a known option; did you "),
        ("data: {paths: a, memory: yes}", "data.memory=True is not an amount of memory"),
        ("data: {paths: a, memory: 0}", "data.memory=0 is not an amount of memory"),
        ("data: {paths: a, num_threads: -1}", "data.num_threads=-1 is out of range; it must be at least 0."),
        ("data: {paths: a, sampling: {start: 0.5}}", "data.sampling.start=0.5 has no use without balance_key"),
        ("data: {paths: a, sampling: {balance_key: b, end: 2}}", "data.sampling.end=2 is out of range"),
        ("data: {paths: a, split: {by: 3}}", "data.split.by=3 is not text"),
        (
            "data: {paths: a, preprocessing: {normalize: none}}",
            "data.preprocessing.normalize='none' is not supported: ",
        ),
        ("data: {paths: a, preprocessing: {normalize: scran}}", "data.preprocessing.normalize='scran' is not suppo"),
        (
            "data: {paths: a, preprocessing: {normalize: cpm}}",
            "data.preprocessing.normalize='cpm' is not known (known: ",
        ),
        ("data: {paths: a, preprocessing: {log1p: false}}", "data.preprocessing.log1p=False is not supported: "),
        ("data: {paths: a, preprocessing: {log1p: 3}}", "data.preprocessing.log1p=3 is not true or false."),
        ("data: {paths: []}", "data.paths=[] is empty."),
        ("data: {paths: ['']}", "data.paths[0]='' is empty."),
        ("data: {paths: [7]}", "data.paths[0]=7 is not text; put it in quotes."),
        ("data: {paths: {a: b}}", "data.paths={'a': 'b'} is not a list."),
        ("data: {layer: counts}", "data.paths is missing; "),
        (
            "tokenizer: {masking: {mask_token_prob: 1.0}}",
            "tokenizer.masking.random_token_prob=0.1 and mask_token_prob=",
        ),
        ("training: {devices: 0}", "training.devices=0 is neither a number of devices"),
        ("output: {embedding: x.csv}", "output.embedding='x.csv' is not the name of an h5ad file; "),
        ("seed: -1", "seed=-1 is out of range; it must be at least 0."),
        ('"a\\nb": 1', "'a\\nb'=1 is not a known option ("),
    ],
)
def test_mistakes_in_the_content(load: Load, content: str, start: str) -> None:
    if not content.startswith("data"):
        content = DATA + content
    assert message(load, content).startswith(start)


def test_data_is_required(load: Load) -> None:
    assert message(load, "seed: 1").startswith("data is missing; ")


def test_further_mistakes_are_counted(load: Load) -> None:
    text = message(load, DATA + "training: {batch_size: abc, max_epochs: 0, x: 1}")
    assert text == "training.batch_size='abc' is not an integer (and 2 more options cannot be used)."


def test_long_values_are_cut(load: Load) -> None:
    assert len(message(load, DATA + f"seed: [{'1, ' * 5000}1]")) < 100
    assert len(message(load, DATA + f"seed: {'x' * 50000}")) < 200
    assert "is not a value of type int" in message(load, DATA + f"seed: {'9' * 5000}")


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("data: [", "recipe.yaml, line 1, column 8 is not valid YAML: "),
        ("data: a\n b: c", "line 2, column 3 is not valid YAML: "),
        ("\tdata: a", "line 1, column 1 is not valid YAML: "),
        ("data: {paths: a}\ndata: {paths: b}", "line 2, column 1 is not valid YAML: the key 'data' stands twice"),
        ("data: {paths: a, paths: b}", "line 1, column 18 is not valid YAML: the key 'paths' stands twice"),
        ("seed: !!python/object/apply:os.getcwd []", "line 1, column 7 is not valid YAML: could not determine"),
        ("seed: 2024-13-01", "line 1, column 7 is not valid YAML: '2024-13-01' is not a value of type timestamp"),
        ("seed: !!timestamp x", "'x' is not a value of type timestamp"),
        ("? [1, 2]\n: 3", "unhashable key"),
        ("seed: 1\n---\nseed: 2", "line 2, column 1 is not valid YAML: expected a single document"),
        ("[" * 5000, "nested too deeply"),
        (b"\x00", "character 1 is not valid YAML: special characters are not allowed: #x0000"),
        (b"\x89HDF\r\n\xff", "is not a text file; name a YAML file."),
        ("", "is empty; "),
        ("# nothing\n", "is empty; "),
        ("- a\n- b", "holds ['a', 'b'] instead of sections"),
        ("text", "holds 'text' instead of sections"),
        ("&a {data: *a}", "data.paths is missing"),
    ],
)
def test_mistakes_in_the_file(load: Load, content: str | bytes, part: str) -> None:
    assert part in message(load, content)


def test_mistakes_in_the_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml' does not exist; check the path\.$"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"is a folder; name the YAML file in it\.$"):
        load_config(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot be read: embedded null byte\.$"):
        load_config("a\0b")


def test_a_byte_order_mark_is_no_mistake(load: Load) -> None:
    assert load(b"\xef\xbb\xbf" + DATA.encode()).data.paths == ["cells.h5ad"]


def test_overrides(load: Load) -> None:
    config = load(
        TUTORIAL,
        "training.batch_size=8",
        "training.lr=1e-5",
        "training.optimizer={weight_decay: 0.5}",
        "data.paths=[a.h5ad, b.h5ad]",
        "output.log_dir=",
        "model.latent_dim=16",
        "seed=1",
        "seed=2",
    )
    assert config.training.batch_size == 8
    assert (config.training.optimizer.lr, config.training.optimizer.weight_decay) == (1e-5, 0.5)
    assert config.data.paths == ["a.h5ad", "b.h5ad"]
    assert config.output.log_dir is None
    assert config.model.user_options()["latent_dim"] == 16
    assert config.seed == 2
    assert config.training.max_epochs == 50


def test_an_override_takes_the_place_of_an_alias_in_the_file(load: Load) -> None:
    assert load(PROPOSAL, "training.optimizer.lr=0.5").training.optimizer.lr == 0.5
    assert load(PROPOSAL, "training.lr=0.5").training.optimizer.lr == 0.5
    assert load(PROPOSAL, "training.num_gpus=1").training.devices == 1


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("training.batch_size", "override='training.batch_size' is not an option; write it as section.option=value."),
        ("=3", "write it as section.option=value."),
        ("training..lr=3", "write it as section.option=value."),
        ("training.batch_size=[", "override 'training.batch_size=[', line 1, column 2 is not valid YAML: "),
        ("training.max_epoch=3", "did you mean 'training.max_epochs'?"),
        ("data.paths.x=3", "data.paths='cells.h5ad' is not a section with options."),
        ("data=3", "data=3 is not a section with options."),
        ("training.strategy=ddp", "is not supported yet"),
    ],
)
def test_mistakes_in_an_override(load: Load, override: str, part: str) -> None:
    assert part in message(load, DATA, override)


@pytest.mark.parametrize("content", [TUTORIAL, PROPOSAL, DATA, DATA + "training:\nseed: 4\n"])
def test_dump_and_load_again(load: Load, content: str) -> None:
    config = load(content)
    again = load(dump_config(config))
    assert again == config
    assert again.user_set() == config.user_set()
    assert dump_config(again) == dump_config(config)


_plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8"))
_free = st.dictionaries(
    st.from_regex(r"opt_[a-z]{1,4}", fullmatch=True), _plain | st.lists(_plain, max_size=3), max_size=4
)


@st.composite
def _configs(draw: Any) -> Config:
    sections: dict[str, Any] = {
        "data": {"paths": draw(st.lists(st.text(st.characters(codec="utf-8"), min_size=1), min_size=1, max_size=3))},
        "model": draw(_free) | draw(st.sampled_from([{}, {"hidden_dim": 64}, {"architecture": None}])),
        "tokenizer": draw(_free) | draw(st.sampled_from([{}, {"masking": {}}, {"masking": {"mask_ratio": 0.5}}])),
        "training": draw(st.sampled_from([{}, {"lr": 1e-7}, {"devices": "0,1"}, {"optimizer": {"lr": 3e22}}])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    kept = draw(st.sets(st.sampled_from(["model", "tokenizer", "training", "seed"])))
    return Config(**{name: content for name, content in sections.items() if name in kept | {"data"}})


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029", "\n"])
def test_line_breaks_survive_writing(load: Load, mark: str) -> None:
    config = Config(data={"paths": [f"a{mark}b", mark]})
    assert load(dump_config(config)) == config


@settings(deadline=None, max_examples=60)
@given(config=_configs())
def test_every_configuration_survives_writing(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    path = tmp_path_factory.mktemp("config") / "any.yaml"
    path.write_text(dump_config(config), encoding="utf-8", newline="")
    again = load_config(path)
    assert again == config
    assert again.user_set() == config.user_set()


def test_dump_refuses_what_a_file_cannot_hold() -> None:
    with pytest.raises(ConfigError, match="value of type object"):
        dump_config(Config(data={"paths": "a.h5ad"}, model={"option": object()}))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="holds itself"):
        dump_config(Config(data={"paths": "a.h5ad"}, model={"option": loop}))
