"""A character LSTM, and the switch to torch's own recurrent kernels.

cuDNN's recurrent layers, which torch uses on a GPU, have no backward pass in evaluation mode and none of second
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from fedmpi.common.errors import UserError

Width = Annotated[int, Field(ge=1, le=100_000)]


class CharLSTM(nn.Module):
    """Embedding, LSTM layers, one linear layer at each place: x (B, L) int64 -> (B, L, V)."""

    def __init__(self, symbols: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, symbols)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def char_lstm(
    input_shape: tuple[int, ...], classes: int, embedding: Width = 8, hidden: Width = 256, layers: Width = 2
) -> CharLSTM:
    """Characters to the next ones (McMahan 2017, LEAF): embedding of 8, two LSTM layers of 256, one linear layer.

    Samples are texts of symbols 0..classes-1, (L,) int64. embedding, hidden: units; layers: of the LSTM. 65 symbols:
    815,945 parameters.
    """
    if len(input_shape) != 1:
        raise UserError(f"model char_lstm: a sample has shape {input_shape}, but it needs texts: (L,) symbols, int64")
    return CharLSTM(classes, embedding, hidden, layers)


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Use torch's own, slower kernels around a forward pass that is differentiated in one of these two ways.

    Nothing changes for a module without recurrent layers.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not any(isinstance(part, nn.RNNBase) for part in module.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
