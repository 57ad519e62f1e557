"""FedAvg: clients train the global model on their own samples, and the server averages the results.

McMahan, Moore, Ramage, Hampson, Aguera y Arcas. AISTATS 2017. https://arxiv.org/abs/1602.05629

w_k = E epochs of SGD on F_k from w;     w <- w + sum_k p_k (w_k - w),   p_k = n_k / sum_j n_j over the cohort.
These are the defaults of all hooks, so the class overrides none.
"""

from dataclasses import dataclass

from fedmpi.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """FedAvg, which the default hooks of Method implement."""

    equals_fedavg_at = {}
