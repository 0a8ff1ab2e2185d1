"""What a CPU cannot show; make gpu runs it where there is a CUDA device."""

import copy
import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import flop_registry

from scforge.estimators import Encoder
from scforge.models import ScDiVa
from scforge.models.components import TransformerConfig, TransformerStack, transformer
from scforge.training import CellDataModule, make_loggers
from scforge.training.autotune import choose_precision, find_batch_size
from scforge.training.devices import compiled
from scforge.training.monitoring import flops_per_token, peak_flops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
    pytest.mark.filterwarnings("ignore::scforge.errors.ScforgeWarning"),
]
GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"hidden_dim": 32, "num_layers": 2, "num_heads": 2, "dropout": 0.0}
LIGHT = {"hidden_dim": 32, "ffn_dim": 32, "latent_dim": 8, "dropout": 0.0}
GENES = {"architecture": "transformer_encoder", "tokenizer": "rank_value", "objective": "masked_gene_prediction"}
MODELS = {
    "joint_embedding": {"objective": "joint_embedding", **LIGHT},
    "neighbor_denoising": {"objective": "neighbor_denoising", **LIGHT},
    "masked_gene_prediction": {**GENES, **SIZES},
    "next_gene_prediction": {
        "architecture": "autoregressive_transformer",
        "tokenizer": "binned_expression",
        "objective": "next_gene_prediction",
        **SIZES,
    },
    "masked_value_prediction": {
        "architecture": "masked_autoencoder",
        "tokenizer": "binned_expression",
        "objective": "masked_value_prediction",
        **SIZES,
    },
    "masked_diffusion": {
        "architecture": "scdiva",
        "tokenizer": "entropy_ranked",
        "objective": "masked_diffusion",
        **SIZES,
    },
    "variational": SIZES,
}
TRAINING = {"accelerator": GPU.type, "progress_bar": False, "early_stopping": False, "batch_size": 32}


def make(adata, name="masked_gene_prediction", **options):
    front = ScDiVa if name == "variational" else Encoder
    front.setup_anndata(adata, batch_key="donor")
    return front(adata, n_top_genes=60, **MODELS[name] | options)


def bound(model) -> CellDataModule:
    data = CellDataModule(model.open_cells(), validation_size=0.1, batch_size=32)
    data.bind(model.tokenizer, model.spec.build_objective())
    return data


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    one, other = one.detach().double().cpu(), other.detach().double().cpu()
    return float((one - other).norm()) <= tolerance * float(other.norm()) + 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_ways_of_attention_agree(monkeypatch, dtype, causal, rotary):
    torch.manual_seed(0)
    stack = TransformerStack(TransformerConfig(64, 2, 4, dropout=0.0, rotary=rotary))
    hidden, mask = torch.randn(6, 40, 64), torch.arange(40) < torch.tensor([40, 31, 30, 12, 5, 1])[:, None]
    weights = torch.randn(int(mask.sum()), 64)
    wanted = stack(hidden, mask, causal=causal).hidden[mask]
    (wanted * weights).sum().backward()
    gradient = stack.layers[0].attention.qkv.weight.grad.clone()
    kernels = []
    packed = transformer.SelfAttention.packed
    monkeypatch.setattr(transformer.SelfAttention, "packed", lambda *a, **k: (kernels.append(1), packed(*a, **k))[1])
    stack.to(GPU)
    tolerance = 1e-3 if dtype is None else 2e-2
    in_one_row = dtype is not None and torch.cuda.get_device_capability() >= (8, 0)
    for way in ("padded", "in one row", "in groups"):
        stack.unpad = False if way == "padded" else None
        if way == "in groups":
            monkeypatch.setattr(transformer, "_has_varlen_kernel", lambda *given: False)
        kernels.clear()
        stack.zero_grad()
        with torch.autocast(GPU.type, dtype, enabled=dtype is not None):
            found = stack(hidden.to(GPU), mask.to(GPU), causal=causal).hidden[mask.to(GPU)]
        (found * weights.to(GPU)).sum().backward()
        assert bool(kernels) == (way == "in one row" and in_one_row)
        assert close(found, wanted, tolerance), way
        assert close(stack.layers[0].attention.qkv.weight.grad, gradient, 2 * tolerance), way


@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_each_objective_is_that_of_the_cpu(many_adata, name):
    model = make(many_adata[:200].copy(), name)
    data = bound(model)
    module, objective = model.module, data.objective
    batch = next(iter(data.val_dataloader()))
    on_gpu, batch_there = copy.deepcopy(module).to(GPU), {key: value.to(GPU) for key, value in batch.items()}
    module.eval()
    on_gpu.eval()
    with torch.no_grad():
        wanted, figures = objective.loss(module, batch)
        found, others = objective.loss(on_gpu, batch_there)
    assert close(found, wanted, 1e-3)
    assert all(close(others[key], value, 5e-3) for key, value in figures.items())
    # A figure on the CPU would mean that each step waits for the device.
    assert {value.device.type for value in others.values()} <= {GPU.type}
    on_gpu.train()
    for enabled in (False, True):
        on_gpu.zero_grad()
        with torch.autocast(GPU.type, torch.bfloat16, enabled=enabled):
            loss, _ = objective.loss(on_gpu, batch_there)
        loss.backward()
        assert loss.isfinite()
        assert all(p.grad.isfinite().all() for p in on_gpu.parameters() if p.grad is not None)


@pytest.mark.parametrize("unpad", [None, False])
def test_bf16_and_compiled_steps_agree_with_float32(many_adata, unpad):
    model = make(many_adata[:200].copy())
    data = bound(model)
    module = model.module.to(GPU).train()
    module.encoder.unpad = unpad
    gradients = {}
    for precision in (None, torch.bfloat16):
        for wanted in (False, True):
            with compiled(module, wanted):
                for batch in data.train_dataloader():  # of other lengths each: kernels of any length are made
                    batch = {key: value.to(GPU) for key, value in batch.items()}
                    module.zero_grad()
                    with torch.autocast(GPU.type, torch.bfloat16, enabled=precision is not None):
                        data.objective.loss(module, batch)[0].backward()
            gradients[precision, wanted] = module.encoder.layers[0].ffn_in.weight.grad.clone()
    assert close(gradients[None, True], gradients[None, False], 1e-3)
    assert close(gradients[torch.bfloat16, False], gradients[None, False], 5e-2)
    assert close(gradients[torch.bfloat16, True], gradients[None, False], 5e-2)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"precision": "16-mixed"}, {"ema_decay": 0.9}])
def test_a_training_resumes(many_adata, tmp_path, options):
    torch.manual_seed(3)
    before = torch.cuda.get_rng_state() if GPU.type == "cuda" else None
    options = TRAINING | options | {"schedule": "constant", "lr": 1e-3}
    finals = []
    for name, lengths in {"whole": [4], "in parts": [2, 4]}.items():
        for max_epochs in lengths:
            model = make(many_adata[:160].copy(), dropout=0.1)  # numbers drawn on the device have to go on, too
            model.train(max_epochs, checkpoint_dir=tmp_path / name, resume="auto", **options)
        assert model.device.type == GPU.type
        finals.append(model.module.state_dict())
    if before is not None:  # a training leaves the numbers of the user as they were
        assert torch.cuda.get_rng_state().equal(before)
    assert all(close(finals[1][key], value, 1e-3) for key, value in finals[0].items() if value.is_floating_point())


def test_batches_come_from_pinned_memory(many_adata):
    data = bound(make(many_adata[:100].copy()))
    assert data.pin_memory == torch.cuda.is_available()
    batches = list(data.train_dataloader())
    assert all(value.is_pinned() for batch in batches for value in batch.values())
    data.pin_memory = False
    for batch, other in zip(batches, data.train_dataloader(), strict=True):
        assert all(not other[key].is_pinned() and other[key].equal(value) for key, value in batch.items())


def test_sizes_and_precision_are_found(many_adata, monkeypatch):
    model = make(many_adata)
    data = bound(model)
    data.batch_size = None
    supported = torch.cuda.is_bf16_supported(including_emulation=False)
    precision = choose_precision(model.module, data, GPU)
    assert precision == ("bf16-mixed" if supported else "32-true")
    assert find_batch_size(model.module, data, GPU, precision=precision) == 64  # 630 cells in at least 8 steps
    held = torch.cuda.memory_allocated()
    monkeypatch.setattr("scforge.training.autotune._batch", out_of_memory_from(16))
    assert find_batch_size(model.module, data, GPU) == 8
    assert torch.cuda.memory_allocated() <= held
    assert peak_flops(GPU, precision) > 1e11
    batch = {key: value.to(GPU) for key, value in next(iter(data.val_dataloader())).items()}
    model.module.encoder.unpad = False  # devices remove different amounts of padding
    counts = [flops_per_token(model.module.to(device), data.objective, {k: v.to(device) for k, v in batch.items()})
              for device in (GPU, torch.device("cpu"))]  # fmt: skip
    if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry:  # not in torch 2.11
        assert counts[0] == pytest.approx(counts[1], rel=0.1)
    else:
        assert counts[1] < counts[0]  # attention is counted on the GPU alone


def out_of_memory_from(n_cells: int):
    from scforge.training.autotune import _batch

    def batch(data, size, device):
        if size >= n_cells:
            torch.empty(2**50, device=device)
        return _batch(data, size, device)

    return batch


@pytest.mark.parametrize("name", MODELS)
def test_embeddings_are_those_of_the_cpu(many_adata, name):
    adata = many_adata[:120].copy()
    model = make(adata, name)
    wanted = model.get_latent_representation(adata)
    model.module.to(GPU)
    found = model.get_latent_representation(adata)
    np.testing.assert_allclose(found, wanted, atol=1e-3 * np.abs(wanted).max())
    with torch.autocast(GPU.type, torch.bfloat16):
        rough = model.get_latent_representation(adata)
    assert np.corrcoef(rough.ravel(), wanted.ravel())[0, 1] > 0.99


def test_a_whole_training_on_the_device(many_adata, tmp_path):
    model = make(many_adata)
    logger = make_loggers(["csv"], tmp_path)
    options = TRAINING | {"batch_size": "auto", "precision": "auto", "compile": True, "log_every_n_steps": 2}
    model.train(2, logger=logger, **options)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    steps = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    shares = [float(step["utilization"]) for step in steps if step["utilization"]]
    assert shares
    assert all(0 < share < 1.2 for share in shares)
    annotator = model.finetune(task="annotation", labels_key="group", adata=many_adata.copy(), **TRAINING, max_epochs=2)
    assert len(annotator.predict(many_adata.copy())) == len(many_adata)
    model.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model", many_adata.copy())
    np.testing.assert_allclose(again.get_latent_representation(), model.get_latent_representation(), atol=1e-3)


SCRIPT = """
import json, os, sys
import anndata, torch

if torch.cuda.device_count() == 1 and os.environ["SHARED"] == "1":
    torch.distributed.Backend.default_device_backend_map["cuda"] = "gloo"  # NCCL takes a device only once
torch.set_num_threads(1)
from scforge.estimators import Encoder

adata = anndata.read_h5ad(sys.argv[1])
Encoder.setup_anndata(adata)
model = Encoder(adata, n_top_genes=40, **json.loads(sys.argv[2]))
model.train(3, strategy=sys.argv[3], devices=1, num_nodes=2, lr=1e-2, **json.loads(sys.argv[4]))
if os.environ["RANK"] == "0":
    weights = {key: value.cpu() for key, value in model.module.state_dict().items()}
    torch.save({"weights": weights, "device": model.device.type}, sys.argv[5])
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_share_a_training(many_adata, tmp_path, strategy):
    n_gpus = torch.cuda.device_count()
    if strategy == "fsdp" and n_gpus < 2:
        pytest.skip("two processes of FSDP need two devices: they need NCCL, which uses a device once")
    many_adata.write_h5ad(tmp_path / "cells.h5ad")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = TRAINING | {"batch_size": 16}
    found = {}
    for how in ("ddp", strategy) if strategy == "fsdp" else ("ddp",):
        given = [str(tmp_path / "cells.h5ad"), json.dumps({**GENES, **SIZES}), how, json.dumps(options)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        running = []
        for rank in range(2):
            own = {"RANK": str(rank), "NODE_RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SHARED": str(int(n_gpus < 2))}
            own |= {"CUDA_VISIBLE_DEVICES": str(rank % max(1, n_gpus)), "PYTHONWARNINGS": "ignore"}
            command = [sys.executable, "train.py", *given, str(tmp_path / f"{how}.pt")]
            running.append(
                subprocess.Popen(command, cwd=tmp_path, env=os.environ | own, stderr=subprocess.PIPE, text=True)
            )
        told = [process.communicate(timeout=240)[1] for process in running]
        assert [process.returncode for process in running] == [0, 0], told
        found[how] = torch.load(tmp_path / f"{how}.pt", weights_only=True)
        assert found[how]["device"] == GPU.type
    if strategy == "fsdp":
        for key, value in found["ddp"]["weights"].items():
            if not key.endswith("qkv.bias"):  # the gradient of keys' is rounding alone, of which Adam makes whole steps
                assert close(found["fsdp"]["weights"][key], value, 1e-2), key


def test_one_process_is_sharded(many_adata):
    model = make(many_adata)
    model.train(1, strategy="fsdp", precision="bf16-mixed", **TRAINING)
    assert np.isfinite(model.get_latent_representation()).all()
