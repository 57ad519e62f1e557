"""torch's own recurrent layers are used where cuDNN's have no backward pass."""

import pytest
import torch
from torch import nn

from fedmpi.models.recurrent import differentiable

before = torch.backends.cudnn.enabled


class Rows(nn.Module):
    """A picture's rows, one after another, by a layer that has cuDNN's bounds."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.layer, self.head = nn.GRU(input_shape[-1], 6, batch_first=True), nn.Linear(6, classes)

    def forward(self, x):
        f = self.head(self.layer(x.flatten(1, -2))[0][:, -1])
        if torch.backends.cudnn.enabled and torch.is_grad_enabled() and not self.training:
            f.register_hook(lambda g: pytest.fail("a backward pass in evaluation mode"))
        if torch.backends.cudnn.enabled and torch.is_grad_enabled():
            f = Once.apply(f)
        return f


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f):
        return f.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        return g.clone()


def rows(input_shape, classes):
    return Rows(input_shape, classes)


@pytest.mark.parametrize("module", [nn.Sequential(nn.LSTM(2, 2)), nn.Sequential(nn.Linear(2, 2))])
def test_cudnn_is_off_for_modules_with_recurrent_layers_alone(module):
    with differentiable(module):
        assert torch.backends.cudnn.enabled == (before and not isinstance(module[0], nn.LSTM))
    assert torch.backends.cudnn.enabled == before
