"""Local steps with differential privacy of the samples: DP-SGD, whose equations are in privacy/sample_level.py.

Batches and noise are derived from a secret key: whoever knew the batches could compute the gradients of a single
sample more exactly than the stated epsilon permits. The gradients of the samples are computed by torch.func for many
samples at once, or sample by sample for models that torch.vmap does not support. Models of linear layers need neither
(linear_gradients.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.inputs import Inputs
from fedmpi.common.user_code_errors import make_located_error
from fedmpi.data.batches import Shard, gather_samples
from fedmpi.engine.client_trainer import ClientTrainer
from fedmpi.engine.hook_checks import METHODS_WITH_PRIVATE_STEPS, require_unprotected_samples
from fedmpi.engine.local.client_context import ClientContext
from fedmpi.engine.local.linear_gradients import LinearGradients, norm_factors
from fedmpi.engine.local.losses import run_pass
from fedmpi.engine.packed.vmap_steps import BatchedClientView
from fedmpi.flat.layout import Selection
from fedmpi.method.base import Method
from fedmpi.models.net import FeaturesAndHead
from fedmpi.privacy.budget import PrivacyBudget
from fedmpi.privacy.noise import NoiseKey
from fedmpi.privacy.sample_level import SampleMechanism

# On a CPU, gradients of single samples with more entries than this are computed one by one, which is then faster.
MAX_VMAP_ENTRIES_ON_CPU = 1 << 18
MAX_GRADIENT_ENTRIES = 1 << 26  # gradients of single samples that are in memory at once: 256 MiB in float32
MAX_ENTRIES_PER_DRAW, MAX_STEPS_PER_DRAW = 1 << 16, 64  # of random numbers that are drawn at once
SampleGradients = Callable[[Tensor, Tensor], Tensor]  # x (B, ...), y (B, ...) -> gradients (B, d)


class SampleView(BatchedClientView):
    """The `client` that the hook `loss` receives for a single sample under torch.vmap."""

    def __getattr__(self, name: str) -> Any:
        if name == "label_counts":
            require_unprotected_samples(self.first, name)
        return super().__getattr__(name)

    def _call(self, net: FeaturesAndHead, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with self.trainer.autocast_context():
            z, f = super()._call(net, w, x)
        return z.to(w.dtype), f.to(w.dtype)


class PrivateSteps:
    """Draws the batches of DP-SGD and computes the gradients of its steps, for the clients of one rank."""

    def __init__(self, mechanism: SampleMechanism) -> None:
        """Create the steps; `key` and `budget` are set when the run has an identifier.

        Attributes:
            key: the key from which batches and noise are derived.
            attempts: round -> number of times that it was begun. It distinguishes the noise of a round that is repeated
                after a failure from that of the first attempt.
            budget: the releases of the run so far; None except on rank 0 of a run.
        """
        self.mechanism = mechanism
        self.key: NoiseKey | None = None
        self.budget: PrivacyBudget | None = None
        self.attempts = Counter[int]()
        self._vmap_works: bool | None = None  # None: not yet known

    def record_release(self, t: int) -> None:
        """Record, on rank 0, that clients are about to train in round t."""
        if self.budget is not None:
            self.budget.record_release(t)

    def iterate_batches(self, client: ClientContext, epochs: int | None) -> Iterator[tuple[Any, Tensor]]:
        """Yield the Poisson batch (x, y) of each step of a fit(), with its rows in ascending order; it may be empty.

        Args:
            epochs: number of epochs that replaces the configured epochs or steps; None: as configured.

        Raises:
            UserError: the client would take more steps in the round than the accounting assumes.
        """
        trainer, config = client.trainer, client.trainer.local_training
        shard, rate = trainer.data.train[client.id], self.mechanism.rates[client.id]
        augment = trainer.make_generators(client.round, client.id, client.num_fits)[1]
        _, steps = config.passes_and_steps(client.n, epochs=epochs)
        _, steps_per_pass = config.passes_and_steps(client.n, epochs=1)
        planned = self.mechanism.steps[client.id]
        if client.private_steps + steps > planned:
            raise UserError(
                f"{client.where}: method {type(trainer.method).__name__} takes more steps in a round than train.epochs "
                f"or train.steps sets ({client.private_steps + steps} in place of {planned}), which the epsilon of "
                f"privacy.dp.unit: sample does not cover; choose {METHODS_WITH_PRIVATE_STEPS}, or set "
                "privacy.dp.unit: client"
            )
        uniform = RowsByStep(self._key.uniform, len(shard), "sample batch", *self._purpose(client))
        b = trainer.model.b.clone()
        for step in range(steps):
            if client.stops_on_request and trainer.stop():
                break
            client.epoch, client.last_epoch = step // steps_per_pass, steps - step <= steps_per_pass
            drawn = uniform[client.private_steps] < rate
            yield _read_batch(shard, drawn.nonzero().view(-1), augment)
            client.private_steps += 1
        if not torch.equal(trainer.model.b, b):
            raise make_located_error(
                f"{client.where}: model {type(trainer.model.module).__name__} has changed its float buffers, "
                "which then contain statistics of the samples without noise (privacy.dp.unit: sample); leave out the "
                "layers that do this, or set privacy.dp.unit: client",
                trainer.model.module,
            )

    def make_gradient_function(
        self, client: ClientContext, method: Method, parameters: Sequence[nn.Parameter]
    ) -> Callable[[Any, Tensor], None]:
        """Return a function (x, y) -> None that writes the gradient of a step, with noise, to the flat gradient.

        Args:
            method: the method whose hook `loss` is used.
            parameters: the parameters that are trained; only their entries are clipped and get noise.
        """
        trainer, model = client.trainer, client.trainer.model
        of_trained = {id(p) for p in parameters}
        trained = model.layout.select_segments(s for s, p in model.segment_parameters if id(p) in of_trained)
        linear = LinearGradients.create(trainer, method, parameters)
        vmapped = None
        if linear is None and self._supports_vmap(client, method):
            vmapped = self._make_vmapped(client, method)
        noise_std = self.mechanism.noise_multiplier_of(client.id) * self.mechanism.clip

        def draw_noise(n: int, *purpose: str | int) -> Tensor:
            return self._key.gaussian(n, noise_std, *purpose)

        noise = RowsByStep(draw_noise, trained.size, "sample noise", *self._purpose(client))
        batch_size = self.mechanism.expected_batch_size(client.id, client.n)

        def form_gradient(x: Any, y: Tensor) -> None:
            if linear is not None:
                total = trained.take(linear.sum_clipped(x, y, self.mechanism.clip))
            elif vmapped is not None:
                total = self._sum_chunks(client, vmapped, trained, x, y)
            else:
                total = self._sum_one_by_one(client, method, trained, x, y)
            total.add_(noise[client.private_steps].to(total.device, total.dtype)).div_(batch_size)
            trained.put(total, model.attach_gradient().zero_())

        return form_gradient

    @property
    def _key(self) -> NoiseKey:
        assert self.key is not None, "the key is set before training starts"
        return self.key

    def _purpose(self, client: ClientContext) -> tuple[int, ...]:
        """Return what distinguishes the random numbers of this fit() of a client from those of all others."""
        return client.round, self.attempts[client.round], client.id, client.num_fits

    # ---- the gradients of single samples ----
    def _supports_vmap(self, client: ClientContext, method: Method) -> bool:
        """Return whether to use torch.vmap; whether model and method permit it is tried once, on a sample."""
        if self._vmap_works is None and client.n:
            trainer, module = client.trainer, client.trainer.model.module
            self._vmap_works = not (
                trainer.checkpoints_activations
                or isinstance(trainer.data.input_shape, dict)
                or any(isinstance(part, nn.RNNBase) for part in module.modules())
                or (client.w.is_cpu and len(client.w) > MAX_VMAP_ENTRIES_ON_CPU)
            )
            if self._vmap_works:
                x, y = _read_batch(trainer.data.train[client.id], torch.zeros(1, dtype=torch.int64), None)
                try:
                    with seeds.preserve_rng_state():
                        self._make_vmapped(client, method)(x, y)
                except RuntimeError:
                    self._vmap_works = False
        return bool(self._vmap_works)

    def _make_vmapped(self, client: ClientContext, method: Method) -> SampleGradients:
        """Return a function that computes the gradients of all samples of a batch at the current weights."""
        view, trainer = SampleView(client.trainer, [client]), client.trainer
        constants = {
            "w0": client.w0,
            "received": client.received,
            "state": client.state_row,
            "download": client.download_row,
            "accumulators": client.accumulator_row,
        }

        def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
            view.values = constants | {"w": w}
            client.task_loss_scale = _weight_of_sample(trainer, y[None])
            try:
                return method.loss(view, x[None], y[None])  # type: ignore[arg-type]
            finally:
                client.task_loss_scale = None

        vmapped = torch.vmap(grad(loss), (None, 0, 0), randomness="different")

        def compute(x: Tensor, y: Tensor) -> Tensor:
            view.epoch, view.last_epoch = client.epoch, client.last_epoch
            gradients: Tensor = vmapped(client.w, x, y)
            return gradients

        return compute

    def _sum_chunks(
        self, client: ClientContext, gradients: SampleGradients, trained: Selection, x: Tensor, y: Tensor
    ) -> Tensor:
        """Return the sum of the clipped gradients of a batch over the trained entries, computed in several chunks."""
        total, chunk = client.w.new_zeros(trained.size), max(MAX_GRADIENT_ENTRIES // trained.full_size, 1)
        for start in range(0, len(y), chunk):
            rows = trained.take(gradients(x[start : start + chunk], y[start : start + chunk]))
            total += clip_factors(rows, self.mechanism.clip) @ rows
        return total

    def _sum_one_by_one(self, client: ClientContext, method: Method, trained: Selection, x: Any, y: Tensor) -> Tensor:
        """Return the sum of the clipped gradients of a batch over the trained entries, computed sample by sample."""
        total = client.w.new_zeros(trained.size)
        for i in range(len(y)):
            client.task_loss_scale = _weight_of_sample(client.trainer, y[i : i + 1])
            run_pass(client, method.loss, True, x[i : i + 1], y[i : i + 1], parts=1)
            client.task_loss_scale = None
            row = trained.take(client.trainer.model.attach_gradient())[None]
            total += clip_factors(row, self.mechanism.clip) @ row
        return total


class RowsByStep:
    """One row of random numbers for each step; several rows are drawn at a time, because each draw has a fixed cost."""

    def __init__(self, draw: Callable[..., Tensor], width: int, *purpose: str | int) -> None:
        """Create the rows.

        Args:
            draw: a function (n, *purpose) -> n random numbers.
            width: number of entries of a row.
        """
        self._draw, self._width, self._purpose = draw, width, purpose
        self._rows_per_block = max(min(MAX_ENTRIES_PER_DRAW // max(width, 1), MAX_STEPS_PER_DRAW), 1)
        self._block, self._rows = -1, torch.empty(0)

    def __getitem__(self, step: int) -> Tensor:
        block, row = divmod(step, self._rows_per_block)
        if block != self._block:
            numbers = self._draw(self._rows_per_block * self._width, *self._purpose, block)
            self._block, self._rows = block, numbers.view(self._rows_per_block, self._width)
        return self._rows[row]


def clip_factors(gradients: Tensor, clip: float) -> Tensor:
    """Return the factors min(1, clip / ||g||) of gradients (B, d), (B,); gradients that are not finite become zero.

    Args:
        gradients: the gradients; rows with nan or inf are set to zero in place.
        clip: the largest norm.
    """
    norms = torch.linalg.vector_norm(gradients, dim=1, dtype=torch.float64)
    gradients.masked_fill_(~norms.isfinite()[:, None], 0)
    return norm_factors(norms, clip).to(gradients.dtype)


def _read_batch(shard: Shard, positions: Tensor, augment: torch.Generator | None) -> tuple[Any, Tensor]:
    """Return the samples and targets at these positions of a client's rows; the batch may be empty.

    Args:
        positions: positions in `shard.index`, (B,) int64.
        augment: draws the random numbers of augmentation; None: images are not augmented.
    """
    # A single row is read in place of no row, because readers of images need one.
    rows = shard.index[positions if len(positions) else slice(1)].to(shard.y.device)
    count, u = len(positions), None
    if augment is not None:
        u = torch.rand(len(rows), shard.random_numbers_per_sample, generator=augment).to(shard.y.device)
    x = shard.x.index_select(0, rows) if isinstance(shard.x, Inputs) else gather_samples(shard.x, rows, u)
    return x[:count], shard.y.index_select(0, rows)[:count]


def _weight_of_sample(trainer: ClientTrainer, y: Tensor) -> Tensor | None:
    """Return the weight of a sample in the loss of a batch if the task weights samples, otherwise None.

    Args:
        y: the target of the sample, (1, ...).
    """
    weight = trainer.task.loss_weight(y)
    return weight if isinstance(weight, Tensor) and weight.is_floating_point() else None
