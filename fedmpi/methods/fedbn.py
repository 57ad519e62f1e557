"""FedBN: each client keeps its own batch normalisation, and the server averages all other layers as in FedAvg.

Li, Jiang, Zhang, Kamp, Dou. ICLR 2021. https://arxiv.org/abs/2102.07623

w_k = (received weights outside batch normalisation, client k's own weights inside it)         (1)
The weight, bias and running statistics of a normalisation layer stay with the client between rounds. Layers are
recognised by their type. The authors' code looks for "bn" in names instead (bn_match: name), which misses the
normalisation layers in the shortcuts of torchvision's ResNets.
"""

from dataclasses import dataclass

from torch import nn

from fedmpi.flat.layout import BODY, NORM
from fedmpi.flat.model import NORM_LAYERS
from fedmpi.method import Method, SharedParts, option


@dataclass(frozen=True)
class FedBN(Method):
    """FedBN: FedAvg with personal normalisation layers."""

    bn_match: str = option(
        "type",
        "what stays with the client: batch normalisation, all normalisation layers, or tensors with bn in their name",
        choices=("type", "any", "name"),
    )

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(NORM,))  # (1)

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        """Assign personal tensors to the layout group norm, and shared normalisation tensors to the group body."""
        groups: dict[str, str] = getattr(module, "parameter_groups", dict)()
        local = NORM_LAYERS[:1] if self.bn_match == "type" else NORM_LAYERS
        for path, layer in module.named_modules():
            for leaf in (*layer._parameters, *layer._buffers):
                name = f"{path}.{leaf}" if path else leaf
                stays = "bn" in name if self.bn_match == "name" else isinstance(layer, local)
                if stays or isinstance(layer, NORM_LAYERS):
                    groups[name] = NORM if stays else BODY
        module.parameter_groups = lambda: groups  # type: ignore[assignment]
        return module
