"""FedGH: gradient harmonisation, which removes conflicting components of the clients' updates before they are averaged.

Zhang, Sun, Chen. 2023. https://arxiv.org/abs/2309.06692

For each pair of clients i < j whose updates conflict, <g_i, g_j> < 0:
    g_i <- g_i - (<g_i, g_j> / ||g_j||^2) g_j,    g_j <- g_j - (<g_i, g_j> / ||g_i||^2) g_i    at the same time     (1)
and then  w <- w + sum_i p_i g_i.  Later pairs use the updates that earlier pairs have changed.                     (2)
variant: hierarchical is the code that FedLD's authors call FedGH in their comparison. For each tensor, clients are
paired by the product of their updates with a running mean of past directions; conflicts within a pair are removed, the
pair is summed, and the sums are paired again (aggregation/gradient_harmonization.py);                               (3)
    history <- 0.99 history + 0.01 direction; in round 0 both are the unweighted mean of the updates                 (4)
(Another method named FedGH shares prototypes.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmpi.aggregation import rules
from fedmpi.aggregation.gradient_harmonization import harmonize_as_in_fedld_code
from fedmpi.method import SHARED, Method, Server, Slots, State, Uploads, declared_property, option

HISTORY_DECAY = 0.99  # weight of the history in (4)


@dataclass(frozen=True)
class FedGH(Method):
    """FedGH: FedAvg after conflicts between the clients' updates have been removed."""

    variant: str = option(
        "pairwise", "how clients are paired to remove conflicts", choices=("pairwise", "hierarchical")
    )

    @declared_property
    def server_state(self) -> Slots:
        return Slots(history=SHARED) if self.variant == "hierarchical" else Slots()

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        if self.variant == "pairwise":
            return rules.harmonize(updates, server), State()  # (1), (2)
        if server.round == 0:
            direction = updates.mean("dw", updates.uniform)
            return direction, State(history=direction)  # (4)
        parts = []
        for segment in server.segments:
            span = segment.start, segment.stop
            along = updates.inner_products(server.state.history[slice(*span)], "dw", span)
            coefficients = harmonize_as_in_fedld_code(updates.gram("dw", span), along)  # (3)
            parts.append(updates.combine(coefficients, "dw", span))
        direction = torch.cat(parts)
        return direction, State(history=HISTORY_DECAY * server.state.history + (1 - HISTORY_DECAY) * direction)  # (4)
