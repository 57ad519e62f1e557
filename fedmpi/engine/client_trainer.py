"""The objects with which a rank trains its clients: one model, frozen copies of it, the data, and the method."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common import seeds
from fedmpi.data.federated import FederatedData
from fedmpi.engine.hook_checks import FrozenTensorGuard
from fedmpi.engine.local.graphs import PassGraphs, consists_of_known_parts
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.local.mlp_backward import MLPBackward
from fedmpi.engine.messages import MessageLayouts
from fedmpi.flat.model import FlatModel
from fedmpi.flat.packing import Views
from fedmpi.method.base import Method, overrides
from fedmpi.models.mlp import make_forward_without_hooks
from fedmpi.models.net import FeaturesAndHead
from fedmpi.tasks.classification import Classification
from fedmpi.tasks.regression import Regression

# hooks that are called while clients train
HOOKS = ("initial_weights", "train", "loss", "regularizer", "correct_gradient", "step", "upload")


class ClientTrainer:
    """Trains the clients of one rank, one after another in the same model."""

    def __init__(
        self,
        model: FlatModel,
        net: FeaturesAndHead,
        task: Any,
        method: Method,
        data: FederatedData,
        messages: MessageLayouts,
        local_training: LocalTrainingConfig,
        seed: int,
        *,
        bf16: bool = False,
        drops_bad_updates: bool = False,
        drops_failed_clients: bool = False,
        pack: int = 1,
        strict: bool = True,
        graphs: bool | str = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Args:
        drops_bad_updates: leave the decision about updates that are not finite to the server; otherwise they end the
        run.
        drops_failed_clients: leave a client out of the round if its code raises an error.
        pack: number of clients that are trained at once.
        strict: end the run if clients cannot be trained at once; otherwise they are trained one after another.
        graphs: whether to capture training passes as CUDA graphs; "auto": if all of their code is known to permit it.
        """
        self.model, self.net, self.task, self.method = model, net, task, method
        self.data, self.messages, self.local_training, self.seed = data, messages, local_training, seed
        self.bf16, self.stop = bf16, stop
        self.drops_bad_updates, self.drops_failed_clients = drops_bad_updates, drops_failed_clients
        self.pack, self.strict = pack, strict
        captures = graphs is True or (graphs == "auto" and consists_of_known_parts(model.module, task))
        self.graphs = PassGraphs(strict=graphs is True) if captures else None
        self._frozen_copies: list[tuple[FlatModel, FeaturesAndHead]] = []
        self.nothing = model.w.new_empty(0)
        self.initial_gradient_weight = (
            nan if local_training.not_plain_sgd_reason() else 0.0
        )  # the initial value of a client's `a`
        self._broadcast: tuple[Tensor | None, Views] = (None, Views({}))  # the latest broadcast, and its fields
        self.frozen_guard = FrozenTensorGuard(model)
        self.direct = None if overrides(method, "loss") or bf16 else _direct(model.module, task)
        # Whether code that is not fedmpi's may draw from the global random generators.
        self.draws = self.direct is None or any(overrides(method, hook) for hook in HOOKS)
        vectors = not isinstance(data.input_shape, dict) and len(data.input_shape) == 1
        self.mlp_backward = MLPBackward.of(model.module, task, vectors) if self.direct else None
        self.sizes = data.train_sizes  # number of training samples of each client
        self.label_counts = torch.from_numpy(data.label_counts).to(model.w.device)  # (N, classes)
        # Passes label counts to a task that weighs classes: once the sum over all clients, or, if counts are private to
        # the sites, those of each client before it trains.
        self.set_class_counts: Callable[[Tensor], object] = getattr(task, "set_class_counts", lambda counts: None)
        if data.label_counts_shared:
            self.set_class_counts(self.label_counts.sum(0))

    def generators(self, t: int, client: int, fit: int) -> tuple[torch.Generator, torch.Generator | None]:
        """Return the random generators of a client's call number `fit` of fit() in round t.

        Returns:
            The generator of the order of samples, and that of augmentation, which is None if samples are not augmented.
        """
        is_augmented = self.data.train[client].random_numbers_per_sample > 0
        augment = seeds.torch_generator(self.seed, "augment", t, client, fit) if is_augmented else None
        return seeds.torch_generator(self.seed, "batches", t, client, fit), augment

    def wait(self) -> None:
        """Wait until a GPU has finished its work, so that its time can be measured."""
        if self.model.w.is_cuda:
            torch.cuda.current_stream(self.model.w.device).synchronize()

    def precision(self) -> AbstractContextManager[Any]:
        """Return the autocast context of bf16 training if it is configured, else an empty context.

        Weights, gradients and messages keep the model's type.
        """
        return torch.autocast(self.model.w.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def unpack_broadcast(self, announcement: Tensor) -> Views:
        """Return the fields of the broadcast row `announcement`, as the same tensors for all clients of this rank."""
        if self._broadcast[0] is not announcement:
            self._broadcast = announcement, self.messages.broadcast_layout().packing.views(announcement)
        return self._broadcast[1]

    def frozen_copy(self, number: int) -> tuple[FlatModel, FeaturesAndHead]:
        """Return the frozen copy of the model with this number, in the same layout; it is created on first use."""
        while len(self._frozen_copies) <= number:
            model = self.model.frozen_copy()
            self._frozen_copies.append((model, FeaturesAndHead(model.module, self.data.input_shape, self.data.x_dtype)))
        return self._frozen_copies[number]


def _direct(module: nn.Module, task: Any) -> Callable[[Any, Tensor, Tensor], Tensor] | None:
    """Return FedAvg's loss as a function if only fedmpi's own code computes it for this model and task; else None.

    Such code draws no random numbers and stores nothing.
    """
    forward = make_forward_without_hooks(module)
    if forward is None or type(task).loss not in (Classification.loss, Regression.loss):
        return None
    return lambda k, x, y: task.loss(forward, x, y)
