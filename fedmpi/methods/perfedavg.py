"""Per-FedAvg: clients train a global model that performs well after one gradient step on a client's own data.

Fallah, Mokhtari, Ozdaglar. Personalized Federated Learning: A Meta-Learning Approach. NeurIPS 2020.
https://arxiv.org/abs/2002.07948

A step of local training on batches b1, b2, b3:
    w' = w - alpha grad F(w; b1)                                                                   (1)
    first_order   w <- w - beta grad F(w'; b2)                                                     (2)
    hessian_free  w <- w - beta (v - alpha (grad F(w + delta v; b3) - grad F(w - delta v; b3)) / (2 delta))
                  with v = grad F(w'; b2)                                                          (3)
    exact         w <- w - beta (v - alpha H(w; b3) v)                                             (4)
alpha is the learning rate of the inner step (1). beta is train.lr; the optimiser, with momentum and weight decay, takes
only the outer step. An epoch has floor(batches / 2) steps, or floor(batches / 3) for (3) and (4). A client with fewer
batches takes one step, on halves (thirds) of its samples. alpha: 0 is FedAvg; b1 and b3 are then not drawn. The
fine-tuning of ft(e) is plain SGD with learning rate alpha, whatever train.optim is; with tuning: meta it consists of
the steps above, as in the code of FedSOL's authors.
"""

from dataclasses import dataclass

from torch import Tensor

from fedmpi.method import Client, Method, declared_property, option


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Per-FedAvg: model-agnostic meta-learning of a global model that is easy to personalise."""

    alpha: float = option(0.01, "learning rate of the inner step; 0: FedAvg", ge=0)
    variant: str = option(
        "first_order",
        "second-order term of the outer gradient: left out, by differences, or exact",
        choices=("first_order", "hessian_free", "exact"),
    )
    delta: float = option(0.001, "step size of the finite difference in (3), in multiples of v", gt=0)
    tuning: str = option("plain", "steps of ft(e): plain SGD, or those of training", choices=("plain", "meta"))

    loss_is_sample_mean = True
    equals_fedavg_at = {"alpha": 0.0}

    @declared_property
    def batches_per_step(self) -> int:
        return 1 if not self.alpha else 2 if self.variant == "first_order" else 3

    def step(self, client: Client, x: Tensor, y: Tensor) -> Tensor:
        if not self.alpha:
            return client.grad(x, y)
        n, count = len(y), self.batches_per_step
        size = client.batch_size or n
        size = (
            size if n > (count - 1) * size else -(-n // count)
        )  # too few samples for full batches: divide them evenly
        parts = [(x[at : at + size], y[at : at + size]) for at in range(0, n, size)]
        b1, b2, b3 = parts[0], parts[1 % len(parts)], parts[-1]  # a single sample serves as all three batches
        inner = client.w - self.alpha * client.grad(*b1)  # (1)
        v = client.grad(*b2, at=inner)  # (2)
        if self.variant == "hessian_free":
            forward, backward = (client.grad(*b3, at=client.w + sign * self.delta * v) for sign in (1, -1))
            return v - (forward - backward) * (self.alpha / (2 * self.delta))  # (3)
        return v - self.alpha * client.hessian_vector_product(*b3, v) if self.variant == "exact" else v  # (4)

    def finetune(self, client: Client, epochs: int) -> None:
        if self.tuning == "meta":
            client.fit(epochs)
        else:
            client.fit(epochs, lr=self.alpha, plain_sgd=True)
