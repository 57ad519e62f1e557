"""Local training without federation: a baseline that shows what each client achieves alone.

All clients start from the same initial model, and no weights are sent.
w_k <- SGD on F_k from w_k                                                                       (1)
A client trains in the rounds in which it is sampled. With cohort.fraction: 1 each client trains for rounds x epochs
epochs; with a smaller fraction it trains for as many epochs as in a federation with that fraction. Evaluate it with
evaluate.protocol: [personal].
"""

from dataclasses import dataclass

from fedmpi.method import Method, SharedParts


@dataclass(frozen=True)
class Local(Method):
    """Local training without federation."""

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(groups=())  # (1)
