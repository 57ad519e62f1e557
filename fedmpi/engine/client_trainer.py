"""The trainer of a rank's clients, with the model that they share, frozen copies of it, the data, and the method."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from fedmpi.common import seeds
from fedmpi.data.federated import FederatedData
from fedmpi.engine.hook_checks import UnsentTensorGuard
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

# Hooks that are called while clients train.
CLIENT_HOOKS = ("initial_weights", "train", "loss", "regularizer", "correct_gradient", "step", "upload")


class ClientTrainer:
    """Holds the model, task, method and data with which one rank trains its clients, one after another."""

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
        checkpoints_activations: bool = False,
        drops_bad_updates: bool = False,
        drops_failed_clients: bool = False,
        clients_per_pass: int = 1,
        strict: bool = True,
        graphs: bool | str = False,
        stop: Callable[[], bool] = lambda: False,
        changing: Collection[Tensor] = (),
        private_steps: Any = None,
        bounds_uploads: bool = False,
    ) -> None:
        """Set up the training of this rank's clients, with the given parts of the experiment.

        Args:
            model: the flat model in which all clients of the rank are trained.
            net: the same model, split into features and head.
            messages: the layouts of messages and of client state.
            bf16: whether to train with bf16 autocast.
            checkpoints_activations: whether layers of the model run forward again in the backward pass.
            drops_bad_updates: whether the server leaves updates with nan or inf out of the aggregate; otherwise such an
                update ends the run.
            drops_failed_clients: whether a client is left out of the round if its code raises an error.
            clients_per_pass: the number of clients that are trained together in one batched pass.
            strict: whether to raise an error if clients cannot be trained together; otherwise they are trained one by
                one.
            graphs: whether to capture training passes as CUDA graphs; "auto": capture them if all of their code is
                known to permit it.
            stop: a function that returns whether the run has been asked to stop.
            changing: the frozen parameters that the server changes (server.lora).
            private_steps: the `PrivateSteps` (local/private_steps.py) by which all clients train, so that their samples
                have differential privacy; None: they train without it.
            bounds_uploads: whether clients clip their uploads (differential privacy of clients).
        """
        self.model, self.net, self.task, self.method = model, net, task, method
        self.data, self.messages, self.local_training, self.seed = data, messages, local_training, seed
        self.bounds_uploads = bounds_uploads
        self.bf16, self.checkpoints_activations, self.stop = bf16, checkpoints_activations, stop
        self.drops_bad_updates, self.drops_failed_clients = drops_bad_updates, drops_failed_clients
        self.clients_per_pass, self.strict, self.private_steps = clients_per_pass, strict, private_steps
        captures = graphs is True or (graphs == "auto" and consists_of_known_parts(model.module, task))
        self.graphs = PassGraphs(strict=graphs is True) if captures else None
        self._frozen_copies: list[tuple[FlatModel, FeaturesAndHead]] = []
        self.empty_row = model.w.new_empty(0)
        self.initial_gradient_weight = nan if local_training.not_plain_sgd_reason() else 0.0
        self._broadcast: tuple[Tensor | None, Views] = (None, Views({}))  # the newest broadcast row, and its fields
        self.unsent_tensor_guard = UnsentTensorGuard(model, changing)
        is_plain = not overrides(method, "loss") and not bf16 and local_training.accumulate == 1
        self.fast_loss = _make_fast_loss(model.module, task) if is_plain else None
        # Whether code of the model or of hooks may draw from the global random generators.
        self.may_draw_random_numbers = self.fast_loss is None or any(overrides(method, hook) for hook in CLIENT_HOOKS)
        vectors = not isinstance(data.input_shape, dict) and len(data.input_shape) == 1
        self.mlp_backward = MLPBackward.create(model.module, task, vectors) if self.fast_loss else None
        self.train_sizes = data.train_sizes  # number of training samples of each client
        self.label_counts = torch.from_numpy(data.label_counts).to(model.w.device)  # (N, classes)
        # Passes label counts to a task that weighs classes. It is called once with the sum over all clients; if counts
        # are private to the sites, it is called with a client's own counts before that client trains.
        self.set_class_counts: Callable[[Tensor], object] = getattr(task, "set_class_counts", lambda counts: None)
        if data.label_counts_shared:
            self.set_class_counts(self.label_counts.sum(0))

    def make_generators(self, t: int, client: int, fit: int) -> tuple[torch.Generator, torch.Generator | None]:
        """Return the random generators for a client's `fit`-th call to fit() in round t.

        Returns:
            The generator for the order of samples, and the generator for augmentation (None if samples are not
            augmented).
        """
        is_augmented = self.data.train[client].random_numbers_per_sample > 0
        augment = seeds.torch_generator(self.seed, "augment", t, client, fit) if is_augmented else None
        return seeds.torch_generator(self.seed, "batches", t, client, fit), augment

    def synchronize(self) -> None:
        """Wait until the GPU, if there is one, has finished its work, so that its time can be measured."""
        if self.model.w.is_cuda:
            torch.cuda.current_stream(self.model.w.device).synchronize()

    def autocast_context(self) -> AbstractContextManager[Any]:
        """Return the autocast context for bf16 if bf16 is configured, otherwise a context manager that does nothing.

        Weights, gradients and messages keep the model's dtype.
        """
        return torch.autocast(self.model.w.device.type, torch.bfloat16) if self.bf16 else nullcontext()

    def unpack_broadcast(self, broadcast_row: Tensor) -> Views:
        """Return the fields of a broadcast row by name; all clients of this rank get the same tensor objects."""
        if self._broadcast[0] is not broadcast_row:
            self._broadcast = broadcast_row, self.messages.broadcast_layout().packing.views(broadcast_row)
        return self._broadcast[1]

    def frozen_copy(self, number: int) -> tuple[FlatModel, FeaturesAndHead]:
        """Return frozen copy `number` of the model, which has the same layout; it is created on first use."""
        while len(self._frozen_copies) <= number:
            model = self.model.frozen_copy()
            self._frozen_copies.append((model, FeaturesAndHead(model.module, self.data.input_shape, self.data.x_dtype)))
        return self._frozen_copies[number]


def _make_fast_loss(module: nn.Module, task: Any) -> Callable[[Any, Tensor, Tensor], Tensor] | None:
    """Return a function (client, x, y) that computes the task's loss, or None if the model or task is not built in.

    To save time, the function calls layers without the forward hooks of torch modules. This is safe for the built-in
    chains of layers, because they draw no random numbers and keep no state between calls.
    """
    forward = make_forward_without_hooks(module)
    if forward is None or type(task).loss not in (Classification.loss, Regression.loss):
        return None
    return lambda client, x, y: task.loss(forward, x, y)
