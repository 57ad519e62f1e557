"""A character-level LSTM, and a switch from cuDNN's recurrent kernels to PyTorch's native ones.

On a GPU, PyTorch uses cuDNN's recurrent kernels, which support neither a backward pass in evaluation mode nor second
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
    """A character-level LSTM, symbols (B, L) int64 -> logits (B, L, V): embedding, LSTM layers and a linear layer."""

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
    """LSTM that predicts the next character (McMahan 2017, LEAF): an embedding, LSTM layers, and a linear layer.

    Samples are texts of symbols 0..classes-1, (L,) int64. With 65 symbols it has 815,945 parameters.

    embedding: dimension of the embedding of a symbol.
    hidden: number of units of each LSTM layer.
    layers: number of LSTM layers.
    """
    if len(input_shape) != 1:
        raise UserError(
            f"model char_lstm: a sample has the shape {input_shape}, but the model needs texts, (L,) int64 symbols; "
            "choose "
            "another model for this data set"
        )
    return CharLSTM(classes, embedding, hidden, layers)


@contextmanager
def without_cudnn_rnn(module: nn.Module) -> Iterator[None]:
    """Context manager: use PyTorch's native recurrent kernels in place of cuDNN's, which are faster.

    This is needed for a backward pass in evaluation mode, and for second derivatives. Modules without recurrent layers
    are not affected.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = before and not any(isinstance(part, nn.RNNBase) for part in module.modules())
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before
