"""FedPara and pFedPara (4.6) in a federation: factors are averaged, W is not; W_2 stays where it is personal."""

import pytest
import torch
from helpers import play, prepare, settings
from naive import assert_is_fedavg, assert_own_parts, module_of, pieces, rows_of, train_epochs, weighted_mean

from fedmpi.models.fedpara import OWN

CNN = {"train": {"weight_decay": 1e-3}, "cohort": {"fraction": 0.3}}  # 32 -> 64 maps and 256 -> 512 units shrink


def test_factors_are_averaged():
    """One round by hand: each client by plain SGD on its copy of the factorised net, then the mean of parameters."""
    it = play(settings("fedpara", "cnn", rounds=1, **CNN))
    modules, sizes = [], []
    for k in it.rows[0]["cohort"]:
        modules.append(module_of(it, it.w0).train())
        train_epochs(modules[-1], rows_of(it, k), (0, k, 0), weight_decay=1e-3)
        sizes.append(len(rows_of(it, k)[0]))
    mean = weighted_mean(sizes, [[p.detach() for p in module.parameters()] for module in modules])
    torch.testing.assert_close(pieces(it, it.w), mean, rtol=0, atol=2e-5)
    assert (it.w - it.w0).abs().max() > 0.01


def test_a_net_whose_layers_would_grow_is_fedavgs():
    with pytest.warns(UserWarning, match="no layer"):
        assert_is_fedavg("fedpara", model={"name": "mlp", "hidden": [4]})


def test_personal_factors_stay(client_of):
    it = play(settings("pfedpara", "cnn", rounds=2, **CNN | {"cohort": {"fraction": 1.0}}))
    layout = it.made.model.layout
    own = [s for s in layout.segments if s.group == OWN]
    assert {s.name.split(".two.")[1] for s in own} == {"T", "O", "I", "X", "Y"}
    assert it.uploads.dw.shape[1:] == (layout.size - sum(s.stop - s.start for s in own),)
    assert_own_parts(it, client_of, {s.name for s in own})


def test_personal_weight_has_the_one():
    """W = W_1 . (W_2 + 1): with W_2 = 0 a client uses W_1 alone."""
    made = prepare(settings("pfedpara", "cnn")).made
    layer = made.net.module.body[3]
    with torch.no_grad():
        for factor in layer.two.parameters():
            factor.zero_()
    assert torch.equal(layer.weight(), layer.one())
