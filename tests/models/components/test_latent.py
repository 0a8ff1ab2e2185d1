"""Expression that is decoded from latent variables, and its errors."""

import pytest
import torch

from scforge.models.components.latent import BatchIntegrationHead


@pytest.mark.parametrize("n_batches", [0, 3])
def test_squared_errors_equal_those_of_the_decoded_expression(n_batches):
    torch.manual_seed(0)
    head = BatchIntegrationHead(4, 8, 30, n_batches)
    latent, target = torch.randn(10, 4, requires_grad=True), torch.rand(5, 30)
    batch = torch.tensor([0, 1, 2, -1, 0, 1, 1, 0, 2, 2]) if n_batches else None
    weights = torch.rand(10)
    expected = (head(latent, batch) - target.repeat(2, 1)).square().mean(dim=1)
    parameters = [latent, *head.parameters()]
    errors = head.squared_errors(latent, batch, target)
    torch.testing.assert_close(errors, expected)
    torch.testing.assert_close(
        torch.autograd.grad((errors * weights).sum(), parameters),
        torch.autograd.grad((expected * weights).sum(), parameters),
    )
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(head.squared_errors(latent, batch, target), errors)
