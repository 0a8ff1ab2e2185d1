"""The loss, beside the published one."""

from __future__ import annotations

import pytest
import torch

from scforge.errors import DataError
from scforge.soma.v1.tokenizer import tokenize_arrays
from scforge.soma.v1.torch import Model, SIGReg, SIGRegConfig, compute_loss


def test_equals_the_published(pair, published, batch):
    ours, theirs = pair()
    batch.targets[:, 50:] = 256
    results = []
    for soma, model in ((compute_loss, ours), (published.compute_loss, theirs)):
        regulariser = (SIGReg if soma is compute_loss else published.SIGReg)(SIGRegConfig())
        torch.manual_seed(2)
        loss, embedding = soma(model, regulariser, batch.tokens, batch.targets)
        (loss + embedding.square().sum()).backward()
        results.append((loss, embedding, {name: value.grad for name, value in model.named_parameters()}))
    (loss, embedding, grads), (wanted_loss, wanted_embedding, wanted_grads) = results
    assert loss.shape == ()
    assert embedding.shape == (16,)
    torch.testing.assert_close(loss, wanted_loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(embedding, wanted_embedding, atol=1e-6, rtol=0)
    for name, grad in wanted_grads.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-4)


def test_pads_count_in_all_but_the_cross_entropy(tiny, batch):
    model, regulariser = Model(tiny), SIGReg(SIGRegConfig(coefficient=0.0))
    states = model.encode(batch.tokens, torch.arange(70)[None])
    targets = batch.targets.clone()
    targets[1:] = 256
    loss, embedding = compute_loss(model, regulariser, batch.tokens, targets)
    expected = torch.nn.functional.cross_entropy(
        model.predict(states[0])[targets[0] != 256], targets[0][targets[0] != 256]
    )
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(embedding, states.mean(dim=(0, 1)))


def test_pads_alone_have_no_loss(tiny, batch, published, pair):
    pads = torch.full_like(batch.targets, 256)
    ours, theirs = pair()
    assert compute_loss(ours, SIGReg(SIGRegConfig()), batch.tokens, pads)[0].isnan()
    assert published.compute_loss(theirs, published.SIGReg(SIGRegConfig()), batch.tokens, pads)[0].isnan()


def test_pads_are_left_out_if_asked_for(tiny):
    model, regulariser = Model(tiny, pad_mask=True), SIGReg(SIGRegConfig())
    ids, targets, _ = (torch.from_numpy(array) for array in tokenize_arrays(b"twelve bytes", 16))
    short_ids, short_targets = ids[:, :13], targets[:, :13]
    empty, nothing = torch.full_like(ids, 256), torch.full_like(targets, 256)
    results = []
    for x, y in [(short_ids, short_targets), (ids, targets), (torch.cat([ids, empty]), torch.cat([targets, nothing]))]:
        torch.manual_seed(0)
        results.append(compute_loss(model, regulariser, x, y))
    for loss, embedding in results[1:]:
        torch.testing.assert_close(loss, results[0][0])
        torch.testing.assert_close(embedding, results[0][1])
    torch.manual_seed(0)
    model.pad_mask = False
    assert not torch.isclose(compute_loss(model, regulariser, ids, targets)[1], results[0][1]).all()


def test_it_learns(tiny):
    torch.manual_seed(0)
    model, regulariser = Model(tiny), SIGReg(SIGRegConfig())
    ids, targets, _ = (torch.from_numpy(array) for array in tokenize_arrays(b"to be or not to be. " * 12, 64))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss, _ = compute_loss(model, regulariser, ids, targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4


def test_targets_of_another_shape(tiny, batch):
    with pytest.raises(DataError, match=r"targets has shape \(3, 69\), token_ids \(3, 70\)"):
        compute_loss(Model(tiny), SIGReg(SIGRegConfig()), batch.tokens, batch.targets[:, 1:])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.zeros(3, 70), "targets has dtype torch.float32"),
        (torch.full((3, 70), 264), "targets holds 264"),
        ([[1, 2]], "targets is of type list"),
    ],
)
def test_what_is_no_targets(tiny, batch, targets, message):
    with pytest.raises(DataError, match=message):
        compute_loss(Model(tiny), SIGReg(SIGRegConfig()), batch.tokens, targets)
