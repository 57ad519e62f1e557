"""The cases that are compared: a method in fedmpi and in another program, with the reason of known differences."""

from dataclasses import dataclass, field
from typing import Any

UNIFORM = {"cohort.weighting": "uniform"}


@dataclass(frozen=True)
class Case:
    """A method in fedmpi and in another program.

    Args:
        peer: the other program.
        method: the label of the method.
        ours: settings of fedmpi (ours.py).
        theirs: options for by_PEER.py.
        kept: a slot of fedmpi's client state that is compared, too.
        loss: compare the clients' mean loss.
        why: if they differ, the key of the explanation in docs/oracles.md.
        reading: settings with which fedmpi uses the other program's equations (readings.py), so that the difference
            must vanish.
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
    """Return the settings of a method by its name."""
    return {"method": {"name": name, **options}}


def reading(name: str, **options: Any) -> dict[str, Any]:
    """Return the settings of a method of readings.py."""
    return method(f"readings{'_fluke' * name.startswith('Fluke')}:{name}", **options)


def server(name: str, **more: Any) -> dict[str, Any]:
    """Return the settings of a server optimiser."""
    return {f"server.{key}": value for key, value in {"optim": name, **more}.items()}


SGD_SERVER = {"server.optim": "sgd", "server.lr": 1.0}
ADAM = {"lr": 0.03, "beta1": 0.9, "beta2": 0.99}
