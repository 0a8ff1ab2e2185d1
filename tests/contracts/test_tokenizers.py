"""What every registered tokenizer promises: the check for plugins, with each interesting set of options."""

import numpy as np
import pytest

from scforge.data import GeneVocab
from scforge.testing import check_tokenizer
from scforge.tokenizers import get_tokenizer, list_tokenizers
from scforge.tokenizers.registry import TOKENIZERS

COMMON = [{}, {"append_cls": False}, {"append_eos": True}, {"append_cls": False, "append_eos": True}, {"max_len": 9}]
# Vectors of some genes of the vocabularies below.
TABLE = {name: [float(i), 1.0] for i in range(80) if i % 3 for name in (f"ENSG{i:011d}", f"g{i}", f"gene{i}")}
OPTIONS: dict[str, list[dict]] = {
    "binned_expression": [
        {"side": "one"},
        {"side": "tahoe", "truncation": "highest"},
        {"n_bins": 5, "truncation": "highest", "max_len": 9},
        {"edges": [3.0, 5.0, 6.5]},
        {"include_zero_genes": True},
        {"include_zero_genes": True, "max_len": 30, "append_eos": True},
        {"include_zero_genes": True, "max_len": 50, "truncation": "highest"},
    ],
    "continuous_projection": [
        {"transform": "counts", "clip": 30.0, "order": "random", "attention_bias": True, "max_len": 9},
        {"order": "expression", "library_size": "vocabulary"},
        {"order": "random", "include_zero_genes": True, "append_eos": True},
        {"include_zero_genes": True, "max_len": 50},
        {"target_depth": "t4", "append_cls": False, "append_eos": True},
        {"target_depth": "f2", "max_len": 9},
    ],
    "entropy_ranked": [{"weighting": "inverse"}, {"weighting": "inverse", "append_cls": True, "max_len": 9}],
    "gene_embedding": [
        {"table": TABLE},
        {"table": TABLE, "missing": "drop"},
        {"table": TABLE, "missing": "drop", "order": "expression", "attention_bias": True, "max_len": 9},
        {"table": TABLE, "missing": "drop", "include_zero_genes": True},
    ],
    "rank_value": [{"use_medians": False}, {"use_medians": False, "max_len": 9}, {"parity": "exact"}],
}
every_tokenizer = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, id=f"{name}-{i}")
        for name in list_tokenizers()
        for i, options in enumerate(COMMON + OPTIONS.get(name, []))
    ],
)


@every_tokenizer
def test_contract(name, options):
    check_tokenizer(name, **options)


@every_tokenizer
def test_contract_without_names_beside_the_genes(name, options):
    """A vocabulary of plain names, other special tokens, and few genes."""
    genes = [f"g{i}" for i in range(12)]
    vocab = GeneVocab(tuple(genes), special_tokens=("<pad>", "<mask>", "<cls>", "<eos>", "<batch>"))
    vocab = vocab.with_medians(np.random.default_rng(0).uniform(0.5, 20.0, len(genes)))
    vocab = vocab.with_entropies(np.random.default_rng(1).uniform(0.3, 0.9, len(genes)))
    needed = TOKENIZERS.get(name).special_tokens(options)
    check_tokenizer(get_tokenizer(name, vocab.with_special_tokens(*needed), **options))


@pytest.mark.parametrize("name", list_tokenizers())
def test_contract_with_one_gene(name):
    assert set(OPTIONS) <= set(list_tokenizers())
    vocab = GeneVocab.from_genes(["g"]).with_medians(np.array([2.0])).with_entropies(np.array([0.4]))
    check_tokenizer(get_tokenizer(name, vocab))
