"""Methods that remember what a round was made of, and one that evaluates given models; for runs of one process.

What is remembered in a module is lost to other ranks and to a run that goes on from a checkpoint (docs/hooks.md).
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import Client, Method, Server, State, Uploads
from fedmpi.methods.fedatom import FedAtom

ROUNDS: list["Round"] = []  # of the run that has been trained last
MODELS: list[dict[str, Tensor]] = []  # parameters by name, for Evaluate
LOSSES: list[float] = []  # of each of them: the sum over all training samples
SAMPLES: dict[int, int] = {}  # training samples of each client


@dataclass(frozen=True)
class Round:
    """A model before its round, and what its clients have made of it: parameters by name."""

    before: dict[str, Tensor]
    local: dict[int, dict[str, Tensor]]  # by client
    p: dict[int, float]  # weights of the clients in the aggregate
    groups: dict[str, str]  # layout group of each parameter: coef, atom, ...


def remember(s: Server, up: Uploads) -> None:
    def tensors(flat: Tensor) -> dict[str, Tensor]:
        return {each.name: each.view(flat).clone() for each in s.segments}

    local = {k: tensors(s.shared + dw) for k, dw in zip(up.clients, up.dw, strict=True)}
    p = dict(zip(up.clients, up.p.tolist(), strict=True))
    ROUNDS.append(Round(tensors(s.shared), local, p, {each.name: each.group for each in s.segments}))


@dataclass(frozen=True)
class RecordedFedAvg(Method):
    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        remember(s, up)
        return up.mean(), State()


@dataclass(frozen=True)
class RecordedFedAtom(FedAtom):
    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        remember(s, up)
        return up.mean(), State()


@dataclass(frozen=True)
class Evaluate(Method):
    """Train nothing, and add the losses of each of MODELS on each client's training samples to LOSSES."""

    def train(self, k: Client) -> State:
        SAMPLES[k.id] = k.n
        for i, model in enumerate(MODELS):
            at = k.w.clone()
            for segment in k.segments():
                segment.view(at).copy_(model[segment.name])
            LOSSES[i] += float(k.mean_loss(at, "train")) * k.n
        return State()
