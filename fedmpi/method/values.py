"""What hooks return, and what `Client.fit` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor


class Row(dict[str, Tensor]):
    """What a client uploads, one entry a declared slot: Row(dw=..., dc=...). The engine adds dw where it is missing."""


class State(dict[str, Tensor]):
    """Values of declared state: client.state.c_i, server.state.c to read; State(c_i=...) with all of it to return.

    What stays as it was is returned as it was: `client.state`, `server.state`, or State(**client.state, more=...).
    """

    def __getattr__(self, name: str) -> Tensor:
        try:
            return self[name]
        except KeyError:
            declared = ", ".join(self) or "none"
            raise AttributeError(f"no state {name!r} is declared here (declared: {declared})") from None

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"state {name!r} is read-only: return the new value, the engine stores it")


@dataclass(frozen=True)
class Quadratic:
    """weight / 2 ||w - anchor||^2 - <slope, w> of the live weights w, as `regularizer` may return it.

    The same as that formula in tensors, of which autograd takes the gradient, in a fifth of the time.
    """

    weight: float
    anchor: Tensor  # (d,)
    slope: Tensor | None = None  # (d,)

    def value(self, w: Tensor) -> Tensor:
        """Return the term at w (d,), ()."""
        value = self.weight / 2 * (w - self.anchor).square().sum()
        return value if self.slope is None else value - self.slope @ w

    def add_gradient(self, g: Tensor, w: Tensor) -> Tensor:
        """Add the gradient at w (d,) to g (d,), in place, and return that."""
        if self.slope is not None:
            g.sub_(self.slope)
        return g.add_(w - self.anchor, alpha=self.weight)


class Fitted:
    """What `Client.fit` gives back: `w`, `loss`, and both of them where it is unpacked; `b`."""

    w: Tensor  # (d,) trained weights
    b: Tensor  # (b,) the float buffers that go with them
    loss: Tensor  # () float64, mean over the steps made; 0 where none was

    def __init__(self, w: Tensor, b: Tensor, mean: Callable[[], Tensor]) -> None:
        """mean: gives the loss; few ask for it."""
        self.w, self.b, self._mean = w, b, mean

    def __getattr__(self, name: str) -> Tensor:
        if name != "loss":
            raise AttributeError(f"client.fit() gives w, b and loss, not {name!r}")
        self.loss = self._mean()
        return self.loss

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.w, self.loss))
