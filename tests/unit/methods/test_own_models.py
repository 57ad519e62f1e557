"""A client's own model: without the others it is local training, with batch statistics of its own passes."""

import pytest
import torch
from helpers import play, settings
from naive import NET, flat, loss_of, module_of, rows_of, train_epochs

PLAIN = {"momentum": 0.0, "weight_decay": 0.0}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(
    ("method", "options", "fit", "name", "train"),
    [
        ("local", {}, 0, "_w", {}),
        ("ditto", {"lam": 0.0}, 1, "v", {}),  # the second fit of a client's round
        ("apfl", {"alpha": 1.0, "adapt": "never"}, 0, "v", PLAIN),
    ],
    ids=["local", "ditto", "apfl"],
)
def test_without_the_others_it_is_local_training(method, options, fit, name, train, momentum):
    """Against SGD with a fresh optimiser in each round in which a client takes part."""
    train = {"epochs": 2, "momentum": 0.9, "weight_decay": 1e-3, "schedule": "exponential", "decay": 0.9, **train}
    it = play(settings(method, options=options, rounds=4, train=train, model={**NET, "momentum": momentum}))
    modules = {}
    for row in it.rows:
        for k in row["cohort"]:
            module = modules.setdefault(k, module_of(it, it.w0, it.b0)).train()
            if momentum is None:
                module[1].num_batches_tracked.zero_()  # an average over this round's batches
            lr, decay = 0.05 * 0.9 ** row["round"], train["weight_decay"]
            train_epochs(module, rows_of(it, k), (row["round"], k, fit), lr, 2, train["momentum"], decay)
    assert len(modules) >= 5
    losses = {line["client"]: line["loss"] for line in it.lines if line["round"] == 3}
    for k, module in modules.items():
        torch.testing.assert_close(getattr(it.kept(k), name), flat(module))
        assert losses[k] == pytest.approx(loss_of(module, rows_of(it, k, "test")), rel=1e-6)


@pytest.mark.parametrize("head", ["global", "local"])
def test_fedatoms_own_atoms_have_their_own_statistics(head):
    it = play(settings("fedatom_personal", options={"atoms": 3, "pers_head": head}, rounds=1, model=NET))
    for k in it.rows[0]["cohort"]:
        assert not torch.equal(it.kept(k).own_b, it.b)
