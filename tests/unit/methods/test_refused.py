"""What methods refuse, with the option and the remedy: other methods, rules, optimisers and models, old options."""

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
        ("ccvr", {}, {"model": {"name": f"{__file__}:two_layers"}}, "one linear layer; this model's is Sequential"),
        ("fedatom", {"client": "fedper"}, {}, "shares and trains the whole model; FedPer"),
        ("fedatom", {"client": "fedatom"}, {}, "leaves the architecture alone; FedAtom"),
        ("fedatom", {"client": "fedpara"}, {}, "leaves the architecture alone; FedPara"),
        ("fedatom", {"client": "scaffold", "period": 5}, {}, "period: 1"),
        ("fedatom", {"client": "fedcm", "period": 2}, {}, "period: 1"),
        ("fedatom_personal", {"client": "ditto"}, {}, "says what its clients use, and so does"),
        ("fedatom_personal", {"client": "knnper"}, {}, "says what its clients use, and so does"),
        (
            "fedfomo",
            {},
            {"server": {"rule": "median"}},
            "median needs updates of the model, but method fedfomo sends none",
        ),
        ("fedavg", {}, {"server": {"rule": SHARE}}, "share: sum has no effect with correction: text"),
        ("fedsol", {"prox": "fedavg"}, {}, "not FedAvg"),
        ("fedsol", {"prox": "scaffold"}, {}, "not Scaffold.*fedsol_table4.py"),  # a correction, and no regularizer
        ("fedsol", {"prox": "feddyn"}, {}, "not FedDyn.*fedsol_table4.py"),  # whose g_k presumes its own steps
        ("fedsr", {"probabilistic": False, "cmi": 0.1}, {}, r"method\.cmi: 0\.1 needs Gaussian"),
        ("lg_fedavg", {"n_shared": 3}, {}, "n_shared is 3, but the model has 2 linear"),
        ("perfedavg", {"variant": "second_order"}, {}, r"method\.variant"),
        # options of earlier versions
        ("fedatom", {"personal": True}, {}, r"method\.personal: personal atoms are method fedatom_personal"),
        ("fedld", {"correction": "axis"}, {}, r"method\.correction: is part of `variant` now: text, printed"),
        ("fedsol", {"objective": "A3"}, {}, "is an option of configs/papers/fedsol_table10.py:Objective"),
    ],
)
def test_refused(method, options, changes, message):
    with pytest.raises(UserError, match=message):
        prepare(small_settings(method, options=options, **changes)).fed.run()


@pytest.mark.parametrize("client", ["ditto", "knnper"])
def test_fedatom_takes_clients_with_models_of_their_own(client):
    prepare(small_settings("fedatom", options={"client": client}))
