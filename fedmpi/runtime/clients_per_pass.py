"""Choose how many clients a rank trains at once (compute.clients_per_pass)."""

from __future__ import annotations

import warnings
from typing import Any

from fedmpi.common.errors import UserError
from fedmpi.config import Settings
from fedmpi.data.federated import FederatedData
from fedmpi.engine.local.local_training_config import LocalTrainingConfig
from fedmpi.engine.local.mlp_backward import MLPBackward
from fedmpi.engine.packed import packed_rounds
from fedmpi.flat.model import FlatModel
from fedmpi.method.base import Method, overrides
from fedmpi.tasks.base import Task
from fedmpi.tasks.classification import Classification


def choose_clients_per_pass(
    settings: Settings,
    data: FederatedData,
    method: Method,
    task: Any,
    model: FlatModel,
    local_training: LocalTrainingConfig,
) -> int:
    """Return the number of clients that a rank trains at once in one vectorised pass (compute.clients_per_pass).

    If the experiment does not support vectorised training of clients, `auto` means 1, with a warning.

    Raises:
        UserError: compute.clients_per_pass is a number, but the experiment does not support vectorised training.
    """
    s, train = settings, local_training
    clients_per_pass, bf16 = s.compute.clients_per_pass, s.compute.precision == "bf16"
    hook = getattr(type(task), "set_class_counts", Task.set_class_counts)
    balanced = s.task.options.get("class_weights") == "balanced"
    uses_counts = balanced if hook is Classification.set_class_counts else hook is not Task.set_class_counts
    reason: str | None = "the model has adapters (model.lora)" if s.model.lora is not None else None
    reason = reason or packed_rounds.unsupported_reason(
        *(method, model, train),
        bf16=bf16,
        compiled=s.compute.compile,
        checkpoints_activations=s.compute.gradient_checkpointing,
    )
    if s.privacy.dp is not None and s.privacy.dp.unit == "sample":
        reason = "clients draw batches of different sizes (privacy.dp.unit: sample)"
    elif isinstance(data.input_shape, dict):
        reason = "a sample consists of several tensors"
    elif uses_counts and not s.data.share_label_counts and not reason:
        reason = "the task weighs classes by the label counts of each client (data.share_label_counts: false)"
    if not reason:
        hooks = any(overrides(method, hook) for hook in ("loss", "regularizer", "correct_gradient"))
        chain = MLPBackward.create(model.module, task, len(data.input_shape) == 1)
        full = train.momentum or train.weight_decay or hooks or chain is None
        samples = 0 if full else (train.epochs or 0) * int(data.train_sizes.max(initial=0))
        return packed_rounds.choose_clients_per_pass(clients_per_pass, model, samples)
    if clients_per_pass != "auto":
        raise UserError(
            f"compute.clients_per_pass: {clients_per_pass} is not possible: clients must be trained one at a time, "
            f"because {reason}; {packed_rounds.REMEDY}"
        )
    warnings.warn(f"compute.clients_per_pass: auto: clients are trained one at a time, because {reason}", stacklevel=3)
    return 1
