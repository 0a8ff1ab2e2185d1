"""The examples of the reference of models, each run as it is written. By default three run with fewer cells."""

import ast
import re
import runpy
from pathlib import Path

import pytest
import torch

from scforge.models.registry import MODELS

EXAMPLES = Path(__file__).with_name("examples_models_reference")
FEWER_CELLS = {"autoregressive_transformer": 8, "masked_autoencoder": 16, "transformer_encoder": 16}
"""Cells of each batch of an example; by default 2 take their place."""
SCALAR = r"tensor\(-?\d+\.\d+, grad_fn=<\w+>\)"
EMPTY = "tensor(0., grad_fn=<MaxBackward1>)"
COUNTED = ["Total parameters", "Trainable parameters", "Trainable after freezing embedding"]
DIMENSIONS = "Encoder dim: 768, Decoder dim: 384"

# What each print writes; the comments of the examples say it too, but for numbers that depend on the seed.
PRINTED: dict[str, list[str]] = {
    "autoregressive_transformer": [SCALAR, "torch.Size([8, 200, 5000])", "torch.Size([8, 512])"],
    "bin_prediction_head": ["torch.Size([8, 200, 51])"],
    "cls_pool": ["torch.Size([8, 512])"],
    "count_parameters": [rf"{what}: [\d,]+" for what in COUNTED],
    "expression_prediction_head": ["torch.Size([16, 300])"],
    "gene_expression_embedding": ["torch.Size([8, 256, 512])"] * 2,
    "generate_causal_mask": [
        "tensor([[0., -inf, -inf, -inf, -inf],",
        " [0., 0., -inf, -inf, -inf],",
        " [0., 0., 0., -inf, -inf],",
        " [0., 0., 0., 0., -inf],",
        " [0., 0., 0., 0., 0.]])",
    ],
    "get_model": ["TransformerEncoder", "AutoregressiveTransformer"],
    "init_weights": [r"tensor\(-?\d\S+, grad_fn=<MeanBackward0>\)", SCALAR, EMPTY],
    "list_models": [r"\[.*\]"],
    "masked_autoencoder": [DIMENSIONS, SCALAR, "torch.Size([16, 300])", "torch.Size([16, 768])"],
    "masked_gene_prediction_head": ["torch.Size([4, 128, 5000])"],
    "mean_pool": ["torch.Size([8, 512])"] * 2,
    "model_output": [SCALAR, "torch.Size([4, 128, 5000])", "torch.Size([4, 512])", "None"],
    "register_model": [r"\[.*\]"],
    "transformer_encoder": [r"Model has [\d,]+ parameters", "torch.Size([16, 512])"],
}


def _transformer(names, lines):
    assert lines[0] == f"Model has {names['model'].num_parameters():,} parameters"
    assert all(p.grad is not None for p in names["model"].parameters())


def _counted(names, lines):
    total, before, after = (int(line.split(": ")[1].replace(",", "")) for line in lines)
    assert total == before
    assert before - after == sum(p.numel() for p in names["model"].embedding.parameters())


def _initialised(names, lines):
    assert abs(names["model"].embedding.weight.std() - 0.02) < 1e-3


def _listed(*more):
    def check(names, lines):
        listed = ast.literal_eval(lines[0])
        assert listed == sorted(listed)
        assert {"autoregressive_transformer", "masked_autoencoder", "transformer_encoder", *more} <= set(listed)

    return check


CHECKS = {
    "count_parameters": _counted,
    "init_weights": _initialised,
    "list_models": _listed(),
    "register_model": _listed("my_custom_model"),
    "transformer_encoder": _transformer,
}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setitem(MODELS._entries, "my_custom_model", None)
    monkeypatch.delitem(MODELS._entries, "my_custom_model")


def test_every_example_is_run():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n_cells"),
    [
        *((name, 2 if name in FEWER_CELLS else None) for name in PRINTED),
        *(pytest.param(name, None, marks=pytest.mark.exhaustive) for name in FEWER_CELLS),
    ],
)
def test_example_prints_what_it_promises(name, n_cells, capsys, tmp_path):
    torch.manual_seed(0)
    path, printed = EXAMPLES / f"{name}.py", PRINTED[name]
    if n_cells is not None:
        written = rf"(?<=[(= ]){FEWER_CELLS[name]}(?=, \d)"  # (16, 300), and batch_size, seq_len = 16, 300
        (tmp_path / path.name).write_text(re.sub(written, str(n_cells), path.read_text()))
        path = tmp_path / path.name
        printed = [re.sub(rf"(?<=\[){FEWER_CELLS[name]}(?=, )", str(n_cells), line) for line in printed]
    names = runpy.run_path(str(path))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(printed)
    for line, pattern in zip(lines, printed, strict=True):
        # Releases of torch differ in how they align the columns of a matrix.
        assert re.sub(r"(?<=\[) +| +(?= )", "", line) == pattern or re.fullmatch(pattern, line)
    CHECKS.get(name, lambda *_: None)(names, lines)
    if "loss" in names:
        assert names["loss"].isfinite()
    if name in FEWER_CELLS:
        assert len(names["batch"]["input_ids"]) == (n_cells or FEWER_CELLS[name])
