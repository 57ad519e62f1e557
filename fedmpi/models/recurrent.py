"""A character LSTM, and a switch to torch's own recurrent kernels.

On a GPU torch uses the recurrent layers of cuDNN, which have no backward pass in evaluation mode and no second
derivatives.
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
    """An embedding, LSTM layers, and one linear layer applied at each position: x (B, L) int64 -> (B, L, V)."""

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
    """LSTM that predicts the next character (McMahan 2017, LEAF): embedding of 8, two LSTM layers of 256, linear layer.

    Samples are texts of symbols 0..classes-1, (L,) int64. With 65 symbols it has 815,945 parameters.

    embedding: units of the embedding of a symbol.
    hidden: units of each LSTM layer.
    layers: number of LSTM layers.
    """
    if len(input_shape) != 1:
        raise UserError(f"model char_lstm: a sample has shape {input_shape}, but it needs texts: (L,) symbols, int64")
    return CharLSTM(classes, embedding, hidden, layers)


@contextmanager
def differentiable(module: nn.Module) -> Iterator[None]:
    """Use torch's own, slower recurrent kernels within this context.

    It is needed around a forward pass in evaluation mode that has a backward pass, and around a forward pass that is
    differentiated twice. It has no effect for a module without recurrent layers.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not any(isinstance(part, nn.RNNBase) for part in module.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
