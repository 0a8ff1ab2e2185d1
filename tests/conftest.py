"""Fixtures that several test files share."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anndata as ad
import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import settings
from scipy import sparse
from torch import nn

import scforge
from scforge.cli import main
from scforge.config.schema import ModelConfig
from scforge.data import GeneVocab, convert
from scforge.models import register_model
from scforge.models.components import GeneExpressionEmbedding, MaskedGenePredictionHead, mean_pool
from scforge.models.protocol import ModelOutput
from scforge.models.registry import MODELS

if TYPE_CHECKING:
    from scforge.estimators import Encoder

N_CELLS, N_GENES = 60, 80

# Tests of properties take these many examples; make test-all takes the thorough profile.
settings.register_profile("quick", max_examples=25)
settings.register_profile("thorough", max_examples=100)
settings.load_profile("quick")

# Tensors are tiny here: threads would wait for each other longer than they work.
torch.set_num_threads(1)

LIGHT = {"n_top_genes": 40, "hidden_dim": 8, "ffn_dim": 8, "latent_dim": 4}
TRANSFORMER = {"hidden_dim": 8, "num_layers": 1, "num_heads": 2, "ffn_dim": 16}


def pytest_configure(config: pytest.Config) -> None:
    """Let tests train on a few cells; those of the warning ask for it."""
    config.addinivalue_line("filterwarnings", "ignore:The model is trained on .* cells, which are too few")


@pytest.fixture(scope="session", autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """Listen to Ctrl-C, which a shell that starts the tests in the background turns off, here and in what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tiny_adata() -> ad.AnnData:
    """60 cells x 80 genes of whole-numbered counts: in group "a" the first ten genes are high, in "b" the last ten."""
    generator = np.random.default_rng(0)
    group = np.arange(N_CELLS) % 2
    mean = np.full((N_CELLS, N_GENES), 0.5)
    mean[group == 0, :10] = 6.0
    mean[group == 1, -10:] = 6.0
    obs = pd.DataFrame(
        {"group": pd.Categorical(np.where(group == 0, "a", "b")), "batch": pd.Categorical(["x"] * 30 + ["y"] * 30)},
        index=[f"cell{i}" for i in range(N_CELLS)],
    )
    var = pd.DataFrame(
        {"ensembl": [f"ENSG{i:011d}" for i in range(N_GENES)], "length": np.arange(N_GENES)},
        index=[f"gene{i}" for i in range(N_GENES)],
    )
    return ad.AnnData(sparse.csr_matrix(generator.poisson(mean).astype(np.float32)), obs=obs, var=var)


@pytest.fixture
def tiny_vocab(tiny_adata: ad.AnnData) -> GeneVocab:
    """All genes of `tiny_adata`, with medians and entropies that are not powers of anything."""
    medians = np.random.default_rng(1).uniform(0.5, 20.0, N_GENES)
    entropies = np.random.default_rng(2).uniform(0.3, 0.9, N_GENES)
    return GeneVocab.from_adata(tiny_adata).with_medians(medians).with_entropies(entropies)


@pytest.fixture
def folder(tiny_adata: ad.AnnData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the cells of `tiny_adata`; test files add what they need besides."""
    monkeypatch.chdir(tmp_path)
    tiny_adata.write_h5ad("cells.h5ad")
    return tmp_path


@pytest.fixture
def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs a command in `folder` which must fail, and returns the one line that it tells."""

    def told(*argv: str) -> str:
        try:
            code = main(list(argv))
        except SystemExit as stop:  # argparse leaves this way
            code = stop.code
        shown = capsys.readouterr()
        assert (code, shown.out) == (2, "")
        assert shown.err.startswith("scforge")
        assert shown.err.endswith("\n")
        assert shown.err.count("\n") == 1
        return shown.err.strip()

    return told


@pytest.fixture(scope="session")
def hub_server() -> Any:
    """The module of the hub on this machine, tests/hub/hub_server.py."""
    spec = importlib.util.spec_from_file_location("hub_server", Path(__file__).parent / "hub" / "hub_server.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["hub_server"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(hub_server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A hub on this machine, and a cache of its own; who sends owns all repositories."""
    from huggingface_hub import constants

    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "SCFORGE_MODELS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # another protocol, for large files
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)  # it asks the real hub
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    with hub_server.serve() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)  # which it read when it was imported
        template = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)  # for other processes
        monkeypatch.setenv("HF_TOKEN", hub_server.WRITER)
        yield hub
    assert not hub.errors


@pytest.fixture(scope="session")
def pbmc() -> ad.AnnData:
    """PBMC 3k; a test that changes it works on a copy."""
    return scforge.datasets.pbmc3k()


@pytest.fixture(scope="session")
def many_adata() -> ad.AnnData:
    """700 cells x 80 genes like `tiny_adata`, with 9 donors, and a class that one cell of twenty is of."""
    generator = np.random.default_rng(5)
    n_cells = 700
    group = np.arange(n_cells) % 2
    mean = np.full((n_cells, N_GENES), 0.5) * generator.uniform(0.2, 2.0, (n_cells, 1))
    mean[group == 0, :10] = 6.0
    mean[group == 1, -10:] = 6.0
    obs = pd.DataFrame(
        {
            "group": pd.Categorical(np.where(group == 0, "a", "b")),
            "donor": pd.Categorical([f"d{i}" for i in generator.integers(9, size=n_cells)]),
            "kind": pd.Categorical(np.where(np.arange(n_cells) % 20 == 0, "rare", "common")),
            "depth": generator.random(n_cells),
        },
        index=[f"cell{i}" for i in range(n_cells)],
    )
    var = pd.DataFrame(index=[f"gene{i}" for i in range(N_GENES)])
    return ad.AnnData(sparse.csr_matrix(generator.poisson(mean).astype(np.float32)), obs=obs, var=var)


@pytest.fixture(scope="session")
def store(many_adata: ad.AnnData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the cells of `many_adata`, shuffled, in three datasets that end within a chunk; not to be changed."""
    path = tmp_path_factory.mktemp("stores") / "store.zarr"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("scforge.data.conversion.dataset_size", lambda *_: 234)
        convert(many_adata, path, progress=False)
    return path


@pytest.fixture
def tiny_config() -> ModelConfig:
    """Return the options that every architecture shares."""
    return ModelConfig(vocab_size=100, hidden_dim=32, num_layers=2, dropout=0.0, max_seq_len=64)


@pytest.fixture
def dummy_batch() -> dict[str, torch.Tensor]:
    """Four cells of 16 tokens, the last two padded; three labeled positions in each."""
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(4, 100, (4, 16), generator=generator)
    attention_mask = torch.ones(4, 16, dtype=torch.long)
    input_ids[:, 0] = 3
    attention_mask[2:, 12:] = 0
    input_ids[2:, 12:] = 0
    labels = torch.full((4, 16), -100)
    labels[:, 2:5] = input_ids[:, 2:5]
    masked_positions = labels != -100
    values = torch.rand(4, 16, generator=generator) * (attention_mask == 1)
    return {
        "input_ids": input_ids.masked_fill(masked_positions, 2),
        "attention_mask": attention_mask,
        "values": values.masked_fill(masked_positions, 0.0),
        "labels": labels,
        "masked_positions": masked_positions,
    }


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


@pytest.fixture
def quick() -> dict:
    return {"max_epochs": 2, "batch_size": 16, "progress_bar": False, "accelerator": "cpu"}


@pytest.fixture
def build(tiny_adata: ad.AnnData) -> Callable[..., Encoder]:
    from scforge.estimators import Encoder  # tests of data need no model classes

    def build(architecture=None, *parts, adata=None, setup=None, **options) -> Encoder:
        adata = tiny_adata if adata is None else adata
        Encoder.setup_anndata(adata, **(setup or {}))
        small = {None: LIGHT, "transformer_encoder": TRANSFORMER}.get(architecture, {})
        return Encoder(adata, architecture, *parts, **(small | options))

    return build


@pytest.fixture
def trained(build: Callable[..., Encoder], quick: dict) -> Callable[..., Encoder]:
    def trained(*args, train=None, **options) -> Encoder:
        model = build(*args, **options)
        model.train(**(quick | (train or {})))
        return model

    return trained


@pytest.fixture
def model(trained: Callable[..., Encoder]) -> Encoder:
    return trained(setup={"labels_key": "group"})


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of a light model, ``plain``, of a transformer, ``base``, and of adapters on it; do not change them."""
    from scforge.estimators import Encoder

    group = np.arange(40) % 2
    mean = np.full((40, 40), 0.5)
    mean[group == 0, :10], mean[group == 1, -10:] = 6.0, 6.0
    obs = pd.DataFrame({"group": pd.Categorical(np.where(group, "b", "a"))}, index=[f"cell{i}" for i in range(40)])
    counts = np.random.default_rng(0).poisson(mean).astype(np.float32)
    cells = ad.AnnData(counts, obs=obs, var=pd.DataFrame(index=[f"gene{i}" for i in range(40)]))
    options = {"max_epochs": 1, "batch_size": 16, "progress_bar": False, "accelerator": "cpu", "num_threads": 0}
    Encoder.setup_anndata(cells, labels_key="group")
    plain = Encoder(cells, n_top_genes=24, hidden_dim=8, ffn_dim=8, latent_dim=4)
    base = Encoder(cells, "transformer_encoder", n_top_genes=24, hidden_dim=8, num_layers=1, num_heads=2, ffn_dim=8)
    for model in (plain, base):
        model.train(**options)
    adapted = base.finetune("annotation", cells, labels_key="group", lora={"r": 2}, **(options | {"lr": 1e-2}))
    folder = tmp_path_factory.mktemp("saved")
    plain.save(folder / "plain")
    base.save(folder / "base")
    adapted.save(folder / "adapter", adapter_only=True)
    return folder


@pytest.fixture
def custom_architecture() -> Iterator[str]:
    """An architecture that a user registers in one file, in the manner of the tutorial on custom models."""

    @register_model("my_pooling")
    class MyPooling(nn.Module):
        def __init__(self, vocab_size: int, hidden_dim: int, num_layers: int = 2, dropout: float = 0.1) -> None:
            super().__init__()
            self.embedding = GeneExpressionEmbedding(vocab_size=vocab_size, hidden_dim=hidden_dim, dropout=dropout)
            self.layers = nn.ModuleList([nn.Linear(hidden_dim, hidden_dim) for _ in range(num_layers)])
            self.head = MaskedGenePredictionHead(hidden_dim=hidden_dim, vocab_size=vocab_size)

        def forward(self, input_ids, attention_mask, values=None, labels=None, **kwargs) -> ModelOutput:
            hidden = self.embedding(input_ids, values=values)
            for layer in self.layers:
                hidden = hidden + layer(hidden)
            logits, loss = self.head(hidden), None
            if labels is not None:
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            return ModelOutput(loss=loss, logits=logits, embeddings=mean_pool(hidden, attention_mask))

        def encode(self, input_ids, attention_mask, values=None, **kwargs) -> torch.Tensor:
            return self.forward(input_ids, attention_mask, values).embeddings

        @classmethod
        def from_config(cls, config: ModelConfig) -> nn.Module:
            return cls(config.vocab_size, config.hidden_dim, num_layers=config.num_layers, dropout=config.dropout)

    yield "my_pooling"
    MODELS._entries.pop("my_pooling")
