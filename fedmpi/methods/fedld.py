"""FedLD: clients add a margin term to the loss, and the server aggregates along principal directions of the updates.

Zeng, Guo, et al. Tackling Data Heterogeneity in Federated Learning via Loss Decomposition. MICCAI 2024.
https://arxiv.org/abs/2408.12300

Client, margin control:         L = CE(f(x), y) + lambda mean_b log(1 + ||f(x_b)||^2)                    (3)
Server, principal gradients:    w <- w + sum_i p_i g_i',   g_i = w_i - w,                                (4)
    u_i = sum_{l <= L} lam_l <g_i, v_l> v_l,     g_i' = ||g_i|| u_i / ||u_i||                            (5)
v_l and lam_l are the L leading principal directions of the updates of m clients, and their eigenvalues
(aggregation/rules.py). margin: 0 turns (3) off, and then the task need not be classification; principal: false turns
(4) and (5) off. variant chooses between three readings of (5):
    text     as above, from the sentence before (5) in the paper: the weighted sum of the projections is scaled to the
             length of the update
    printed  g_i' = ||g_i|| sum_l omega_l sgn<g_i, v_l> v_l with omega_l = lam_l / ||(lam_1 .. lam_L)||, which also has
             the length of the update
    code     the authors' code, which produced their tables: as printed, but with omega_l = lam_l / sum of all lam,
             which shortens updates (to sqrt(L)/m of their length if they are nearly orthogonal). v_l is computed for
             each tensor separately, (3) uses probabilities and one norm over the batch, and round 0 averages updates
The authors' code also used cohort.weighting: uniform and train.warmup_rounds: 5. It determines the sign of v_l by a
vote, which changes nothing, because v_l occurs twice in each term. The rule server.rule: {name: principal, ...} has
more options.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fedmpi.aggregation import rules
from fedmpi.method import CLASSES, Client, Method, Server, State, Uploads, declared_property, option

# Options of the rule `principal` for each reading of (5).
VARIANTS: dict[str, dict[str, Any]] = {
    "text": {"correction": "text"},
    "printed": {"correction": "axis", "share": "l2"},
    "code": {"correction": "axis", "share": "sum", "scope": "tensor"},
}
REPLACED = "was replaced by `variant`: text, printed (correction: axis) or code (published: true)"


def large_logits_penalty(f: Tensor, norm: str = "sample") -> Tensor:
    """Return the penalty mean_b log(1 + ||f_b||^2) on large logits f (B, c).

    With norm="batch" it is log(1 + ||f||^2), with one norm over the batch.
    """
    if norm == "batch":
        return f.square().sum().log1p()
    return f.square().sum(1).log1p().mean()


@dataclass(frozen=True)
class FedLD(Method):
    """FedLD: a margin term in the loss, and aggregation along principal directions."""

    margin: float = option(0.03, "lambda, weight of the margin term; 0: off", ge=0)
    principal: bool = option(True, "aggregate along principal directions; false: FedAvg's server")
    keep: float = option(0.8, "fraction of the m principal directions that is kept", gt=0, le=1)
    variant: str = option("text", "reading of (5): its text, as printed, or the authors' code", choices=VARIANTS)

    equals_fedavg_at = {"margin": 0.0, "principal": False}
    REPLACED_OPTIONS = dict.fromkeys(
        ("correction", "share", "scope", "margin_on", "margin_norm", "plain_first_round", "published"), REPLACED
    )

    @declared_property
    def needs(self) -> frozenset[str]:
        return frozenset({CLASSES} if self.margin else ())  # without the margin term the loss is the task's

    @declared_property
    def loss_is_sample_mean(self) -> bool:
        return not self.margin or self.variant != "code"  # otherwise (3) has one norm over the batch

    def loss(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        f = client.logits(x)
        if not self.margin:
            return client.task_loss(f, x, y)
        term = large_logits_penalty(f.softmax(1), "batch") if self.variant == "code" else large_logits_penalty(f)
        return client.task_loss(f, x, y) + self.margin * term  # (3)

    def aggregate(self, server: Server, updates: Uploads) -> tuple[Tensor, State]:
        if not self.principal or (self.variant == "code" and server.round == 0):
            return updates.mean("dw"), State()
        return rules.principal(updates, server, self.keep, **VARIANTS[self.variant]), State()  # (4), (5)
