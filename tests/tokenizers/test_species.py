"""Cells of mouse and man under the vocabulary of both."""

import numpy as np
import pytest
import torch
from scipy import sparse

from scforge.data import GeneVocab
from scforge.tokenizers import get_tokenizer, list_tokenizers

PAIRS = {
    "CD3D": ("ENSG00000167286", "Cd3d", "ENSMUSG00000032094"),
    "CD19": ("ENSG00000177455", "Cd19", "ENSMUSG00000030724"),
    "GATA1": ("ENSG00000102145", "Gata1", "ENSMUSG00000031162"),
    "PAX5": ("ENSG00000196092", "Pax5", "ENSMUSG00000014030"),
    "SPI1": ("ENSG00000066336", "Spi1", "ENSMUSG00000002111"),
}
GENES = [(symbol, *names) for symbol, names in PAIRS.items()]


@pytest.mark.parametrize("name", list_tokenizers())
def test_a_cell_has_the_same_tokens_by_any_name_of_either_species(name):
    vocab = GeneVocab.named("human_mouse")
    vocab = vocab.with_medians(np.ones(vocab.n_genes)).with_entropies(np.full(vocab.n_genes, 0.5))
    counts = sparse.csr_matrix(np.array([[5, 1, 0, 2, 7], [0, 3, 3, 1, 0]], dtype=np.float32))
    tokenizer = get_tokenizer(name, vocab)
    batches = [tokenizer(counts, names) for names in zip(*GENES, strict=True)]
    order = [3, 0, 4, 1, 2]
    batches.append(tokenizer(counts[:, order], [f"{GENES[index][3]}.7" for index in order]))
    assert vocab.decode(batches[0]["input_ids"][1].tolist())[int(tokenizer.append_cls) :]
    for batch in batches[1:]:
        for key in batch:
            assert torch.equal(batch[key], batches[0][key])
