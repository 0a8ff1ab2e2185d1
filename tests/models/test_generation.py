import pytest
import torch

from scforge.config.schema import ModelConfig
from scforge.errors import OptionError
from scforge.models import AutoregressiveTransformer, ScDiVaModel, TransformerEncoder
from scforge.models.components.attention import KeyValueCache
from scforge.models.protocol import GeneratingModule
from scforge.testing import raises

V, BINS, EOS, SPECIAL = 25, 6, 4, 5
ENDS = {"eos_id": EOS, "n_special": SPECIAL}


def make(**options) -> AutoregressiveTransformer:
    torch.manual_seed(0)
    options = {"hidden_dim": 16, "num_layers": 2, "num_heads": 4, "n_bins": BINS, "max_seq_len": 64, **options}
    model = AutoregressiveTransformer(V, **options).eval()
    with torch.no_grad():  # an untrained model hardly tells tokens apart
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_cache_changes_nothing(positions: str, pooling: str):
    model = make(position_embedding=positions, pooling=pooling, n_conditions=2)
    condition = torch.tensor([0, 1, 2, 1])
    cells = model.generate(4, condition=condition, **ENDS)
    assert len({int(n) for n in cells.attention_mask.sum(dim=1)}) > 1
    values = cells.bin_ids.float()
    with torch.no_grad():
        whole = model(cells.input_ids, cells.attention_mask, values, condition=condition)
        cache = KeyValueCache()
        for t in range(cells.input_ids.shape[1]):
            one = slice(t, t + 1)
            genes, bins = model.next_token(
                cells.input_ids[:, one], cells.attention_mask[:, one], values[:, one], cache, condition
            )
            there = cells.attention_mask[:, t]
            torch.testing.assert_close(genes[there], whole.logits[there, t], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(bins[there], whole.expression[there, t], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.05, 1.0, 20.0])
def test_cells_are_cells(temperature: float):
    model = make()
    model.init_bin_values(torch.linspace(0, 2.5, BINS))
    cells = model.generate(50, temperature=temperature, **ENDS)
    for ids, values, bins, mask in zip(*cells, strict=True):
        n = int(mask.sum())
        assert mask[:n].all()
        assert ids[0] == 3
        ends = bool(ids[n - 1] == EOS)
        genes = ids[1 : n - 1] if ends else ids[1:n]
        assert len(genes) >= 1
        assert (genes >= SPECIAL).all()
        assert len(genes.unique()) == len(genes)
        assert (bins[1 : 1 + len(genes)] >= 1).all()
        assert bins[0] == 0 == bins[1 + len(genes) :].sum()
        assert (ids[n:] == 0).all()
        torch.testing.assert_close(values, bins * 0.5)


def test_without_end_all_genes_come():
    cells = make().generate(3, n_special=SPECIAL)
    assert cells.input_ids.shape == (3, 1 + V - SPECIAL)
    assert cells.attention_mask.all()
    assert make().generate(3, max_len=7, n_special=SPECIAL).input_ids.shape == (3, 7)
    model = make()
    with torch.no_grad():
        model.head.decoder.bias[EOS] = -1e4
    assert (model.generate(2, **ENDS).input_ids[:, -1] == EOS).all()
    # No cell ends before its first gene.
    with torch.no_grad():
        model.head.decoder.bias[EOS] = 1e4
    assert (model.generate(5, **ENDS).input_ids[:, 2] == EOS).all()


def test_seed_alone_decides():
    model = make(dropout=0.5)
    first = model.generate(6, seed=3, **ENDS)
    model.train()
    model.head.eval()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = model.generate(6, seed=3, **ENDS)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True)), "dropout is off"
    assert (model.training, model.head.training) == (True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(model.generate(6, seed=4, **ENDS).input_ids[:, :3], first.input_ids[:, :3])
    later = model.generate(2, seed=3, first_cell=4, **ENDS)
    width = later.input_ids.shape[1]
    assert torch.equal(later.input_ids, first.input_ids[4:, :width])
    assert torch.equal(later.bin_ids, first.bin_ids[4:, :width])


def test_draws_follow_the_probabilities():
    """The first gene and its bin come as often as the heads say."""
    model = make()
    with torch.no_grad():
        output = model(torch.full((1, 1), 3), torch.ones(1, 1), torch.zeros(1, 1))
    cells = model.generate(4000, max_len=2, n_special=SPECIAL)
    for ids, logits, least in ((cells.input_ids, output.logits, SPECIAL), (cells.bin_ids, output.expression, 1)):
        expected = logits[0, 0, least:].softmax(dim=0)
        share = torch.bincount(ids[:, 1], minlength=logits.shape[-1])[least:] / 4000
        assert (share - expected).abs().max() < 4.5 * 0.5 / 4000**0.5
    likeliest = output.logits[0, 0, SPECIAL:].argsort(descending=True) + SPECIAL
    cold = model.generate(20, max_len=2, n_special=SPECIAL, temperature=1e-4)
    assert (cold.input_ids[:, 1] == likeliest[0]).all()
    few = model.generate(100, max_len=2, n_special=SPECIAL, top_k=3)
    assert set(few.input_ids[:, 1].tolist()) == set(likeliest[:3].tolist())


def test_prompt():
    model, nan = make(), float("nan")
    cells = model.generate(4, {"input_ids": torch.tensor([9, 7]), "values": torch.tensor([5.0, nan])}, **ENDS)
    assert cells.input_ids[:, :3].tolist() == [[3, 9, 7]] * 4
    assert cells.bin_ids[:, 1].tolist() == [5] * 4
    assert (cells.bin_ids[:, 2] >= 1).all()
    assert not ((cells.input_ids[:, 3:] == 9) | (cells.input_ids[:, 3:] == 7)).any()
    ids = torch.tensor([[3, 9, 0, 7], [3, 8, 0, 0]])
    some = model.generate(2, {"input_ids": ids, "attention_mask": ids > 0}, **ENDS)
    assert some.input_ids[0, :3].tolist() == [3, 9, 7]
    assert some.input_ids[1, :2].tolist() == [3, 8]
    assert some.input_ids[1, 2] > 0


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
def test_prompts_of_any_length_are_read_at_once(positions: str, monkeypatch: pytest.MonkeyPatch):
    """Cells that go on from any of their own tokens are the same cells."""
    monkeypatch.setattr("scforge.models.autoregressive._AT_ONCE", 5)
    model = make(position_embedding=positions, n_conditions=2)
    whole = model.generate(6, condition=1, **ENDS)
    n_steps = whole.input_ids.shape[1]
    kept = (whole.attention_mask.sum(dim=1) - torch.tensor([1, 6, 3, 2, 5, 4])).clamp(min=1)
    mask = torch.arange(n_steps) < kept[:, None]
    prompt = {"input_ids": whole.input_ids, "values": whole.bin_ids.float(), "attention_mask": mask}
    looks, next_token = [], model.next_token
    monkeypatch.setattr(model, "next_token", lambda *args: looks.append(args[0].shape[1]) or next_token(*args))
    again = model.generate(6, prompt, condition=1, **ENDS)
    assert all(torch.equal(one, two) for one, two in zip(again, whole, strict=True))
    assert sum(width > 1 for width in looks) >= int(kept.max()) // 5
    assert len(looks) <= -(-int(kept.max()) // 5) + 5


def test_what_generates_and_with_which_first_token():
    config = ModelConfig(vocab_size=40, hidden_dim=16, num_layers=1, num_heads=2)
    assert isinstance(ScDiVaModel.from_config(config), GeneratingModule)
    assert isinstance(make(), GeneratingModule)
    assert not isinstance(TransformerEncoder.from_config(config), GeneratingModule)
    with raises(OptionError, "first_id"):
        make().generate(2, first_id=None, **ENDS)
    prompt = {"input_ids": torch.tensor([9])}
    with raises(OptionError, "prompt"):
        make().generate(2, prompt, first_id=None, **ENDS)
    cells = make().generate(2, prompt | {"values": torch.tensor([2.0])}, first_id=None, **ENDS)
    assert cells.input_ids[:, 0].tolist() == [9, 9]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"n_cells": 0}, "n_cells"),
        ({"top_k": 0}, "top_k"),
        ({"condition": 1}, "condition"),
        ({"condition": torch.tensor([0, 0])}, "condition"),
        ({"max_len": 65}, "max_len"),
        ({"max_len": 23, "eos_id": EOS}, "max_len"),
        ({"max_len": 2, "prompt": {"input_ids": torch.tensor([9, 8])}}, "prompt"),
        ({"prompt": {"input_ids": torch.tensor([9, 2])}}, "prompt"),
        ({"prompt": {"input_ids": torch.tensor([9, 9])}}, "prompt"),
        (
            {"prompt": {"input_ids": torch.tensor([9]), "values": torch.tensor([0.5])}},
            "prompt",
        ),
        ({"prompt": {"input_ids": torch.tensor([[9]])}}, "prompt"),
        ({"prompt": torch.tensor([9])}, "prompt"),
    ],
)
def test_bad_arguments(options: dict, argument: str):
    with raises(OptionError, argument):
        make().generate(**{"n_cells": 3, "n_special": SPECIAL, **options})
