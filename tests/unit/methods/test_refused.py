"""Methods reject options, rules, optimisers and models that they do not support, and old options."""

import pytest
from helpers import prepare, small_settings
from torch import nn

from fedmpi.common.errors import UserError


def two_layers(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU())
    net.head = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, classes))
    return net


SHARE = {"name": "principal", "share": "sum"}


@pytest.mark.parametrize(
    ("method", "options", "changes", "message"),
    [
        ("ccvr", {}, {"server": {"optim": "momentum"}}, "method ccvr needs a plain server step"),  # moves the body on
        ("ccvr", {}, {"server": {"lr": 0.5}}, "method ccvr needs a plain server step"),  # stops halfway
        ("ccvr", {}, {"server": {"rule": "median"}}, "method ccvr needs a plain server step"),
        ("ccvr", {}, {"model": {"name": f"{__file__}:two_layers"}}, "one linear layer, but this head is a Sequential"),
        (
            "fedatom",
            {"client": "fedper"},
            {},
            "FedPer is not allowed; fedatom needs a method that shares and trains the whole model",
        ),
        ("fedatom", {"client": "fedatom"}, {}, "FedAtom is not allowed; .* does not change the architecture"),
        ("fedatom", {"client": "fedpara"}, {}, "FedPara is not allowed; .* does not change the architecture"),
        ("fedatom", {"client": "scaffold", "period": 5}, {}, "period: 1"),
        ("fedatom", {"client": "fedcm", "period": 2}, {}, "period: 1"),
        ("fedatom_personal", {"client": "ditto"}, {}, "has its own personal models, and so has fedatom_personal"),
        ("fedatom_personal", {"client": "knnper"}, {}, "has its own personal models, and so has fedatom_personal"),
        (
            "fedfomo",
            {},
            {"server": {"rule": "median"}},
            "median needs updates of the model, but method fedfomo sends none",
        ),
        ("fedavg", {}, {"server": {"rule": SHARE}}, "share: sum has no effect with server.rule.correction: text"),
        ("fedsol", {"prox": "fedavg"}, {}, "FedAvg.* is not allowed; must be a method that has a regularizer"),
        (
            "fedsol",
            {"prox": "scaffold"},
            {},
            "Scaffold.* is not allowed.*fedsol_table4.py",
        ),  # a correction, and no regularizer
        (
            "fedsol",
            {"prox": "feddyn"},
            {},
            "FedDyn.* is not allowed.*fedsol_table4.py",
        ),  # whose g_k presumes its own steps
        ("fedsr", {"probabilistic": False, "cmi": 0.1}, {}, r"method\.cmi: 0\.1 needs Gaussian"),
        ("lg_fedavg", {"n_shared": 3}, {}, r"method\.n_shared: 3 is not allowed; must be at most 2, the number"),
        ("perfedavg", {"variant": "second_order"}, {}, r"method\.variant"),
        # options of earlier versions
        ("fedatom", {"personal": True}, {}, r"method\.personal: this option was replaced by method fedatom_personal"),
        (
            "fedld",
            {"correction": "axis"},
            {},
            r"method\.correction: this option was replaced by `variant`: text, printed",
        ),
        ("fedsol", {"objective": "A3"}, {}, "was moved to configs/papers/fedsol_table10.py:Objective"),
    ],
)
def test_unsupported_settings_are_rejected(method, options, changes, message):
    with pytest.raises(UserError, match=message):
        prepare(small_settings(method, options=options, **changes)).fed.run()


@pytest.mark.parametrize("client", ["ditto", "knnper"])
def test_fedatom_accepts_clients_with_personal_models(client):
    prepare(small_settings("fedatom", options={"client": client}))
