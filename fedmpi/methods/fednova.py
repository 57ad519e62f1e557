"""FedNova: updates are divided by the client's number of steps, so that clients with more steps do not get more weight.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020. https://arxiv.org/abs/2007.07481

    d_k = (w - w_k) / a_k       a_k: total weight of the gradients in w_k; without momentum, the number of steps    (1)
    w  <- w - tau sum_k p_k d_k     tau = sum_k p_k a_k                                                             (2)
With the option ccvr, local gradients are corrected as in the code of FedSOL's authors:
    g <- g - d_k + d,           d = sum_k p_k d_k                                                                   (3)
Here d_k is from the client's previous training and d from the previous aggregation, both divided by the learning rate.
(In the authors' code d stays 0.) Weight decay is part of the update.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import SGD_STEPS, Client, Method, Server, SlotValues, State, Uploads, declared_property, option
from fedmpi.method.slots import FLAT, SCALAR, SHARED, Slots


@dataclass(frozen=True)
class FedNova(Method):
    """FedNova: FedAvg with normalised updates."""

    ccvr: bool = option(False, "correct local gradients by the cohort's direction minus the client's own (3)")

    sends = Slots(dw=SHARED, a=SCALAR)
    needs = frozenset({SGD_STEPS})

    @declared_property
    def client_state(self) -> Slots:
        return Slots(d_k=FLAT) if self.ccvr else Slots()

    @declared_property
    def server_state(self) -> Slots:
        return Slots(d=FLAT) if self.ccvr else Slots()

    @declared_property
    def receives(self) -> tuple[str, ...]:
        return tuple(self.server_state)

    def correct_gradient(self, client: Client, g: Tensor) -> Tensor:
        return g.sub_(client.state.d_k).add_(client.downloads.d) if self.ccvr else g  # (3)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        sent = SlotValues(a=client.w.new_full((), client.gradient_weight))
        if not self.ccvr or not client.steps or not client.lr:
            return sent, client.state
        return sent, State(d_k=(client.w0 - client.w) / (client.gradient_weight * client.lr))  # (1)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        a = updates.a.double().cpu()
        # tau / a_k, written so that equal a give exactly 1 and FedAvg's bits; a client without steps has dw = 0.
        ratio = 1 + ((a / a.clamp(min=1)[:, None] - 1) @ updates.p)
        direction = updates.combine(updates.p * ratio)  # (2)
        if not self.ccvr or not server.train_lr:
            return direction, server.state
        return direction, State(d=updates.combine(-updates.p / (a.clamp(min=1) * server.train_lr)))  # (3)
