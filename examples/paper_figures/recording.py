"""Methods that record the models of each round, and one that evaluates given models, for runs in one process.

Values in a module are lost to other ranks, and when a run resumes from a checkpoint (docs/hooks.md).
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import Client, Method, Server, State, Uploads
from fedmpi.methods.fedatom import FedAtom

ROUNDS: list["Round"] = []  # of the last run
MODELS: list[dict[str, Tensor]] = []  # parameters by name, for EvaluateModelsModels
LOSSES: list[float] = []  # for each of MODELS, the sum of losses over all training samples
SAMPLES: dict[int, int] = {}  # training samples of each client


@dataclass(frozen=True)
class Round:
    """A model before its round, and the models of its clients after it, as parameters by name."""

    before: dict[str, Tensor]
    local: dict[int, dict[str, Tensor]]  # by client
    p: dict[int, float]  # weights of the clients in the aggregate
    groups: dict[str, str]  # layout group of each parameter: coef, atom, ...


def record_round(server: Server, updates: Uploads) -> None:
    """Append the round to ROUNDS."""

    def tensors(flat: Tensor) -> dict[str, Tensor]:
        return {each.name: each.view(flat).clone() for each in server.segments}

    local = {k: tensors(server.shared + dw) for k, dw in zip(updates.clients, updates.dw, strict=True)}
    p = dict(zip(updates.clients, updates.p.tolist(), strict=True))
    ROUNDS.append(Round(tensors(server.shared), local, p, {each.name: each.group for each in server.segments}))


@dataclass(frozen=True)
class RecordedFedAvg(Method):
    """FedAvg that records its rounds."""

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        record_round(server, updates)
        return updates.mean(), State()


@dataclass(frozen=True)
class RecordedFedAtom(FedAtom):
    """FedAtom that records its rounds."""

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        record_round(server, updates)
        return updates.mean(), State()


@dataclass(frozen=True)
class EvaluateModels(Method):
    """A method that trains nothing, but adds each model's loss on each client's training samples to LOSSES."""

    def train(self, client: Client) -> State:
        SAMPLES[client.id] = client.n
        for i, model in enumerate(MODELS):
            w = client.w.clone()
            for segment in client.segments():
                segment.view(w).copy_(model[segment.name])
            LOSSES[i] += float(client.mean_loss(w, "train")) * client.n
        return State()
