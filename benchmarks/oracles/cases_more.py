"""Cases for the methods of pfl-research, FedLab, PFLlib and flgo, and for Flower's aggregation rules."""

from typing import Any

from cases import ADAM, SGD_SERVER, UNIFORM, Case, method, reading, server


def fedlab(label: str, ours: dict[str, Any], algorithm: str, name: str, **more: Any) -> Case:
    """Return a case for FedLab; setup, server: arguments of the trainer's and of the handler's setup_optim."""
    case = {key: more.pop(key) for key in ("why", "reading") if key in more}
    theirs = {"algorithm": algorithm, "handler": f"{name}ServerHandler", "trainer": f"{name}SerialClientTrainer"}
    case |= {"reading": UNIFORM | case["reading"]} if "reading" in case else {}
    return Case("fedlab", label, UNIFORM | ours, theirs | more, **case)


FEDLAB = [
    fedlab("FedAvg", method("fedavg"), "fedavg", "FedAvg"),
    fedlab("FedProx", method("fedprox", mu=0.5), "fedprox", "FedProx", setup={"mu": 0.5}),
    fedlab("SCAFFOLD", method("scaffold"), "scaffold", "Scaffold", server={"lr": 1.0}),
    fedlab("FedNova, weighted_com", method("fednova"), "fednova", "FedNova", server={"option": "weighted_com"}),
    fedlab(
        "FedNova",
        method("fednova"),
        "fednova",
        "FedNova",
        server={},
        why="fedlab-fednova",
        reading=method("fednova") | {"server.lr": 5 / 3},
    ),
    fedlab(
        "FedDyn",
        method("feddyn", alpha=0.1),
        "feddyn",
        "FedDyn",
        setup={"alpha": 0.1},
        server={"alpha": 0.1},
        why="fedlab-feddyn",
        reading=reading("FedLabFedDyn", alpha=0.1),
    ),
    fedlab("Ditto", method("ditto", lam=0.5), "ditto", "Ditto", why="fedlab-ditto"),
]


def pfl(label: str, ours: dict[str, Any], algorithm: str, *, samples: bool = False, **more: Any) -> Case:
    """Return a case for pfl-research; mu: for fedprox; central: name in torch.optim and options for the server."""
    case = {key: more.pop(key) for key in ("why", "reading") if key in more}
    weights = {} if samples else UNIFORM
    theirs = {"algorithm": algorithm, "weighting": "samples" if samples else "uniform", **more}
    case |= {"reading": weights | case["reading"]} if "reading" in case else {}
    return Case("pfl", label, weights | ours, theirs, **case)


PFL = [
    pfl("FedAvg", method("fedavg"), "fedavg", samples=True),
    pfl("FedProx", method("fedprox", mu=0.5), "fedprox", samples=True, mu=0.5),
    pfl(
        "SCAFFOLD",
        method("scaffold"),
        "scaffold",
        why="pfl-scaffold",
        reading=reading("PflScaffold"),
    ),
    pfl(
        "FedAvgM",
        server("momentum", momentum=0.9),
        "fedavg",
        samples=True,
        central=["SGD", {"lr": 1.0, "momentum": 0.9}],
    ),
    pfl(
        "FedAdam",
        server("adam", eps=1e-3, **ADAM),
        "fedavg",
        samples=True,
        central=["Adam", {"lr": ADAM["lr"], "betas": [ADAM["beta1"], ADAM["beta2"]], "eps": 1e-3}],
        why="pfl-fedadam",
        reading=reading("AdaptiveServer", correct=1, eps_too=True, **ADAM) | SGD_SERVER,
    ),
]


def flower(label: str, ours: dict[str, Any], strategy: str, *, weighted: bool = True, **more: Any) -> Case:
    """Return a case for Flower; weighted: weights by samples, otherwise uniform; options: of Flower's strategy."""
    case = {key: more.pop(key) for key in ("why", "reading") if key in more}
    theirs = {"strategy": strategy, "weighted": weighted, "options": {"fraction_train": 1.0, **more}}
    return Case("flower", label, ours if weighted else UNIFORM | ours, theirs, loss=False, **case)


def rule(name: str, **options: Any) -> dict[str, Any]:
    """Return the settings of an aggregation rule."""
    return {"server.rule": {"name": name, **options}}


FLOWER_ADAM = {"eta": ADAM["lr"], "beta_1": ADAM["beta1"], "beta_2": ADAM["beta2"], "tau": 1e-3}
FLOWER = [
    flower("FedAvg", method("fedavg"), "FedAvg"),
    flower(
        "FedAvgM",
        server("momentum", momentum=0.9, lr=0.5),
        "FedAvgM",
        server_momentum=0.9,
        server_learning_rate=0.5,
    ),
    flower(
        "FedAdam",
        server("adam", eps=1e-3, **ADAM),
        "FedAdam",
        **FLOWER_ADAM,
        why="flower-fedadam",
        reading=reading("AdaptiveServer", correct=2, **ADAM) | SGD_SERVER,
    ),
    flower(
        "FedYogi",
        server("yogi", eps=1e-3, **ADAM),
        "FedYogi",
        **FLOWER_ADAM,
        why="flower-fedyogi",
        reading=reading("AdaptiveServer", rule="yogi", **ADAM) | SGD_SERVER,
    ),
    flower(
        "FedAdagrad",
        server("adagrad", eps=1e-3, lr=0.03, beta1=0.0),
        "FedAdagrad",
        eta=0.03,
        tau=1e-3,
        why="flower-fedyogi",
        reading=reading("AdaptiveServer", rule="adagrad", lr=0.03, beta1=0.0) | SGD_SERVER,
    ),
    flower("median", rule("median"), "FedMedian"),
    flower("trimmed mean", rule("trimmed_mean", trim=0.34), "FedTrimmedAvg", beta=0.34),
    flower("Krum", rule("krum", byzantine=0), "Krum", num_malicious_nodes=0),
    flower(
        "Multi-Krum",
        rule("krum", byzantine=0, select=2),
        "MultiKrum",
        weighted=False,
        num_malicious_nodes=0,
        num_nodes_to_select=2,
    ),
]


def pfllib(label: str, ours: dict[str, Any], name: str, *, samples: bool = False, **more: Any) -> Case:
    """Return a case for PFLlib.

    name: the server's module and class; kept_there: the client's attribute to compare; more: PFLlib's arguments.
    """
    case = {key: more.pop(key) for key in ("kept", "why", "reading") if key in more}
    weights = {} if samples else UNIFORM
    kept, whole = more.pop("kept_there", None), more.pop("whole", False)
    case |= {"reading": weights | ours | case["reading"]} if "reading" in case else {}
    theirs = {"server": name, "kept": kept, "whole": whole, "args": more}
    return Case("pfllib", label, weights | ours, theirs, loss=False, **case)


PFLLIB = [
    pfllib("FedAvg", method("fedavg"), "serveravg.FedAvg", samples=True),
    pfllib("FedProx", method("fedprox", mu=0.5), "serverprox.FedProx", samples=True, mu=0.5),
    pfllib("SCAFFOLD", method("scaffold"), "serverscaffold.SCAFFOLD", server_learning_rate=1.0),
    pfllib(
        "FedDyn",
        method("feddyn", alpha=0.1),
        "serverdyn.FedDyn",
        alpha=0.1,
        why="pfllib-feddyn",
        reading=reading("PfllibFedDyn", alpha=0.1),
    ),
    pfllib("MOON", method("moon", mu=1.0, tau=0.5), "servermoon.MOON", samples=True, mu=1.0, tau=0.5),
    pfllib("FedNTD", method("fedntd", beta=1.0, tau=2.0), "serverntd.FedNTD", beta=1.0, tau=2.0),
    pfllib(
        "pFedMe",
        method("pfedme", lam=5.0, personal_lr=0.05, steps=3, decay=0.001) | {"server.lr": 0.7},
        "serverpFedMe.pFedMe",
        samples=True,
        lamda=5.0,  # codespell:ignore lamda
        K=3,
        p_learning_rate=0.05,
        beta=0.7,
    ),
    pfllib(
        "Per-FedAvg",
        method("perfedavg", alpha=0.1) | {"sizes": (40, 20, 40, 20, 20)},
        "serverperavg.PerAvg",
        samples=True,
        local_epochs=1,
    ),
    pfllib(
        "FedRep",
        method("fedrep", head_epochs=2, body_epochs=1),
        "serverrep.FedRep",
        samples=True,
        kept="_w",
        kept_there="model.head",
        local_epochs=1,
        plocal_epochs=2,
    ),
    pfllib(
        "FedProto",
        method("fedproto", lam=1.0) | {"train.epochs": 1},
        "serverproto.FedProto",
        kept="_w",
        kept_there="model",
        lamda=1.0,  # codespell:ignore lamda
        why="pfllib-fedproto",
        reading=reading("OtherFedProto", lam=1.0, forgets=True),
    ),
    pfllib(
        "FedProto, all clients",
        method("fedproto", lam=1.0) | {"train.epochs": 1, "cohort.fraction": 1.0},
        "serverproto.FedProto",
        kept="_w",
        kept_there="model",
        lamda=1.0,  # codespell:ignore lamda
    ),
    pfllib(
        "APFL",
        method("apfl", alpha=0.5, adapt="step"),
        "serverapfl.APFL",
        samples=True,
        kept="v",
        kept_there="model_per",
        alpha=0.5,
        why="pfllib-apfl",
        reading=reading("PfllibAPFL", alpha=0.5),
    ),
    pfllib(
        "FedALA, all clients",
        method("fedala", rate=1.0, share=1.0, threshold=0.1) | {"train.batch_size": 40, "cohort.fraction": 1.0},
        "serverala.FedALA",
        samples=True,
        whole=True,
        kept="last",
        kept_there="model",
        eta=1.0,
        rand_percent=100,
        layer_idx=2,
    ),
]

FLGO = [
    Case(
        "flgo",
        "FedDyn",
        UNIFORM | method("feddyn", alpha=0.1),
        {"algorithm": "feddyn", "args": {"alpha": 0.1}},
    )
]
