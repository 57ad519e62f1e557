"""FedFomo: each client mixes its model with other clients' models that reduce the loss on its own validation rows.

Zhang, Sapra, Fidler, Yeung, Alvarez. Personalized Federated Learning with First Order Model Optimization. ICLR 2021.
https://arxiv.org/abs/2012.08565

Before local training, client i has the models theta_n of up to `models` other clients, its own model theta_i, and a
base model b_i. It mixes them by the loss L_i over its validation rows (data.validation):
    u_n  = (L_i(b_i) - L_i(theta_n)) / ||theta_n - b_i||                        0 if theta_n = b_i                (1)
    w <- b_i + sum_n max(u_n, 0) / sum_j max(u_j, 0) (theta_n - b_i)            b_i if no u_n > 0                  (2)
E epochs of SGD from w then give the new theta_i, with which the client is evaluated. With base: trained, b_i is
theta_i. With base: mixed, as in the authors' code, b_i is the model of (2) from the client's previous round, before
training; theta_i is then one of the candidates, and if no candidate helps, the last training is discarded. A
client without validation rows does not mix. Buffers are not mixed.
The server averages nothing. It adds P[i, n] <- P[i, n] + u_n, and sends client i the models with the largest P[i, .]
(in a tie, the lowest n first). Each of them is replaced by a random model with probability max(explore - decay t, 0). A
client that has never taken part is represented by the initial model.                                             (3)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.method import VALIDATION, Client, Method, Server, SlotValues, State, Uploads, option
from fedmpi.method.slots import FLAT, INITIAL, SharedParts, Slot, Slots


@dataclass(frozen=True)
class FedFomo(Method):
    """FedFomo: personal models, each mixed with other clients' models according to their usefulness."""

    models: int = option(5, "M, maximum number of other clients' models that a client receives", ge=1)
    base: str = option(
        "trained", "b_i: the client's model after its last training, or before it", choices=("trained", "mixed")
    )
    explore: float = option(0.3, "probability, in round 0, of a random model in place of one with large P", ge=0, le=1)
    decay: float = option(0.05, "decrease of that probability per round", ge=0)

    client_state = Slots(base=INITIAL)
    server_state = Slots(last=INITIAL.with_leading_dim("N"), P=Slot(("N", "N")))
    per_client_download = Slots(thetas=FLAT.with_leading_dim("models"), who=Slot(("models",)))
    sends = Slots(theta=FLAT, who=Slot(("models",)), u=Slot(("models",)))
    accumulators = Slots(u=Slot(("models",)))
    needs = frozenset({VALIDATION})

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(groups=())

    def download(self, server: Server, client: int) -> SlotValues:
        gains = server.state.P[client].tolist()
        others = sorted((n for n in range(server.clients) if n != client), key=lambda n: -gains[n])
        chosen, g = [-1] * self.models, server.generator("pick", server.round, client)
        for i in range(min(self.models, len(others))):  # (3)
            is_random = torch.rand((), generator=g) < self.explore - self.decay * server.round
            chosen[i] = others.pop(int(torch.randint(len(others), (), generator=g)) if is_random else 0)
        return SlotValues(
            thetas=server.state.last[chosen], who=torch.tensor(chosen)
        )  # -1: an unused place, as N - 1 < models

    def initial_weights(self, client: Client) -> Tensor:
        b = client.received if self.base == "trained" else client.state.base
        others = min(self.models, client.clients - 1)
        thetas = torch.cat([client.received[None], client.downloads.thetas[:others]])
        moves = thetas - b
        u = usefulness(client.mean_loss(b), torch.stack([client.mean_loss(theta) for theta in thetas]), moves)
        known = ~u.isnan().any()  # nan means that there are no validation rows
        client.accumulators.u[:others] = torch.where(known, u[1:], 0.0)
        weights = u.clamp(min=0) / u.clamp(min=0).sum().clamp(min=1e-300)
        return torch.where(known, b + weights.to(b.dtype) @ moves, client.received)  # (2)

    def upload(self, client: Client) -> tuple[SlotValues, State]:
        return SlotValues(theta=client.w, who=client.downloads.who, u=client.accumulators.u), State(base=client.w0)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        last, P = server.state.last.clone(), server.state.P.clone()
        for i, client in enumerate(updates.clients):
            last[client] = updates.theta[i]
            who = updates.who[i].long().clamp(min=0)  # unused places (-1) have u = 0
            P[client].index_add_(0, who, updates.u[i])  # (3)
        return server.w[:0], State(last=last, P=P)


def usefulness(at_base: Tensor, losses: Tensor, moves: Tensor) -> Tensor:
    """Return u_n of (1), the usefulness of each of n models, (n,).

    Args:
        at_base: () the loss L_i(b_i).
        losses: (n,) the losses L_i(theta_n).
        moves: (n, d) the differences theta_n - b_i.
    """
    length = moves.double().norm(dim=1)
    return torch.where(length > 0, (at_base - losses) / length.clamp(min=1e-300), 0.0)
