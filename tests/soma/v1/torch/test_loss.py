import pytest
import torch

from scforge.errors import DataError
from scforge.soma.v1.tokenizer import tokenize_arrays
from scforge.soma.v1.torch import Model, SIGReg, SIGRegConfig, compute_loss
from scforge.testing import raises


def test_equals_the_published(pair, published, batch):
    ours, theirs = pair()
    batch.targets[:, 50:] = 256
    regularizers = SIGReg(SIGRegConfig()), published.SIGReg(SIGRegConfig())
    functions = compute_loss, published.compute_loss
    results = []
    for function, model, regularizer in zip(functions, (ours, theirs), regularizers, strict=True):
        torch.manual_seed(2)
        loss, embedding = function(model, regularizer, batch.tokens, batch.targets)
        (loss + embedding.square().sum()).backward()
        results.append((loss, embedding, {name: value.grad for name, value in model.named_parameters()}))
        pads = torch.full_like(batch.targets, 256)
        assert function(model, regularizer, batch.tokens, pads)[0].isnan(), "pads alone have no loss"
    assert results[0][0].shape == ()
    torch.testing.assert_close(*results, atol=1e-6, rtol=1e-4)


def test_pads_are_left_out_if_asked_for(tiny):
    model, regularizer = Model(tiny, pad_mask=True), SIGReg(SIGRegConfig())
    ids, targets, _ = (torch.from_numpy(array) for array in tokenize_arrays(b"twelve bytes", 16))
    empty = torch.full_like(ids, 256)
    longer = torch.cat([ids, empty]), torch.cat([targets, empty])
    results = []
    for x, y in [(ids[:, :13], targets[:, :13]), (ids, targets), longer]:
        torch.manual_seed(0)
        results.append(compute_loss(model, regularizer, x, y))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0])
    torch.manual_seed(0)
    model.pad_mask = False
    assert not torch.isclose(compute_loss(model, regularizer, ids, targets)[1], results[0][1]).all()


@pytest.mark.parametrize(
    ("targets", "argument"),
    [
        (torch.zeros(3, 69, dtype=torch.int64), "targets"),
        (torch.zeros(3, 70), "targets"),
        (torch.full((3, 70), 264), "targets"),
    ],
)
def test_what_is_no_targets(tiny, batch, targets, argument):
    with raises(DataError, argument):
        compute_loss(Model(tiny), SIGReg(SIGRegConfig()), batch.tokens, targets)
