import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from scforge.config import Config, load_config
from scforge.config.load import dump_config
from scforge.errors import ConfigError

DATA = "data: {paths: cells.h5ad}\n"
TUTORIAL = (Path(__file__).parent / "custom_model.yaml").read_text(encoding="utf-8")
PROPOSAL = (Path(__file__).parent / "proposal.yaml").read_text(encoding="utf-8")
LOCAL = "data: {paths: [cells.h5ad], preprocessing: {hvg_selection: 2000}}\n" + PROPOSAL[PROPOSAL.index("tokenizer:") :]
LOCAL = LOCAL[: LOCAL.index("eval:")]

Load = Callable[..., Config]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.chdir(tmp_path)

    def load(content: str | bytes, *overrides: str) -> Config:
        path = Path("recipe.yaml")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_config(path, overrides)

    return load


def told(load: Load, content: str | bytes, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(content, *overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 500
    return text


def message(load: Load, content: str | bytes, *overrides: str) -> str:
    return re.sub(r"^(recipe\.yaml(, lines? [\d and]+)?|override '.*?'): ", "", told(load, content, *overrides))


def test_the_proposal_file(load: Load) -> None:
    config = load(PROPOSAL)
    assert (config.data.source, config.data.organism, config.data.paths) == ("cellxgene_census", "homo_sapiens", None)
    assert config.data.filters == {"tissue": ["lung", "heart", "liver"], "is_primary_data": True}
    assert config.data.preprocessing.user_set() == {"normalize": "library_size", "hvg_selection": 2000}
    assert (config.data.max_genes, config.data.gene_vocab) == (2048, "human_protein_coding")
    assert (config.objective.name, config.tokenizer.masking.mask_ratio) == ("masked_gene_prediction", 0.15)
    assert config.tokenizer.user_options() == {}
    assert config.model.user_options() == {"hidden_dim": 512, "num_layers": 12, "num_heads": 8}
    training = config.training
    assert (training.accelerator, training.devices, training.strategy) == ("gpu", 4, "ddp")
    assert training.optimizer.lr == 1e-4
    assert config.eval.every_n_epochs == 2
    assert config.eval.benchmarks == [
        {"cell_type_annotation": {"dataset": "tabula_sapiens"}},
        {"batch_integration": {"dataset": "immune_atlas"}},
    ]


def test_every_section(load: Load) -> None:
    content = """
data: {source: local, paths: [s3://bucket/store.zarr, "cells/*.h5ad"], modality: rna, memory: 16GB, cache: store.zarr,
  storage_options: {anon: true, client_kwargs: {endpoint_url: "http://127.0.0.1"}}, split: {by: donor_id},
  sampling: {balance_key: cell_type, warmup_epochs: 3, start: 0, end: 0.5}, obs: donor_id, num_workers: 2,
  pin_memory: false}
training: {batch_size: auto, num_nodes: 2, precision: auto, accumulate_grad_batches: 4, gradient_checkpointing: true,
  compile: true, ema_decay: 0.999, log_every_n_steps: 5, checkpoint_every_n_steps: 100, optimizer: {name: muon},
  max_tokens_per_batch: 8192}
output: {log_dir: logs, loggers: [csv, wandb], project: p, run_name: r, wandb_mode: offline, keep_last: 3}
eval: {benchmarks: label_prediction, datasets: {a: a.h5ad}}
"""
    config = load(content)
    expected = yaml.safe_load(content)
    data, training = expected["data"], expected["training"]
    data |= {"obs_columns": [data.pop("obs")], "num_threads": data.pop("num_workers")}
    data["max_tokens_per_batch"] = training.pop("max_tokens_per_batch")
    expected["eval"]["benchmarks"] = ["label_prediction"]
    assert config.user_set() == expected
    assert load(content, "eval.benchmarks=[]").eval.benchmarks == []


LINES = """data:
  paths: a.h5ad

model:
  num_layers: 0
training:
  lr: fast          # an alias
  batch_size: 8
  optimizer: {weight_decay: 0.1}
output:
  log_dir: logs
  loggers:
    - csv
    - cvs
"""
LAYERS, RATE = ("layers: 0", "layers: 1"), ("fast", "1")


@pytest.mark.parametrize(
    ("changes", "overrides", "start"),
    [
        ([], [], "recipe.yaml, line 5: model.num_layers=0 must be at least 1"),
        (
            [LAYERS],
            [],
            "recipe.yaml, line 7: training.optimizer.lr='fast' is not a number",
        ),
        ([LAYERS], ["training.lr=1"], "recipe.yaml, line 14: output.loggers[1]='cvs' is not known"),
        ([LAYERS, RATE], ["output.loggers=[cvs]"], "override 'output.loggers=[cvs]': output.loggers[0]='cvs' is not"),
        ([LAYERS], ["training={lr: x}", "seed=1"], "override 'training={lr: x}': training.optimizer.lr='x' is not"),
        ([LAYERS], ["training.optimizer.lr.x=1"], "recipe.yaml, line 7: training.optimizer.lr must be a section"),
        ([("{", "{lr: 2, ")], [], "recipe.yaml, lines 7 and 9: training.lr='fast' and training.optimizer.lr=2 set the"),
        ([], ["training.num_gpus=x"], "override 'training.num_gpus=x': training.num_gpus='x' is not a number of GPUs"),
        ([("paths", "layer")], [], "recipe.yaml, line 1: data.paths is missing"),
        ([LAYERS, ("output", "finetune")], [], "recipe.yaml, line 10: finetune.base_model is missing; "),
        ([(LINES[:24], "")], [], "recipe.yaml: data is missing"),
    ],
)
def test_mistakes_have_a_place(load: Load, changes: list[tuple[str, str]], overrides: list[str], start: str) -> None:
    content = LINES
    for old, new in changes:
        content = content.replace(old, new, 1)
    assert told(load, content, *overrides).startswith(start)


def test_merged_keys_have_the_line_of_where_they_stand(load: Load) -> None:
    content = DATA + "training: &a\n  max_steps: x\noutput:\n  <<: {save_top_k: x}\n  keep_last: 2\n"
    assert told(load, content).startswith("recipe.yaml, line 3: training.max_steps='x'")
    assert told(load, content, "training.max_steps=1").startswith("recipe.yaml, line 5: output.save_top_k='x'")


def test_many_aliases_are_refused_at_once(load: Load) -> None:
    levels = "".join(f"    l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 30))
    content = f"{DATA}model:\n  any:\n    l0: &l0 [x]\n{levels}training: {{max_steps: x}}\n"
    assert told(load, content).startswith("recipe.yaml is not valid YAML: it has more than 100,000 keys and values")


@pytest.mark.parametrize("number", ["1e-4", "1.e-4", ".1e-3", "+1E-4", "'1e-4'"])
def test_numbers_with_an_exponent_are_numbers(load: Load, number: str) -> None:
    config = load(f"{DATA}training: {{lr: {number}}}\nmodel: {{temperature: 1e-4, label: 1e-4b}}\n")
    assert config.training.optimizer.lr == 1e-4
    assert config.model.user_options() == {"temperature": 1e-4, "label": "1e-4b"}


TUNE = "finetune: {base_model: a, task: b, "


@pytest.mark.parametrize(
    ("content", "start"),
    [
        ("batch_size: 3", "batch_size=3 is not a known option; did you mean 'training.batch_size'? (a config"),
        ("training: {zzz: 1}", "training.zzz=1 is not a known option (training has: 'batch_size', "),
        ("training: {max_epochs: 1.5}", "training.max_epochs=1.5 is not a whole number"),
        ("training: {max_epochs: yes}", "training.max_epochs=True is not a number."),
        ("training: {batch_size: yes}", "training.batch_size=True must be a whole number of cells, or 'auto'"),
        ("training: {lr: .nan}", "training.optimizer.lr=nan must be a finite number"),
        ("training: {early_stopping: 3}", "training.early_stopping=3 must be true or false"),
        ("training: 5", "training=5 must be a section with options."),
        ("training: {1: 2}", "training has the key 1, which is not the name of an option."),
        ("model: {1: 2}", "model has the key 1, which is not the name of an option."),
        ("eval: {every_n_epochs: 2}", "eval.every_n_epochs=2 has no effect without eval.benchmarks; "),
        ("eval: {benchmarks: 3}", "eval.benchmarks=3 is not a list of benchmarks."),
        ("eval: {benchmarks: [{a: {}, b: {}}]}", "eval.benchmarks=[{'a': {}, 'b': {}}] contains an item that is no"),
        (TUNE + "freeze: 0}", "finetune.freeze=0 must be true, false or a number"),
        (TUNE + "lora: 8}", "finetune.lora=8 must be true, false or a section"),
        (TUNE + "test_size: 0.9}", "finetune.test_size=0.9 and validation_size=0.1 leave"),
        (TUNE + "evaluate: 3}", "finetune.evaluate=3 must be true, false or the name"),
        (TUNE + "split_by: c, split_key: d}", "finetune.split_key='d' has no effect with split_by='c'; keep one"),
        (TUNE + "data: b.h5ad}", "finetune.data='b.h5ad' and data.paths='cells.h5ad' set"),
        ("output: {loggers: csv}", "output.loggers='csv' has no effect without output.log_dir, "),
        ("output: {log_dir: a, project: b}", "output.project='b' has no effect without a logger that supports it; add"),
        ("data: {source: s3, paths: a}", "data.source='s3' is not known (known: 'local', 'cellxgene_census')."),
        (
            "data: {source: cellxgene_census, paths: a}",
            "data.paths='a' has no effect with data.source='cellxgene_census'",
        ),
        (
            "data: {paths: a, organism: x}",
            "data.organism='x' has no effect without data.source='cellxgene_census'; set ",
        ),
        ("data: {source: cellxgene_census, modality: rna}", "data.modality='rna' has no effect without data.source="),
        ("data: {source: cellxgene_census, filters: [a]}", "data.filters=['a'] must be columns with their values"),
        ("data: {paths: a, memory: yes}", "data.memory=True must be an amount of memory"),
        ("data: {paths: a, sampling: {start: 0.5}}", "data.sampling.start=0.5 has no effect without balance_key"),
        ("data: {paths: a, split: {by: 3}}", "data.split.by=3 is not text"),
        ("data: {paths: a, preprocessing: {normalize: none, target_sum: 9}}", "data.preprocessing.target_sum=9 has no"),
        ("data: {paths: a, preprocessing: {normalize: scran}}", "data.preprocessing.normalize='scran' is not suppo"),
        ("data: {paths: []}", "data.paths=[] is empty"),
        ("data: {paths: [7]}", "data.paths[0]=7 is not text; put the value in quotes."),
        ("data: {paths: {a: b}}", "data.paths={'a': 'b'} is not a list"),
        ("tokenizer: {masking: {mask_token_prob: 1.0}}", "tokenizer.masking.random_token_prob=0.1 and mask_token_"),
        ("training: {devices: 0}", "training.devices=0 must be a number of devices"),
        ("output: {embedding: x.csv}", "output.embedding='x.csv' is not the name of an h5ad file; "),
        ('"a\\nb": 1', "'a\\nb'=1 is not a known option ("),
        (
            "training: {max_steps: abc, validation_size: 2, x: 1}",
            "training.max_steps='abc' is not a whole number",
        ),
    ],
)
def test_mistakes_in_the_content(load: Load, content: str, start: str) -> None:
    if not content.startswith("data"):
        content = DATA + content
    assert message(load, content).startswith(start)


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ("data: [", r"recipe\.yaml, line 1, column 8 is not valid YAML: "),
        ("data: a\n b: c", "line 2, column 3 is .*; check the indentation, and quote text that contains ': '."),
        ("data:\n  paths: a\n layer: b", "line 3, column 2 is .*: the keys of one section start in the same column."),
        ("data:\n\tpaths: a", "cannot start any token; indent with spaces, never with tab characters."),
        ("data: {paths: a}\ndata: {paths: b}", "line 2, column 1 is not valid YAML: the key 'data' occurs twice"),
        ("seed: !!python/object/apply:os.getcwd []", "line 1, column 7 is not valid YAML: could not determine"),
        ("seed: 2024-13-01", "line 1, column 7 is not valid YAML: '2024-13-01' is not a value of type timestamp"),
        ("? [1, 2]\n: 3", "unhashable key"),
        ("[" * 5000, "recipe.yaml is not valid YAML: brackets or sections are nested too deeply"),
        (b"\x00", "character 1 is not valid YAML: special characters are not allowed: #x0000"),
        (b"\x89HDF\r\n\xff", "cannot be read: 'utf-8' codec.*; pass a YAML or TOML file."),
        ("# nothing\n", "is empty; "),
        ("- a\n- b", r"contains \['a', 'b'\] instead of sections"),
        ("&a {data: *a}", "is not valid YAML: it is nested more than 50 deep, or a part contains itself."),
    ],
)
def test_mistakes_in_the_file(load: Load, content: str | bytes, pattern: str) -> None:
    assert re.search(pattern, message(load, content))


def test_mistakes_in_the_path_and_a_byte_order_mark(load: Load) -> None:
    for path, words in [(".", "cannot be read: Is a directory"), ("a\0b", "cannot be read: embedded null byte")]:
        with pytest.raises(ConfigError, match=words):
            load_config(path)
    assert load(b"\xef\xbb\xbf" + DATA.encode()).data.paths == ["cells.h5ad"]
    assert len(message(load, DATA + f"seed: {'x' * 50000}")) < 200
    assert "is not a value of type int" in message(load, DATA + f"seed: {'9' * 5000}")


def test_overrides(load: Load) -> None:
    options = ["training.batch_size=8", "training.lr=1e-5", "training.optimizer={weight_decay: 0.5}", "seed=1"]
    config = load(TUTORIAL, *options, "data.paths=[a.h5ad, b.h5ad]", "output.log_dir=", "model.latent_dim=16", "seed=2")
    assert (config.training.batch_size, config.training.max_epochs) == (8, 50)
    assert (config.training.optimizer.lr, config.training.optimizer.weight_decay) == (1e-5, 0.5)
    assert config.data.paths == ["a.h5ad", "b.h5ad"]
    assert config.output.log_dir is None
    assert config.model.user_options()["latent_dim"] == 16
    assert config.seed == 2
    assert load(LOCAL, "training.optimizer.lr=0.5").training.optimizer.lr == 0.5
    assert load(LOCAL, "training.lr=0.5").training.optimizer.lr == 0.5
    assert load(LOCAL, "training.num_gpus=1").training.devices == 1


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("training.batch_size", "override='training.batch_size' is not an option; write it as section.option=value."),
        ("training..lr=3", "write it as section.option=value."),
        ("training.batch_size=[", "override 'training.batch_size=[', line 1, column 2 is not valid YAML: "),
        ("data.paths.x=3", "data.paths must be a section of options, but is 'cells.h5ad'."),
        ("task=annotation", "task='annotation' is not a known option; did you mean 'finetune.task'?"),
    ],
)
def test_mistakes_in_an_override(load: Load, override: str, part: str) -> None:
    assert part in message(load, DATA, override)


_text = st.characters(codec="utf-8", exclude_characters="\0")
_whole = st.integers(-(2**63) + 1, 2**63 - 1)
_plain = st.none() | st.booleans() | _whole | st.floats(allow_nan=False) | st.text(_text)
_free = st.dictionaries(
    st.from_regex(r"opt_[a-z]{1,4}", fullmatch=True), _plain | st.lists(_plain, max_size=3), max_size=4
)


@st.composite
def _configs(draw: Any) -> Config:
    sections: dict[str, Any] = {
        "data": {"paths": draw(st.lists(st.text(_text, min_size=1), min_size=1, max_size=3))},
        "model": draw(_free) | draw(st.sampled_from([{}, {"hidden_dim": 64}, {"architecture": None}])),
        "tokenizer": draw(_free) | draw(st.sampled_from([{}, {"masking": {}}, {"masking": {"mask_ratio": 0.5}}])),
        "training": draw(st.sampled_from([{}, {"lr": 1e-7}, {"devices": "0,1"}, {"optimizer": {"lr": 3e22}}])),
        "seed": draw(st.integers(0, 2**32 - 1)),
    }
    kept = draw(st.sets(st.sampled_from(["model", "tokenizer", "training", "seed"])))
    return Config(**{name: content for name, content in sections.items() if name in kept | {"data"}})


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


TOML = """
seed = 3
[data]
paths = ["cells.h5ad"]
preprocessing.hvg_selection = 2_000

[tokenizer]
gene_vocab = 'human_protein_coding' # another name
[training]
batch_size = 64
num_gpus = 4
lr = 1e-4
"""


def test_toml_means_what_yaml_means(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "{seed: 3, data: {paths: [cells.h5ad], preprocessing: {hvg_selection: 2000}}, "
        "tokenizer: {gene_vocab: human_protein_coding}, "
        "training: {batch_size: 64, max_epochs: 10, num_gpus: 4, lr: 1e-4}}"
    )
    (tmp_path / "a.toml").write_text(TOML)
    one, other = load_config(tmp_path / "a.yaml"), load_config(tmp_path / "a.toml", ["training.max_epochs=10"])
    assert one == other
    assert dump_config(one) == dump_config(other)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("batch_size", "btach_size", r"a.toml: training\.btach_size=64 is not a known option; did you mean"),
        ("batch_size = 64", "batch_size = ", r"a.toml is not valid TOML: Invalid value .at line 10, column 14.\."),
        ("num_gpus = 4", "optimizer = {lr = 2}", r"a.toml: training.lr=.* and training.optimizer.lr="),
    ],
)
def test_mistakes_in_toml(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(tmp_path / "a.toml")
    assert "\n" not in str(caught.value)
