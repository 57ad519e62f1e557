"""The trajectories of filter decomposition and of FedAvg on one loss landscape, with the clients of some rounds.

Chen, Qiu. Extra Clients at No Extra Cost. 2025. https://arxiv.org/abs/2503.08652, Fig. 4

    python examples/paper_figures/trajectory.py configs/quickstart.yaml rounds=25 method.atoms=9 --to figures

Both start from the same kernels, and use the same clients, cohorts and batches; FedAvg trains the plain network. A
model is a point that holds all its weights, with kernels alpha x D in place of alpha and D, so that both trajectories
lie in one space.
    plane     through the last model of filter decomposition, along the two principal directions of all models of both
              trajectories (Li 2018); models are projected onto it, and the loss is that of the points of the plane
    (i, j)    alpha_i x D_j of a round, with all other parts of the aggregate: i = j are the local clients, i != j the
              virtual clients. Their mean with weights p_i p_j is the next model
The loss is the mean over all training samples, in evaluation mode, without augmentation.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from safetensors.torch import save_file
from torch import Tensor

import fedmpi

sys.path.insert(0, str(Path(__file__).parent))
import recording

MARGIN = 0.15  # of the landscape around the models
Parameters = dict[str, Tensor]


def to_dense(model: Parameters) -> Parameters:
    """Return the parameters of a network with filter atoms as those of the plain network, W = alpha D."""
    plain = {name: x for name, x in model.items() if name.rpartition(".")[2] not in ("coef", "atoms")}
    for name, coef in model.items():
        if name.endswith(".coef"):
            atoms = model[name.removesuffix("coef") + "atoms"]
            kernels = (coef @ atoms.flatten(1)).view(*coef.shape[:2], *atoms.shape[1:])
            plain[name.removesuffix("coef") + "weight"] = kernels
    return plain


def to_point(model: Parameters) -> Tensor:
    """Return all parameters as a vector (n,) float64, in the order of their names."""
    return torch.cat([model[name].double().flatten() for name in sorted(model)])


def train(config: str, overrides: list[str], method: str) -> tuple[list[recording.Round], dict[str, Tensor]]:
    """Train a method; return the rounds of the run, and the state_dict of its last model."""
    recording.ROUNDS.clear()
    run = fedmpi.run(config, [f"method={{name: 'recording:{method}'}}", *overrides])
    return list(recording.ROUNDS), fedmpi.load(run["directory"], trust=True).state_dict()


def training_losses(config: str, overrides: list[str], like: Parameters, points: list[Tensor]) -> list[float]:
    """Return the training losses of plain models (n,)."""
    names = sorted(like)
    sizes = [like[name].numel() for name in names]
    recording.MODELS[:] = [
        {name: x.view(like[name].shape).float() for name, x in zip(names, each.split(sizes), strict=True)}
        for each in points
    ]
    recording.LOSSES[:] = [0.0] * len(points)
    train(config, [*overrides, "rounds=1", "cohort={fraction: 1.0}"], "EvaluateModels")
    return [total / sum(recording.SAMPLES.values()) for total in recording.LOSSES]


def combine_clients(of: recording.Round) -> list[tuple[int, int, Tensor]]:
    """Return (i, j, model) for all pairs of a round's clients: alpha_i x D_j, with the aggregate of all other parts."""
    mean = {name: sum(of.p[k] * x[name] for k, x in of.local.items()) for name in of.before}
    found = []
    for i, alpha in of.local.items():
        for j, atoms in of.local.items():
            parts = {"coef": alpha, "atom": atoms}
            found.append((i, j, to_point(to_dense({n: parts.get(g, mean)[n] for n, g in of.groups.items()}))))
    return found


class Plane:
    """The plane origin + x v1 + y v2 along the two unit directions in which the models (m, n) vary most.

    explained: the fraction of the variance of the models that lies in the plane.
    """

    def __init__(self, origin: Tensor, models: Tensor) -> None:
        _, s, v = torch.linalg.svd(models - models.mean(0), full_matrices=False)
        self.origin, self.v = origin, v[:2]  # (n,), (2, n)
        self.explained = (s[:2].square().sum() / s.square().sum()).item()

    def project(self, models: Tensor) -> Tensor:
        """Return the coordinates (..., 2) of models (..., n)."""
        return (models - self.origin) @ self.v.T

    def grid(self, models: Tensor, size: int) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return x and y (size,) around the projected models, and the points of the plane there, row by row."""
        at = self.project(models)
        low, high = at.amin(0), at.amax(0)
        room = MARGIN * (high - low).clamp(min=1e-9)
        x, y = (torch.linspace(*ends, size).double() for ends in zip(low - room, high + room, strict=True))
        return x, y, [self.origin + a * self.v[0] + b * self.v[1] for b in y for a in x]


def draw(facts: dict, path: Path) -> None:
    """Draw the training loss by round, both trajectories on the loss landscape, and the clients of some rounds."""
    figure = Figure(figsize=(12.6, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for (name, way), style in zip(facts["ways"].items(), ("o-", "s--"), strict=True):
        left.plot(way["loss"], style, markersize=3, label=name)
        middle.plot(*zip(*way["at"], strict=True), style, markersize=4, label=name)
    middle.plot(*facts["ways"]["fedatom"]["at"][0], "*", markersize=13, label="start of both")
    left.set(xlabel="communication round", ylabel="training loss")
    for local, marker, label in ((True, "v", "local atoms and coefficients"), (False, "x", "virtual clients")):
        at = [m["at"] for each in facts["rounds"] for m in each["models"] if (m["alpha"] == m["atoms"]) == local]
        right.scatter(*zip(*at, strict=True), marker=marker, s=26, label=label)
    own = facts["ways"]["fedatom"]["at"][facts["first"] : facts["last"] + 1]
    label = f"global model, rounds {facts['first']} to {facts['last']}"
    right.plot(*zip(*own, strict=True), "o-", color="C3", markersize=5, label=label)
    for axes, key in ((middle, "landscape"), (right, "near")):
        ground = facts[key]
        lines = axes.contour(ground["x"], ground["y"], ground["loss"], levels=10, colors="0.6", linewidths=0.8)
        axes.clabel(lines, fontsize="x-small", fmt="%.3g")
        axes.set(xlabel="along the first principal direction", ylabel="along the second")
    for axes in (left, middle, right):
        axes.legend(fontsize="small", framealpha=0.9)
    figure.savefig(path, dpi=150)


def measure(config: str, overrides: list[str], first: int, last: int, size: int, to: Path) -> dict:
    """Train both methods, and evaluate their models, those of the clients of some rounds, and two grids around them."""
    plain = [each for each in overrides if not each.startswith("method")]
    rounds, final = train(config, [*overrides, "name=trajectory-fedatom"], "RecordedFedAtom")
    if not 0 <= first < last <= len(rounds):
        raise SystemExit(f"--first {first} --last {last}: two of the {len(rounds)} rounds are needed, in this order")
    like = to_dense(rounds[0].before)
    save_file({name: x.contiguous() for name, x in like.items()}, to / "start.safetensors")
    start = [f"init.from={to / 'start.safetensors'}", "name=trajectory-fedavg"]
    fedavg, last_plain = train(config, [*plain, *start], "RecordedFedAvg")
    own = torch.stack(
        [*(to_point(to_dense(each.before)) for each in rounds), to_point({n: to_dense(final)[n] for n in like})]
    )
    other = torch.stack([*(to_point(each.before) for each in fedavg), to_point({n: last_plain[n] for n in like})])

    plane = Plane(own[-1], torch.cat([own, other]))
    clients = {t: combine_clients(rounds[t]) for t in range(first, last)}
    every = [v for found in clients.values() for _, _, v in found]
    grids = [plane.grid(torch.cat([own, other]), size), plane.grid(torch.stack([*own[first : last + 1], *every]), size)]
    save_file(
        {name: x.contiguous() for name, x in to_dense(final).items()}, to / "last.safetensors"
    )  # with its statistics
    judge = [*plain, f"init.from={to / 'last.safetensors'}", "name=trajectory-losses"]
    loss = iter(training_losses(config, judge, like, [*own, *other, *every, *grids[0][2], *grids[1][2]]))

    facts = {"first": first, "last": last, "explained": plane.explained, "ways": {}, "rounds": []}
    for name, way in (("fedatom", own), ("fedavg", other)):
        facts["ways"][name] = {"at": plane.project(way).tolist(), "loss": [next(loss) for _ in way]}
    for t, found in clients.items():
        models = []
        for i, j, v in found:
            p, distance = rounds[t].p[i] * rounds[t].p[j], (v - own[t + 1]).norm().item()
            facts_of = {"at": plane.project(v).tolist(), "loss": next(loss), "distance": distance}
            models.append({"alpha": i, "atoms": j, "p": p, **facts_of})
        facts["rounds"].append({"round": t, "models": models})
    for name, (x, y, _) in zip(("landscape", "near"), grids, strict=True):
        heights = [[next(loss) for _ in x] for _ in y]
        facts[name] = {"x": x.tolist(), "y": y.tolist(), "loss": heights}
    return facts


def main() -> None:
    """Parse the command line, measure, and draw the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE of the config; method.atoms, ... are fedatom's")
    parser.add_argument("--first", type=int, default=4, help="the first round whose clients are shown")
    parser.add_argument("--last", type=int, default=8, help="the round before which that ends")
    parser.add_argument("--grid", type=int, default=15, help="points a side of a landscape")
    parser.add_argument("--to", type=Path, default=Path("figures"))
    given = parser.parse_intermixed_args()
    given.to.mkdir(parents=True, exist_ok=True)
    facts = measure(given.config, given.overrides, given.first, given.last, given.grid, given.to)
    for each in facts["rounds"]:
        for name, local in (("local", True), ("virtual", False)):
            those = [m for m in each["models"] if (m["alpha"] == m["atoms"]) == local]
            loss, distance = (sum(m[key] for m in those) / len(those) for key in ("loss", "distance"))
            print(
                f"round {each['round']}, {name} clients: loss {loss:.4g}, distance from the next model {distance:.4g}"
            )
    print(f"the plane holds {100 * facts['explained']:.0f} % of how the models of both ways vary")
    (given.to / "trajectory.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    draw(facts, given.to / "trajectory.png")


if __name__ == "__main__":
    main()
