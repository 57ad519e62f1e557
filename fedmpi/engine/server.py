"""Rank 0's part of a round: the global model and the method's server state, and the step that updates both.

w <- server_optim(w, direction), and float buffers <- weighted mean of the uploaded buffers. The method's `aggregate`
computes the direction and the new server state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fedmpi.aggregation.lora import RESIDUAL_NUMBER, LoraAggregation
from fedmpi.aggregation.server_optimizers import ServerOptimizer
from fedmpi.aggregation.update_stats import GramRecordingUploads, compute_update_stats
from fedmpi.comm import RankLostError
from fedmpi.common import seeds
from fedmpi.common.errors import UserError
from fedmpi.common.user_code_errors import add_error_context, make_located_error
from fedmpi.data.federated import FederatedData
from fedmpi.engine import hook_checks
from fedmpi.engine.base_weights import BaseWeights
from fedmpi.engine.faults.upload_filter import NOT_FINITE, REMEDY, UpdateFilter
from fedmpi.engine.messages import CLIP, MessageLayouts, UploadLayout
from fedmpi.engine.model_selection import BestModel, SelectionCriterion
from fedmpi.engine.private_release import PrivateRelease, ReleasedMeans
from fedmpi.engine.transport.gather import GatheredUploads
from fedmpi.flat.layout import Segment
from fedmpi.flat.packing import Views
from fedmpi.method.base import overrides
from fedmpi.method.context import Server, State, Uploads

ServerRule = Callable[[Uploads, Server], Tensor]


class ServerView(Server):
    """The argument `server` of the method's hooks; the same object during the whole run."""

    def __init__(self, data: FederatedData, lr: float, rounds: int, seed: int) -> None:
        """Create the view; the global model and the state are set by `FederationServer`."""
        self.clients, self.classes, self.rounds, self.lr = data.clients, data.classes, rounds, lr
        self.counts, self.label_counts_shared = torch.from_numpy(data.label_counts), data.label_counts_shared
        self.round, self.train_lr = 0, 0.0
        self.segments: Sequence[Segment] = ()
        self.w = self.shared = torch.empty(0)
        self.state, self.rule_state = State(), Views({})
        self.logged: dict[str, float] = {}
        self.seed = seed

    @property
    def label_counts(self) -> Tensor:  # type: ignore[override]
        if not self.label_counts_shared:
            raise UserError(
                "server.label_counts is not available, because sites do not share their label counts "
                "(data.share_label_counts is false), or because privacy.dp.unit is client; a method that needs them "
                "must declare needs = {LABEL_COUNTS}"
            )
        return self.counts

    def log_metrics(self, **values: float | Tensor) -> None:
        self.logged |= {name: float(value) for name, value in values.items()}

    def generator(self, *purpose: str | int) -> torch.Generator:
        return seeds.torch_generator(self.seed, "server", *purpose)


class FederationServer:
    """The global model (weights w (d,), buffers b), the server state that the method declares, and the server step."""

    def __init__(
        self,
        messages: MessageLayouts,
        storage: tuple[Tensor, Tensor],
        initial: tuple[Tensor, Tensor],
        optimizer: ServerOptimizer,
        view: ServerView,
        rule: ServerRule | None = None,
        criterion: SelectionCriterion | None = None,
        recorded_stats: str | bool = False,
        update_filter: UpdateFilter | None = None,
        lora: LoraAggregation | None = None,
        base_weights: BaseWeights | None = None,
        privacy: PrivateRelease | None = None,
    ) -> None:
        """Create the server with the initial global model.

        Args:
            storage: existing buffers in which w and b are stored.
            view: the argument `server` of the method's hooks.
            rule: a server rule that computes the direction in place of the method; None: the method computes it.
            criterion: how the best model is selected; None: no selection.
            recorded_stats: which statistics of updates are recorded: "norms", "gram" or False (none).
            update_filter: decides which uploads are aggregated.
            lora: the aggregation of adapters (server.lora); None: the model has none.
            base_weights: the base weights that it changes; None: it changes none.
            privacy: makes noisy means of the uploads (differential privacy of clients); None: there is no noise.
        """
        self.messages, self.method = messages, messages.method
        self.optimizer, self.view, self.rule, self.lora = optimizer, view, rule, lora
        self.w, self.b = (place.copy_(values) for place, values in zip(storage, initial, strict=True))
        self.state_row = messages.initial_state("server_state", self.w, self.b)
        for name, slot in self.method.server_state.items():
            if isinstance(slot.start, str) and slot.start not in messages.options:
                self._set_start_value(name, slot.start)
        self.rule_row, self.base_weights = self.w.new_zeros(messages.rule_state.size), base_weights
        self.rule_state = messages.rule_state.views(self.rule_row)
        views = messages.server_state.views(self.state_row)
        self.privacy = privacy
        if privacy is not None:
            view.label_counts_shared = False  # exact counts are not covered by the noise
            messages.rule_state.write(self.rule_row, {CLIP: privacy.mechanism.clip})
        self.state = State({name: getattr(views, name) for name in views})
        view.state, view.w, view.rule_state = self.state, self.w, self.rule_state
        self._hook_inputs = {"server.w": self.w, "server.state": self.state_row, "server.label_counts": view.counts}
        self.best = BestModel(criterion, self.w, self.b) if criterion else None
        self.recorded_stats = recorded_stats
        self.update_stats = dict[str, Any]()  # of the last step (aggregation/update_stats.py)
        self.update_filter = update_filter or UpdateFilter()
        self.refused_clients = list[int]()  # clients whose uploads were refused in the last step

    def _set_start_value(self, name: str, hook: str) -> None:
        """Set the start value of the server state's slot `name` to the result of the method's hook `hook`."""
        packing, where = self.messages.server_state, "at the start"
        with add_error_context(where), seeds.temporary_seed(self.view.seed, hook, self.view.round):
            given = {name: getattr(self.method, hook)(packing.shapes[name], self.view.generator("start", name))}
        hook_checks.check_slots(self.method, hook, given, self.method.server_state, packing, where, self.w, required=())
        hook_checks.check_finite(self.method, hook, packing, given[name].flatten(), where)
        packing.write(self.state_row, given)

    def snapshot(self) -> dict[str, Tensor]:
        """Return CPU copies of all tensors that checkpoints store, by name."""
        dense = torch.contiguous_format  # base weights of convolutions may be channels_last
        return {name: x.to("cpu", copy=True, memory_format=dense) for name, x in self._state_tensors().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors that `snapshot` returned."""
        for name, tensor in self._state_tensors().items():
            if name in tensors or not name.startswith("best"):  # the saved run may not have selected a best model
                tensor.copy_(tensors[name])
        if self.base_weights is not None:
            self.base_weights.number = int(getattr(self.rule_state, RESIDUAL_NUMBER))

    def _state_tensors(self) -> dict[str, Tensor]:
        """Return the server's tensors that are stored in checkpoints, by name."""
        tensors = {"w": self.w, "b": self.b, "state": self.state_row, "optimizer": self.optimizer.state}
        if len(self.rule_row):
            tensors |= {"rule": self.rule_row}
        if self.base_weights is not None:
            tensors |= self.base_weights.tensors()
        return tensors | (self.best.state_tensors if self.best else {})

    def download(self, t: int, client: int) -> Mapping[str, Tensor]:
        """Call the method's hook `download` for one client in round t, check its result, and return it."""
        self.view.round, where = t, f"round {t}, client {client}"
        inputs = hook_checks.ReadOnlyCheck(self._hook_inputs)
        with add_error_context(where), seeds.temporary_seed(self.view.seed, "download", t, client):
            row = self.method.download(self.view, client)
        inputs.raise_if_written(self.method, where, "download")
        declared, packing = self.method.per_client_download, self.messages.per_client_download
        hook_checks.check_slots(self.method, "download", row, declared, packing, where, self.w)
        return row

    def release_means(self, t: int, upload: UploadLayout, received: GatheredUploads, weights: Tensor) -> ReleasedMeans:
        """Return the noisy means of a round's uploads, and store the clip norm of the next round.

        Args:
            weights: (m,) the weights of the clients.
        """
        assert self.privacy is not None
        clip, b = float(getattr(self.rule_state, CLIP)), upload.b.take(self.b)
        means, clip = self.privacy.release(t, upload, received, weights, b, clip)
        self.messages.rule_state.write(self.rule_row, {CLIP: clip})
        return means

    def step(
        self,
        t: int,
        train_lr: float,
        updates: Uploads,
        upload: UploadLayout,
        received: GatheredUploads,
        norms: Mapping[int, float],
    ) -> dict[str, float]:
        """Update the global model and the server state with the uploads of a round.

        Args:
            train_lr: the learning rate of the clients in this round.
            updates: the uploads that are aggregated, as hooks see them.
            upload: the layout of the uploads.
            received: the gathered uploads that `updates` reads.
            norms: client -> ||dw||, the norm of its model change.

        Returns:
            The metrics that the method itself has logged.
        """
        recorder: GramRecordingUploads | None = None
        if self.recorded_stats and "dw" in upload.packing.shapes and upload.w.size:
            recorder = updates = GramRecordingUploads(updates)
        view = self.view
        view.round, view.train_lr, view.logged = t, train_lr, {}
        view.segments, view.shared = upload.dw_layout.segments, upload.w.take(self.w)
        direction, state = self._aggregate(f"round {t}", updates, upload, received)
        rule_state: Mapping[str, Tensor] = {}
        if self.lora is not None and "dw" in upload.packing.shapes:
            direction, rule_state = self.lora(updates, view, direction)
        b = updates.mean("_b") if upload.b.size else None
        tensors = [
            x.to(self.w.dtype) for x in (direction, *state.values(), *rule_state.values(), b) if isinstance(x, Tensor)
        ]
        if not (received.sums_contain_all_rows and all(hook_checks.are_finite(tensors))):
            bad = [str(k) for k, finite in zip(updates.clients, received.finite_rows(), strict=True) if not finite]
            who = f"client {', '.join(bad)} sent" if bad else "the server's direction, state or buffers contain"
            raise UserError(f"round {t}: {who} {NOT_FINITE}; the round was discarded. {REMEDY}")
        self.update_stats = {}
        if recorder is not None:
            self.update_stats = {
                "updates": compute_update_stats(recorder, norms, direction, self.recorded_stats == "gram")
            }
        # From here on no messages are exchanged, so that a rank failure cannot interrupt a half-finished update.
        direction = direction.detach().to(self.w.dtype)
        if upload.w.selects_all:
            self.optimizer.step(self.w, direction, self.optimizer.state)
        elif upload.w.size:  # entries that were not sent keep their values, also in the optimiser's state
            w, moments = upload.w.take(self.w).clone(), upload.w.take(self.optimizer.state).clone()
            self.optimizer.step(w, direction, moments)
            upload.w.put(w, self.w)
            upload.w.put(moments, self.optimizer.state)
        if b is not None:
            upload.b.put(b, self.b)
        if self.privacy is not None:
            self.privacy.raise_variances(self.b)
        if state is not self.state:  # otherwise the state does not change
            self.messages.server_state.write(self.state_row, state)
        self.messages.rule_state.write(self.rule_row, rule_state)
        return view.logged

    def _aggregate(
        self, where: str, updates: Uploads, upload: UploadLayout, received: GatheredUploads
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Compute the direction and the new server state with `aggregate` or a server rule, and check them."""
        method, view, size = self.method, self.view, (upload.dw_layout.size,)
        ruled: Any = None
        if isinstance(updates, ReleasedMeans):
            inputs = {f"updates.mean({slot!r})": mean for slot, mean in updates.means.items()}
        else:
            inputs = {"updates": received.small_rows, "updates.p": updates.p, "updates.n": updates.n}
        read = hook_checks.ReadOnlyCheck({**self._hook_inputs, **inputs})
        own = self.rule is not None or overrides(method, "aggregate")  # code that may draw from the global generators
        chance = seeds.temporary_seed(view.seed, "aggregate", view.round) if own else nullcontext()
        with add_error_context(where, RankLostError), chance:  # RankLostError: the code may query other ranks
            direction, state = hook_checks.check_pair(method, "aggregate", method.aggregate(view, updates), where)
            read.raise_if_written(method, where, "aggregate")
            if self.rule is not None:
                ruled = self.rule(updates, view)
                read.raise_if_written(method, where, by=self.rule)
        hook_checks.check_tensor(method, "aggregate", direction, size, where, self.w)
        declared, packing = method.server_state, self.messages.server_state
        hook_checks.check_slots(method, "aggregate", state, declared, packing, where, self.w)
        if self.rule is None:
            return direction, state
        if text := hook_checks.describe_mismatch(ruled, size, (self.w.device.type,)):
            text = f"{where}: the server rule returned {text}; it must return a float tensor of shape {size}"
            raise make_located_error(text, self.rule)
        return ruled, state
