from pathlib import Path

import pytest

from scforge.config import list_recipes, load_config, recipe_path

CLUSTER = [name for name in list_recipes() if name.endswith("_cluster")]


@pytest.mark.parametrize("name", list_recipes())
def test_each_recipe_loads(name: str) -> None:
    config = load_config(recipe_path(name))
    assert config.data.paths == ["store.zarr" if name in CLUSTER else "data.h5ad"]
    assert config.output.checkpoint_dir.endswith(f"checkpoints/{name}")
    if name in CLUSTER:
        training = config.training
        assert (training.precision, training.strategy, training.accelerator) == ("bf16-mixed", "ddp", "gpu")
        assert training.devices > 1
        assert training.checkpoint_every_n_steps


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("geneformer", {"hidden_dim": 256, "num_layers": 6, "num_heads": 4, "ffn_dim": 512, "max_seq_len": 2048}),
        ("scgpt", {"hidden_dim": 512, "num_layers": 12, "num_heads": 8, "ffn_dim": 512, "max_seq_len": 1200}),
        ("scfoundation", {"hidden_dim": 768, "num_layers": 12, "num_heads": 12, "decoder_dim": 512}),
    ],
)
def test_sizes_of_the_cluster_recipes_are_the_published_ones(name: str, sizes: dict[str, int]) -> None:
    config = load_config(recipe_path(f"{name}_cluster"))
    assert sizes.items() <= config.model.user_options().items()
    if name == "geneformer":
        assert (config.training.optimizer.lr, config.training.scheduler.warmup_steps) == (1e-3, 10_000)


def test_recipes_that_fine_tune() -> None:
    tuned = {name: load_config(recipe_path(name)).finetune for name in list_recipes()}
    tuned = {name: section for name, section in tuned.items() if section is not None}
    tasks = ("annotation", "integration", "perturbation")
    assert {name: section.task for name, section in tuned.items()} == {
        f"{task}{ending}": task for task in tasks for ending in ("", "_cluster")
    }
    for section in tuned.values():
        recipe = Path(section.base_model).parent.name
        assert load_config(recipe_path(recipe)).output.checkpoint_dir == str(Path(section.base_model).parent)


@pytest.mark.parametrize(
    ("name", "tokenizer", "objective", "architecture"),
    [
        ("light", "continuous_projection", "neighbor_denoising", "gene_pooling"),
        ("masked_autoencoder", "continuous_projection", "masked_value_prediction", "masked_autoencoder"),
    ],
)
def test_parts_of_a_recipe(name: str, tokenizer: str, objective: str, architecture: str) -> None:
    config = load_config(recipe_path(name))
    assert (config.tokenizer.strategy, config.objective.name) == (tokenizer, objective)
    assert config.model.architecture == architecture
