"""Count the floating-point operations of the local steps of a method, compared with FedAvg (FedSOL, Table 5).

The client with the most training samples trains for one round, with the config's method and with FedAvg, on the same
batches. The cost of a step is the mean over all steps except the first, in which some methods compute less because the
weights have not changed yet. Numbers are per sample. Only matrix products and convolutions are counted; elementwise
operations and the optimiser's step are not. A multiply-add counts as two operations (torch.utils.flop_counter).
    forward     forward passes that record a graph for autograd
    backward    backward passes of autograd
    frozen      forward passes without gradients: teachers, anchors, features
The cost of a round is everything that the client computes, including computations between steps. The paper writes the
cost of a step as 2x + delta: delta is the cost of frozen passes, relative to FedAvg's step, and 2x that of the other
passes.
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

from fedmpi.analysis import output
from fedmpi.analysis.local_models import load_all_data, train_local_models
from fedmpi.comm.base import SingleProcess
from fedmpi.common import formatting
from fedmpi.common.errors import UserError
from fedmpi.common.redaction import redact
from fedmpi.config.schema import MethodSettings, Settings
from fedmpi.data.federated import FederatedData
from fedmpi.engine.local.client_context import ClientContext, StepCallback
from fedmpi.runtime import build

KINDS = ("forward", "backward", "frozen")


class OperationCounter(TorchDispatchMode):
    """Context manager that counts floating-point operations.

    Attributes:
        count: (3,) int64, the numbers of forward, backward and frozen operations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count, self._pass = torch.zeros(len(KINDS), dtype=torch.int64), ModuleTracker()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            kind = "backward" if self._pass.is_bw else "forward" if torch.is_grad_enabled() else "frozen"
            self.count[KINDS.index(kind)] += formula(*args, **(kwargs or {}), out_val=out)
        return out


def analyse_flops(settings: Settings, to: Path, print_line: Callable[[str], None]) -> None:
    """Count the operations of the config's method and of FedAvg, print them, and write flops.json."""
    to, (data, device) = output.create_output_folder(to), load_all_data(settings)
    client = int(data.train_sizes.argmax())
    plain = settings.model_copy(update={"method": MethodSettings(name="fedavg")})
    measurements = [count_operations(each, data, device, client) for each in (plain, settings)]
    step, per_round = measurements[0]["step"], measurements[0]["round"]
    for each in measurements:
        each |= {"ratio": each["step"] / step, "delta": each["frozen"] / step, "round_ratio": each["round"] / per_round}
    samples, steps = int(data.train_sizes[client]), measurements[1]["steps"]
    print_line(f"client {client}: {samples:,} samples, {steps:,} steps; operations per sample")
    head = ("method", *KINDS, "step / FedAvg's", "frozen / FedAvg's", "round / FedAvg's")
    keys = ("method", *KINDS, "ratio", "delta", "round_ratio")
    for line in formatting.format_table([head, *(tuple(each[key] for key in keys) for each in measurements)]):
        print_line(line)
    facts = {"client": client, "samples": samples, "methods": measurements}
    config = redact(settings.model_dump(mode="json"))
    print_line(f"written: {output.write_json(to / 'flops.json', {**facts, 'config': config})}")


def count_operations(settings: Settings, data: FederatedData, device: torch.device, client: int) -> dict[str, Any]:
    """Count the operations of one client's local training in round 0.

    Returns:
        A dict. `method` and `options`: the name and the options of the method; `steps`: the number of steps; `forward`,
        `backward`, `frozen`, and their sum `step`: operations per sample and step; `round`: operations per training
        sample in the whole round.

    Raises:
        UserError: if the client takes fewer than two steps.
    """
    experiment = build.make_experiment(settings, data, device)
    fed = build.make_federation(experiment, SingleProcess(device), lambda: False)
    counter, steps, start = OperationCounter(), list[tuple[int, Tensor]](), torch.zeros(len(KINDS), dtype=torch.int64)

    def make_training_step_callback(_: ClientContext) -> StepCallback:
        start.copy_(counter.count)
        return lambda x, y: steps.append((len(y), counter.count.clone()))  # the count when the gradient is there

    trainer = build.make_trainer(experiment, lambda: False)
    trainer.mlp_backward = None  # its backward passes do not use autograd; with autograd the operations are the same
    train_local_models(fed, trainer, [client], 0)  # creates the frozen models, which runs them once, not to be counted
    with counter:
        train_local_models(fed, trainer, [client], 0, make_training_step_callback)
    name = settings.method.name
    if len(steps) < 2:
        raise UserError(
            f"method {name}: client {client} makes fewer than 2 steps with the model that is sent, and the first is "
            "not measured; increase train.epochs or train.steps, or reduce train.batch_size"
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
