"""Local training alone: what each client reaches without the others.

w_k <- SGD on F_k from w_k, all clients from the same initial model; nothing travels.            (1)
A client trains in the rounds in which it is sampled: cohort.fraction: 1 gives everybody rounds x epochs epochs, a
smaller one the epochs that it would have spent in a federation. Judge it by evaluate.protocol: [personal].
"""

from dataclasses import dataclass

from fedmpi.method import Method, Travel


@dataclass(frozen=True)
class Local(Method):
    def travels(self, t: int, rounds: int) -> Travel:
        return Travel(groups=())  # (1)
