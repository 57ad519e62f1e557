"""FedPAC: clients share the body, each gets its own mixture of the cohort's heads, and prototypes align the features.

Xu, Tong, Huang. ICLR 2023. https://arxiv.org/abs/2306.11867

Given the body theta, its mixture phi_k and its class shares pi_c = n_kc / n_k, client k computes (1) and trains (2):
    mu_c = mean z(x) over class c,  h_k[c] = pi_c mu_c,  V_k = sum_c (pi_c E_c ||z||^2 - pi_c^2 ||mu_c||^2) / n_k    (1)
    head phase: theta fixed;   body phase: phi fixed,  L = CE + lam MSE(z, P_y)                                      (2)
Server: theta <- weighted mean;  P[c] = sum_k n_kc proto_k[c] / sum_k n_kc;                                          (3)
    phi_i = sum_j a_ij phi_j,   a_i = argmin_{a >= 0, sum a = 1}  a' (diag V + Delta^i) a,                           (4)
    Delta^i_jl = sum_c <h_i[c] - h_j[c], h_i[c] - h_l[c]>
(1) uses the received body; proto_k[c] is the mean mu_c after training. For a class without a global prototype P[c], (2)
uses the client's own mean of (1). In round 0 there are no prototypes and no mixtures yet.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.flat.layout import BODY, HEAD, NORM
from fedmpi.method import CLASSES, FEATURES, LABEL_COUNTS, Client, Method, Server, SlotValues, State, Uploads, option
from fedmpi.method.slots import HEAD_FLAT, PER_CLASS, PROTOTYPES, SCALAR, SHARED, SharedParts, Slot, Slots
from fedmpi.methods._prototypes import class_means, class_sums, head_mixing_weights, prototype_loss


@dataclass(frozen=True)
class FedPAC(Method):
    """FedPAC: a shared body, personal mixtures of heads, and features aligned by class prototypes."""

    lam: float = option(1.0, "weight of the prototype term", ge=0)
    head_epochs: int = option(1, "epochs of the head phase", ge=0)
    head_lr: float = option(0.1, "learning rate of the head phase, the same in every round", ge=0)

    server_state = Slots(heads=Slot(("N", "h"), from_initial_model=True), protos=PROTOTYPES, known=PER_CLASS)
    receives = ("protos", "known")
    per_client_download = Slots(head=HEAD_FLAT)
    sends = Slots(dw=SHARED, head=HEAD_FLAT, h=PROTOTYPES, V=SCALAR, protos=PROTOTYPES, counts=PER_CLASS)
    mean_only_slots = {"dw": ("p",)}
    accumulators = Slots(h=PROTOTYPES, V=SCALAR, targets=PROTOTYPES, known=PER_CLASS)
    needs = frozenset({FEATURES, CLASSES, LABEL_COUNTS})
    loss_is_sample_mean = True

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(exclude=(HEAD,))

    def download(self, server: Server, client: int) -> SlotValues:
        return SlotValues(head=server.state.heads[client])

    def initial_weights(self, client: Client) -> Tensor:
        return client.replace_group(HEAD, client.downloads.head, into=client.received)

    def personal_weights(self, client: Client) -> Tensor:
        return self.initial_weights(client)

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        z, f = client.forward(x)
        if not self.lam or client.round == 0:
            return client.task_loss(f, x, y)
        term = prototype_loss(z, y, client.accumulators.targets, client.accumulators.known)
        return client.task_loss(f, x, y) + self.lam * term  # (2)

    def train(self, client: Client) -> State:
        sums, counts, squares = class_sums(client.forward_batches(), client.classes)
        mu, present = class_means(sums, counts)
        pi = counts / counts.sum()
        client.accumulators.h.copy_(pi[:, None] * mu)  # (1)
        variances = pi * squares / counts.clamp(min=1) - pi**2 * mu.square().sum(1)
        client.accumulators.V.copy_(variances.sum() / client.n)  # (1)
        client.accumulators.targets.copy_(client.downloads.protos + (1 - client.downloads.known)[:, None] * mu)
        client.accumulators.known.copy_(client.downloads.known.maximum(present))
        client.fit(self.head_epochs, groups=(HEAD,), lr=self.head_lr)
        client.fit(groups=(BODY, NORM))
        return State()

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        sums, counts, _ = class_sums(client.forward_batches(), client.classes)
        protos, _ = class_means(sums, counts)
        own = {"head": client.extract_group(HEAD, client.w), "h": client.accumulators.h, "V": client.accumulators.V}
        return SlotValues(**own, protos=protos, counts=counts), State()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        sums, counts = (updates.counts[:, :, None] * updates.protos).sum(0), updates.counts.sum(0)
        protos, present = class_means(sums, counts)  # (3)
        protos += (1 - present)[:, None] * server.state.protos  # classes without samples in the cohort do not change
        heads = server.state.heads.clone()
        for i, client in enumerate(updates.clients):
            heads[client] = updates.combine(head_mixing_weights(updates.h, updates.V, i), "head")  # (4)
        return updates.mean("dw"), State(heads=heads, protos=protos, known=present.maximum(server.state.known))
