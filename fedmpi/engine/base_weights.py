"""The base weights of layers with adapters, to which the server adds a low-rank matrix in each round.

With `server.lora: exact` and `stack`, the broadcast of a round contains the change of all base weights in the previous
round, as factors or matrices (aggregation/lora.py), and its number. Every rank adds it to its own copy of the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmpi.aggregation.lora import RESIDUAL, RESIDUAL_NUMBER, AdapterShape, unpack_changes
from fedmpi.comm import Communicator
from fedmpi.flat.packing import Views
from fedmpi.models.lora import AdaptedLayer


class BaseWeights:
    """The base weights of the adapted layers on one rank."""

    def __init__(self, layers: Sequence[AdaptedLayer], shapes: Sequence[AdapterShape], cohort_size: int) -> None:
        """Take over the base weights of these layers.

        Args:
            shapes: the sizes of the layers' adapters, in the same order.
            cohort_size: the largest number of clients in a round.
        """
        self.layers, self.shapes, self.cohort_size = list(layers), list(shapes), cohort_size
        self.number = 0  # of changes that these weights contain

    def add_change(self, broadcast: Views) -> None:
        """Add the change in a broadcast, unless it was added before: a round may be repeated after a rank failure."""
        number = int(getattr(broadcast, RESIDUAL_NUMBER))
        if number == self.number:
            return
        if number != self.number + 1:
            raise RuntimeError(f"the server sent change {number} of the base weights, but {self.number} were added")
        changes = unpack_changes(getattr(broadcast, RESIDUAL), self.shapes, self.cohort_size)
        for layer, change in zip(self.layers, changes, strict=True):
            layer.add_to_base(change)
        self.number = number

    def tensors(self) -> dict[str, Tensor]:
        """Return the base weights by layer name, for checkpoints; writing to them changes the model."""
        return {f"base {layer.name}": layer.base.data for layer in self.layers}

    def send_to_all(self, comm: Communicator) -> None:
        """Replace the base weights of all ranks by those of rank 0; called when a run is resumed."""
        number = torch.tensor([self.number], dtype=torch.int64, device=comm.device)
        comm.broadcast(number)
        self.number = int(number)
        for layer in self.layers:
            values = layer.base.data.to(comm.device).contiguous().flatten()
            comm.broadcast(values)
            layer.base.data.copy_(values.view(layer.base.shape))


def adapter_shapes(layers: Sequence[AdaptedLayer], parameters: Mapping[str, Tensor]) -> list[AdapterShape]:
    """Return the names and sizes of the layers' adapters.

    Args:
        parameters: the parameters of the module, by name.
    """
    return [
        AdapterShape(layer.a, layer.b, *layer.shape, parameters[layer.a].shape[0], layer.is_embedding)
        for layer in layers
    ]
