"""What a local step costs beside FedAvg's, in floating-point operations (FedSOL, Table 5): counted while it is made.

The client with the most training samples makes its first round, with the config's method and with FedAvg, in the same
batches. A step is the mean over its steps but the first, in which nothing has moved yet and some methods do less; all
is told per sample. Operations are those of matrix products and convolutions, two a multiplication with its addition
(torch.utils.flop_counter); what goes entry by entry, the optimiser's step too, is left out.
    forward     passes with a graph behind them
    backward    autograd's passes back
    frozen      passes without gradient: teachers, anchors, features
A round is all that the client does, outside of steps too. In the paper's terms, 2x + delta, delta is frozen passes over
FedAvg's step, and 2 the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from torch.utils.module_tracker import ModuleTracker

from fedmpi.analysis import report
from fedmpi.analysis.local_models import data_of, local_models
from fedmpi.comm.base import Solo
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import redacted
from fedmpi.config.schema import MethodSettings, Settings
from fedmpi.data.federated import Federated
from fedmpi.engine.local.context import ClientContext, Watch
from fedmpi.runtime import build

KINDS = ("forward", "backward", "frozen")


class Counter(TorchDispatchMode):
    """Counts while it is entered. count: (3,) int64, operations of each of KINDS so far."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self._pass = torch.zeros(len(KINDS), dtype=torch.int64), ModuleTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            kind = "backward" if self._pass.is_bw else "forward" if torch.is_grad_enabled() else "frozen"
            self.count[KINDS.index(kind)] += formula(*args, **(kwargs or {}), out_val=out)
        return out


def analyse(settings: Settings, to: Path, say: Callable[[str], None]) -> None:
    """`fedmpi analyse flops`."""
    to, (data, device) = report.folder(to), data_of(settings)
    client = int(data.train_sizes.argmax())
    plain = settings.model_copy(update={"method": MethodSettings(name="fedavg")})
    measurements = [measure(each, data, device, client) for each in (plain, settings)]
    step, per_round = measurements[0]["step"], measurements[0]["round"]
    for each in measurements:
        each |= {"ratio": each["step"] / step, "delta": each["frozen"] / step, "round_ratio": each["round"] / per_round}
    samples, steps = int(data.train_sizes[client]), measurements[1]["steps"]
    say(f"client {client}: {samples:,} samples, {steps:,} steps; operations a sample")
    head = ("method", *KINDS, "step / FedAvg's", "frozen / FedAvg's", "round / FedAvg's")
    keys = ("method", *KINDS, "ratio", "delta", "round_ratio")
    for line in formatting.table([head, *(tuple(each[key] for key in keys) for each in measurements)]):
        say(line)
    facts = {"client": client, "samples": samples, "methods": measurements}
    config = redacted(settings.model_dump(mode="json"))
    say(f"written: {report.write(to / 'flops.json', {**facts, 'config': config})}")


def measure(settings: Settings, data: Federated, device: torch.device, client: int) -> dict[str, Any]:
    """One client's first round. Raises UserError where it makes fewer than two steps."""
    made = build.experiment(settings, data, device)
    fed = build.federation(made, Solo(device), lambda: False)
    counter, steps, start = Counter(), list[tuple[int, Tensor]](), torch.zeros(len(KINDS), dtype=torch.int64)

    def watch(_: ClientContext) -> Watch:
        start.copy_(counter.count)
        return lambda x, y: steps.append((len(y), counter.count.clone()))  # samples, and the count after their gradient

    trainer = build.make_trainer(made, lambda: False)
    trainer.mlp_backward = None  # its passes back are not autograd's; the operations are the same
    local_models(fed, trainer, [client], 0)  # frozen models are made, which runs them once
    with counter:
        local_models(fed, trainer, [client], 0, watch)
    name = settings.method.name
    if len(steps) < 2:
        raise UserError(
            f"method {name}: client {client} makes {len(steps)} step(s) of the model that travels, and a first "
            "one tells little; set train.epochs or train.steps higher, or train.batch_size lower"
        )
    a_step = (steps[-1][1] - steps[0][1]).double() / sum(n for n, _ in steps[1:])
    per_round = (counter.count - start).double().sum() / max(int(data.train_sizes[client]), 1)
    return {
        "method": name,
        "options": settings.method.options,
        "steps": len(steps),
        **dict(zip(KINDS, a_step.tolist(), strict=True)),
        "step": a_step.sum().item(),
        "round": per_round.item(),
    }
