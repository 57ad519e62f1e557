"""LG-FedAvg: clients share the last layers of the model, and each keeps its own lower layers.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency. Think Locally, Act Globally. 2020.
https://arxiv.org/abs/2001.01523

theta_g are the shared last layers; the layers below, theta_l,k, are never sent.
(theta_l,k, theta_g) <- SGD on F_k, jointly;     theta_g <- sum_k p_k theta_g,k                        (1)
theta_g are the last n_shared linear layers; the authors use n_shared: 2. They average uniformly (cohort.weighting:
uniform) and start from a model that FedAvg has trained. Here all clients start from the same initial model.
"""

from dataclasses import dataclass

from torch import nn

from fedmpi.common.errors import UserError
from fedmpi.flat.layout import HEAD
from fedmpi.method import LAST_LAYER, Method, SharedParts, option

GLOBAL = "global"  # layout group of the shared layers below the head


@dataclass(frozen=True)
class LGFedAvg(Method):
    """LG-FedAvg: FedAvg on the last linear layers, with personal layers below them."""

    n_shared: int = option(1, "number of linear layers that are shared, counted from the end", ge=1)

    needs = frozenset({LAST_LAYER})

    def shared_parts(self, t: int, rounds: int) -> SharedParts:
        return SharedParts(groups=(HEAD, GLOBAL) if self.n_shared > 1 else (HEAD,))  # (1)

    def prepare_model(self, module: nn.Module, classes: int) -> nn.Module:
        """Assign the last n_shared - 1 linear layers below the head to the layout group "global", which is shared."""
        linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        if len(linear) < self.n_shared:
            raise UserError(
                f"method.n_shared: {self.n_shared} is not allowed; must be at most {len(linear)}, the number "
                "of linear layers of the model"
            )
        groups: dict[str, str] = getattr(module, "parameter_groups", dict)()
        for layer in linear[-self.n_shared : -1]:
            groups |= {f"{layer}.{leaf}": GLOBAL for leaf, _ in module.get_submodule(layer).named_parameters()}
        module.parameter_groups = lambda: groups  # type: ignore[assignment]
        return module
