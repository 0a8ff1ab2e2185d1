import copy

import pytest
import torch

from scforge.errors import OptionError
from scforge.finetuning.adapters import (
    adapters_disabled,
    base_state,
    digest_of,
    has_lora,
    inject_lora,
    is_adapter,
    load_base,
    lora_options,
    merge_lora,
    merged,
)
from scforge.models import TransformerEncoder

PLAIN = {"hidden_dim": 16, "num_layers": 2, "num_heads": 2, "max_seq_len": 16, "dropout": 0.0}


@pytest.fixture
def encoder() -> TransformerEncoder:
    torch.manual_seed(0)
    return TransformerEncoder(vocab_size=100, **PLAIN).eval()


@pytest.fixture
def batch(dummy_batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: dummy_batch[name] for name in ("input_ids", "attention_mask", "values")}


def adapted(encoder: torch.nn.Module, lora: object = True) -> torch.nn.Module:
    encoder = copy.deepcopy(encoder)
    inject_lora(encoder, lora_options(encoder, lora))
    return encoder


def disturb(encoder: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if is_adapter(name):
                parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("lora", [True, {"r": 2, "use_dora": True}, {"targets": "the first"}])
def test_they_begin_as_nothing_and_are_all_that_is_trained(encoder, batch, lora) -> None:
    targets = lora_options(encoder, True)["targets"]
    assert set(targets) <= {name for name, part in encoder.named_modules() if isinstance(part, torch.nn.Linear)}
    assert not any("head" in name for name in targets)
    if lora == {"targets": "the first"}:
        lora = {"targets": targets[:1]}
    tuned = adapted(encoder, lora).eval()
    plain = encoder.encode(**batch)
    torch.testing.assert_close(tuned.encode(**batch), plain, atol=1e-6, rtol=1e-5)
    trained = {name for name, p in tuned.named_parameters() if p.requires_grad}
    assert trained
    assert all(is_adapter(name) for name in trained)
    assert has_lora(tuned)
    assert not has_lora(encoder)
    # They change the output in eval mode, too, and can be switched off.
    disturb(tuned)
    changed = tuned.encode(**batch)
    assert (changed - plain).abs().max() > 1e-3
    with adapters_disabled(tuned):
        torch.testing.assert_close(tuned.encode(**batch), plain)
    torch.testing.assert_close(tuned.encode(**batch), changed)
    assert {name for name, p in tuned.named_parameters() if p.requires_grad} == trained


@pytest.mark.parametrize("lora", [True, {"use_dora": True}])
def test_merging(encoder, batch, lora) -> None:
    tuned = adapted(encoder, lora).eval()
    disturb(tuned)
    expected, before = tuned.encode(**batch), digest_of(tuned)
    copied = merged(tuned)
    assert has_lora(tuned)
    assert digest_of(tuned) == before
    merge_lora(tuned)
    for one in (copied, tuned):
        assert not has_lora(one)
        assert one.state_dict().keys() == encoder.state_dict().keys()
        torch.testing.assert_close(one.encode(**batch), expected, atol=1e-5, rtol=1e-4)
    assert merged(encoder) is encoder


def test_weights_of_the_base_have_their_plain_names(encoder) -> None:
    tuned = adapted(encoder)
    assert base_state(tuned).keys() == encoder.state_dict().keys()
    assert digest_of(tuned) == digest_of(encoder)
    disturb(tuned)
    assert digest_of(tuned) == digest_of(encoder)
    other = TransformerEncoder(vocab_size=100, **PLAIN)
    assert digest_of(other) != digest_of(encoder)
    load_base(tuned, base_state(other))
    assert digest_of(tuned) == digest_of(other)


def test_options(encoder) -> None:
    assert lora_options(encoder, False) is None
    for lora, message in (
        ("yes", "lora='yes' must be True, False or a dict"),
        ({"rank": 3}, "'rank' is unknown to"),
        ({"alpha": 0}, r"lora\['alpha'\]=0"),
        ({"targets": []}, r"lora\['targets'\]=\[\] matches no linear layer of TransformerEncoder"),
        ({"targets": ["nothing"]}, "'nothing', which is not a linear layer of TransformerEncoder"),
    ):
        with pytest.raises(OptionError, match=message):
            lora_options(encoder, lora)
