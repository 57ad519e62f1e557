"""Rounds with adapters (server.lora) against a federated loop with dense matrices, written from the papers."""

import copy
import json

import numpy as np
import pytest
import torch

import fedmpi as package
from fedmpi import config
from fedmpi.aggregation.lora import RULES
from fedmpi.analysis.local_models import load_all_data
from fedmpi.common import seeds, torchvision_compat  # noqa: F401  (before peft imports torchvision)
from fedmpi.runtime import build_model

pytest.importorskip("peft", reason="pip install 'fedmpi[lora]'")
pytest.importorskip("transformers", reason="pip install 'fedmpi[hf]'")
ROUNDS, STEPS, LR, LAYERS = 3, 3, 0.3, ("conv", "linear", "conv1d")
MODEL = """
from torch import nn
from transformers.pytorch_utils import Conv1D

class Mixed(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.stem, self.conv = nn.Conv2d(1, 3, 1), nn.Conv2d(3, 5, (3, 2), stride=2)
        self.linear = nn.Linear(60, 14)
        self.conv1d, self.head = Conv1D(9, 14), nn.Linear(9, classes)

    def forward(self, x):
        return self.head(self.conv1d(self.linear(self.conv(self.stem(x)).relu().flatten(1)).relu()).relu())
"""
CONFIG = f"""
name: mixed
rounds: {ROUNDS}
data: {{source: digits, partition: {{scheme: dirichlet, clients: 4, alpha: 0.5}}}}
model: {{name: model.py:Mixed, lora: {{r: 2, alpha: 4, targets: [{", ".join(LAYERS)}]}}}}
method: {{name: fedavg}}
train: {{batch_size: full, epochs: {STEPS}, lr: {LR}, momentum: 0, weight_decay: 0}}
"""


def train_naively(module, data, cohorts, rule, transposed=("conv1d",)):
    """Train a module with adapters; return its state_dict after the last round."""
    for t, cohort in enumerate(cohorts):
        samples = [(shard.x[shard.index], shard.y[shard.index]) for shard in (data.train[k] for k in cohort)]
        p = [len(y) / sum(len(y) for _, y in samples) for _, y in samples]
        clients = [copy.deepcopy(module) for _ in cohort]
        for client, (x, y) in zip(clients, samples, strict=True):
            trained = [value for value in client.parameters() if value.requires_grad]
            for _ in range(STEPS):
                loss = torch.nn.functional.cross_entropy(client(x), y)
                for value, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
                    value.data -= LR * gradient
        values = [client.state_dict() for client in clients]
        deltas = {
            name: [x.get_submodule(name).get_delta_weight("default").detach() for x in clients] for name in LAYERS
        }
        mean = {name: sum(w * v[name] for w, v in zip(p, values, strict=True)) for name in values[0]}
        module.load_state_dict(mean)
        for number, name in enumerate(LAYERS):
            layer = module.get_submodule(name)
            a, b, w = layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.get_base_layer().weight
            exact = sum(w * delta for w, delta in zip(p, deltas[name], strict=True))
            if rule == "exact":
                w.data += exact - layer.get_delta_weight("default").detach()
            elif rule == "stack":
                w.data += exact
                bound = a[0].numel() ** -0.5
                generator = seeds.torch_generator(0, "server", "lora", t, number)
                a.data.uniform_(-bound, bound, generator=generator)
                b.data.zero_()
            elif rule == "svd":
                matrix = (exact.T if name in transposed else exact.flatten(1)) / layer.scaling["default"]
                u, s, rows = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
                squares = [v[f"{name}.lora_A.default.weight"].square().sum().item() for v in values]
                length = np.sqrt(np.dot(p, squares) / 2)  # the rows of A have the mean norm of the clients' rows
                b.data.copy_(torch.from_numpy(u[:, :2] * s[:2] / length).view(b.shape))
                a.data.copy_(torch.from_numpy(rows[:2] * length).view(a.shape))
    return module.state_dict()


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("rule", RULES)
def test_the_model_is_that_of_a_loop_with_dense_matrices(tmp_path, monkeypatch, rule, size):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "run.yaml").write_text(CONFIG)
    settings = config.load("run.yaml", [f"server.lora={rule}", f"cohort.size={size}"])
    package.run(settings)
    folder = tmp_path / "runs" / "mixed"
    rounds = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    data, _ = load_all_data(settings)
    initial = build_model.make_module(settings, data.input_shape, data.classes)
    trained = package.load(folder, trust=True)
    naive = copy.deepcopy(initial)
    naive.load_state_dict(train_naively(copy.deepcopy(initial), data, [row["cohort"] for row in rounds], rule))
    x = data.global_test.x
    with torch.no_grad():
        got, expected = trained(x), naive(x)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert (expected - initial(x)).abs().max() > 0.05
