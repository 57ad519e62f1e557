"""FedProx: a proximal term keeps local weights close to the received weights.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020. https://arxiv.org/abs/1812.06127

Client k, which received w0, minimises
    F_k(w) + (mu/2) ||w - w0||^2      (2)
The server is FedAvg's, and mu = 0 is FedAvg.
"""

from dataclasses import dataclass

from fedmpi.method import Client, Method, Quadratic, option


@dataclass(frozen=True)
class FedProx(Method):
    """FedProx: FedAvg with a proximal term."""

    mu: float = option(0.01, "weight of the proximal term", ge=0)

    equals_fedavg_at = {"mu": 0.0}

    def regularizer(self, client: Client) -> Quadratic | None:
        return Quadratic(self.mu, client.w0) if self.mu else None  # of (2)
