"""FedProto: clients keep their own models and exchange only class prototypes, which are means of features.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. AAAI 2022. https://arxiv.org/abs/2105.00243

    proto_k[c] = mean of z(x) over the client's samples of class c, during the last local epoch                   (1)
    P[c]       = mean over the clients that have samples of class c, unweighted as in the authors' code           (2)
    L          = CE + lam MSE(z, P_y)       a sample of a class without a prototype adds 0 to the MSE             (3)
The weights still change while (1) is accumulated. share_weights: true also averages the models, as in the comparison in
the FedUV paper.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import CLASSES, FEATURES, Client, Method, Server, SlotValues, State, Uploads, option
from fedmpi.method.slots import PER_CLASS, PROTOTYPES, SHARED, SharedParts, Slots
from fedmpi.methods._prototypes import class_means, prototype_loss


@dataclass(frozen=True)
class FedProto(Method):
    """FedProto: personal models, with features that are aligned by shared class prototypes."""

    lam: float = option(1.0, "weight of the prototype term", ge=0)
    share_weights: bool = option(False, "also average the models")

    server_state = Slots(protos=PROTOTYPES, known=PER_CLASS)
    receives = ("protos", "known")
    sends = Slots(dw=SHARED, protos=PROTOTYPES, present=PER_CLASS)
    mean_only_slots = {"dw": ("p",)}
    accumulators = Slots(sums=PROTOTYPES, counts=PER_CLASS)
    needs = frozenset({FEATURES, CLASSES})
    loss_is_sample_mean = True
    equals_fedavg_at = {"lam": 0.0, "share_weights": True}

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts() if self.share_weights else SharedParts(groups=())

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = client.forward(x)
        if client.last_epoch:
            client.accumulators.sums.index_add_(0, y, z.detach())
            client.accumulators.counts.index_add_(0, y, z.new_ones(len(y)))
        loss = client.task_loss(f, x, y)
        if not self.lam:
            return loss
        return loss + self.lam * prototype_loss(z, y, client.downloads.protos, client.downloads.known)  # (3)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        protos, present = class_means(client.accumulators.sums, client.accumulators.counts)  # (1)
        return SlotValues(protos=protos, present=present), State()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        # Classes that a client lacks have rows of zeros in its upload, so a plain sum suffices.
        protos, present = class_means(updates.protos.sum(0), updates.present.sum(0))  # (2)
        protos += (1 - present)[:, None] * server.state.protos
        return updates.mean("dw"), State(protos=protos, known=present.maximum(server.state.known))
