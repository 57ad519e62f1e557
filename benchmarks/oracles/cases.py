"""What is compared: a method in fedmpi, the same in another program, and how the other one differs where it does."""

from dataclasses import dataclass, field
from typing import Any

UNIFORM = {"cohort.weighting": "uniform"}


@dataclass(frozen=True)
class Case:
    """One method in two programs.

    ours: settings (ours.py); theirs: what by_PEER.py is told. kept: what clients keep, by our name, is compared, too.
    why: where they differ, the key of the explanation in docs/oracles.md; reading: settings with which fedmpi does
    what the other program does (readings.py), which must take the difference away.
    """

    peer: str
    method: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    kept: str = ""
    loss: bool = True
    why: str = ""
    reading: dict[str, Any] = field(default_factory=dict)


def method(name: str, **options: Any) -> dict[str, Any]:
    return {"method": {"name": name, **options}}


def reading(name: str, **options: Any) -> dict[str, Any]:
    return method(f"readings{'_fluke' * name.startswith('Fluke')}:{name}", **options)


def server(name: str, **more: Any) -> dict[str, Any]:
    return {f"server.{key}": value for key, value in {"optim": name, **more}.items()}


SGD_SERVER = {"server.optim": "sgd", "server.lr": 1.0}
ADAM = {"lr": 0.03, "beta1": 0.9, "beta2": 0.99}
