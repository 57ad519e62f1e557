"""FedLD. Zeng, Guo, et al. Tackling Data Heterogeneity in Federated Learning via Loss Decomposition. MICCAI 2024.
https://arxiv.org/abs/2408.12300

Client, margin control:         L = CE(f(x), y) + lambda mean_b log(1 + ||f(x_b)||^2)                    (3)
Server, principal gradients:    w <- w + sum_i p_i g_i',   g_i = w_i - w,                                (4)
    u_i = sum_{l <= L} lam_l <g_i, v_l> v_l,     g_i' = ||g_i|| u_i / ||u_i||                            (5)
with v_l, lam_l the leading directions of the updates (aggregation/principal.py). Each half has its switch: margin: 0,
with which the task may be any, and principal: false. (5) is the text's: the weighted sum of the projections gets the
update's length. correction: axis is Eq. 7 as printed, g_i' = ||g_i|| sum_l omega_l sgn<g_i, v_l> v_l; with share: l2 it
keeps the length too, with share: sum it does not, by as much as sqrt(L)/m where updates are nearly orthogonal, against
which the correction was meant. published: true sets what the authors' program does, on which their tables rest:
correction: axis, share: sum, scope: tensor, margin_on: probs, margin_norm: batch, plain_first_round: true; it also had
cohort.weighting: uniform and train.warmup_rounds: 5. Its vote for the sign of v_l changes nothing: the sign enters
twice.
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fedmpi.aggregation import rules
from fedmpi.common.errors import UserError
from fedmpi.method import CLASSES, Client, Method, Server, State, Uploads, declared, option
from fedmpi.methods import _terms

PUBLISHED = {
    "correction": "axis",
    "share": "sum",
    "scope": "tensor",
    "margin_on": "probs",
    "margin_norm": "batch",
    "plain_first_round": True,
}


@final
@dataclass(frozen=True)
class FedLD(Method):
    margin: float = option(0.03, "lambda, weight of the margin term; 0: off", ge=0)
    principal: bool = option(True, "aggregate along principal directions; false: FedAvg's server")
    keep: float = option(0.8, "kept share of the m principal directions", gt=0, le=1)
    correction: str = option("text", "what gets the update's length: the sum, or each part", choices=("text", "axis"))
    share: str = option(
        "l2", "omega_l of axis: lam_l over the sum of all, or over the l2 norm of the kept", choices=("sum", "l2")
    )
    scope: str = option("model", "directions of the whole model, or of each tensor", choices=("model", "tensor"))
    margin_on: str = option("logits", "what the margin term holds down", choices=("logits", "probs"))
    margin_norm: str = option("sample", "mean over samples, or one norm over the batch", choices=("sample", "batch"))
    plain_first_round: bool = option(False, "round 0 aggregates by the plain mean")
    published: bool = option(False, "the authors' program: sets all options but margin, principal and keep")

    paper = "Zeng et al., MICCAI 2024"
    neutral = {"margin": 0.0, "principal": False}

    def __post_init__(self) -> None:
        if self.share == "sum" and self.correction == "text" and not self.published:
            raise UserError("method.share: sum is a weight of correction: axis; text has none: add correction: axis")
        for name, value in PUBLISHED.items() if self.published else ():
            object.__setattr__(self, name, value)

    @declared
    def needs(self) -> frozenset[str]:
        return frozenset({CLASSES} if self.margin else ())  # without the margin term clients descend the task's loss

    def loss(self, k: Client, x: Tensor, y: Tensor) -> Tensor:
        f = k.logits(x)
        if not self.margin:
            return k.task_loss(f, x, y)
        held = f.softmax(1) if self.margin_on == "probs" else f
        return k.task_loss(f, x, y) + self.margin * _terms.margin(held, self.margin_norm)  # (3)

    def aggregate(self, s: Server, up: Uploads) -> tuple[Tensor, State]:
        if not self.principal or (self.plain_first_round and s.round == 0):
            return up.mean("dw"), State()
        direction = rules.principal(up, s, self.keep, self.share, self.scope, self.correction)  # type: ignore[arg-type]
        return direction, State()  # (4), (5)
