"""fluke's methods."""

from typing import Any

from cases import ADAM, SGD_SERVER, UNIFORM, Case, method, reading, server


def fluke(label: str, ours: dict[str, Any], algorithm: str, *, samples: bool = False, **more: Any) -> Case:
    """Return a case for fluke.

    samples: means are weighted by samples, otherwise uniform; `client`, `server`, `own_model`, `shared` and
        `kept_there` are options of by_fluke.py.
    """
    case = {key: more.pop(key) for key in ("kept", "loss", "why", "reading") if key in more}
    server = {"weighted": samples, **more.pop("server", {})}
    kept = {"kept": more.pop("kept_there")} if "kept_there" in more else {}
    theirs = {"algorithm": algorithm, "server": server, **kept, **more}
    weights = {} if samples else UNIFORM
    reads = {"reading": weights | ours | case["reading"]} if "reading" in case else {}
    return Case("fluke", label, weights | ours, theirs, **(case | reads))


FLUKE = [
    fluke("FedAvg", method("fedavg"), "fedavg.FedAVG", samples=True),
    fluke("FedAvg, uniform", method("fedavg"), "fedavg.FedAVG"),
    fluke("FedProx", method("fedprox", mu=0.5), "fedprox.FedProx", samples=True, client={"mu": 0.5}, loss=False),
    fluke("SCAFFOLD", method("scaffold"), "scaffold.SCAFFOLD"),
    fluke(
        "FedNova",
        method("fednova"),
        "fednova.FedNova",
        samples=True,
        why="fluke-fednova",
        reading=reading("FlukeFedNova"),
    ),
    fluke(
        "FedDyn",
        method("feddyn", alpha=0.1, report="avg"),
        "feddyn.FedDyn",
        client={"alpha": 0.1, "clipping": 0},
        loss=False,
        why="fluke-feddyn",
        reading=reading("FlukeFedDyn", alpha=0.1, mean_n=23.8),
    ),
    fluke("FedExP", method("fedexp", eps=1e-4), "fedexp.FedExP"),
    fluke(
        "MOON",
        method("moon", mu=1.0, tau=0.5),
        "moon.MOON",
        samples=True,
        client={"mu": 1.0, "tau": 0.5},
        why="fluke-moon",
        reading=reading("FlukeMOON"),
    ),
    fluke(
        "FedSAM",
        method("fedsam", rho=0.05),
        "fedsam.FedSAM",
        samples=True,
        client={"rho": 0.05},
        loss=False,
        why="fluke-sam",
        reading=reading("FlukeSAM", rho=0.05),
    ),
    fluke(
        "FedASAM, eta 0",
        method("fedasam", rho=0.5, eta=0.0, scaled="all"),
        "fedsam.FedSAM",
        samples=True,
        client={"rho": 0.5, "optimizer": {"adaptive": True}},
        loss=False,
        why="fluke-sam",
        reading=reading("FlukeSAM", rho=0.5, adaptive=True),
    ),
    fluke("FedLC", method("fedlc", tau=0.5), "fedlc.FedLC", samples=True, client={"tau": 0.5}),
    fluke(
        "FedLD",
        method("fedld", margin=0.2, keep=0.8, variant="code"),
        "fedld.FedLD",
        client={"margin_lam": 0.2},
        server={"k_proportion": 0.8},
    ),
    fluke(
        "FedAvgM",
        server("momentum", momentum=0.9),
        "fedavgm.FedAVGM",
        samples=True,
        server={"momentum": 0.9},
        why="fluke-fedavgm",
        reading=reading("FlukeFedAvgM", beta=0.9) | SGD_SERVER,
    ),
    *(
        fluke(
            f"Fed{name.capitalize()}",
            server(name, eps=1e-3, **ADAM),
            "fedopt.FedOpt",
            samples=True,
            server={"mode": name, "tau": 1e-3, **ADAM},
            why="fluke-fedopt",
            reading=reading("AdaptiveServer", rule=name, scale=ADAM["lr"], **ADAM) | SGD_SERVER,
        )
        for name in ("adam", "yogi", "adagrad")
    ),
    fluke(
        "Ditto",
        method("ditto", lam=0.5),
        "ditto.Ditto",
        samples=True,
        client={"tau": 2, "lam": 0.5},
        own_model=True,
        kept="v",
        kept_there="personal",
        loss=False,
    ),
    fluke(
        "pFedMe",
        method("pfedme", lam=5.0, personal_lr=0.1, steps=3),
        "pfedme.PFedMe",
        client={"k": 3, "optimizer": {"lamda": 5.0, "mu": 0.0}},  # codespell:ignore lamda
        server={"beta": 1.0},
        loss=False,
        why="fluke-pfedme",
        reading=reading("FlukePFedMe", steps=3),
    ),
    fluke(
        "Per-FedAvg",
        method("perfedavg", alpha=0.05) | {"sizes": (40, 20, 40, 20, 20)},
        "per_fedavg.PerFedAVG",
        client={"mode": "FO", "beta": 0.1, "local_epochs": 1, "optimizer": {"lr": 0.05}},  # codespell:ignore fo
        loss=False,
        why="fluke-perfedavg",
        reading=reading("FlukePerFedAvg", alpha=0.05),
    ),
    fluke(
        "FedRep",
        method("fedrep", head_epochs=2, body_epochs=1),
        "fedrep.FedRep",
        client={"tau": 1},
        own_model=True,
        copies=True,
        shared="encoder",
        kept="_w",
        kept_there="head",
        loss=False,
    ),
    fluke("FedPer", method("fedper"), "fedper.FedPer", own_model=True, shared="encoder", kept="_w", kept_there="head"),
    fluke(
        "FedBABU",
        method("fedbabu"),
        "fedbabu.FedBABU",
        client={"mode": "full", "fine_tuning_epochs": 0},
        own_model=True,
        shared="encoder",
    ),
    fluke(
        "LG-FedAvg",
        method("lg_fedavg"),
        "lg_fedavg.LGFedAVG",
        own_model=True,
        shared="head",
        kept="_w",
        kept_there="encoder",
    ),
    fluke(
        "FedProto",
        method("fedproto", lam=1.0) | {"train.epochs": 1},
        "fedproto.FedProto",
        client={"n_protos": 5, "lam": 1.0},
        server={"n_protos": 5},
        own_model=True,
        copies=True,
        kept="_w",
        kept_there="whole",
        why="fluke-fedproto",
        reading=reading("OtherFedProto", lam=1.0, to_zero=True),
    ),
    fluke(
        "APFL",
        method("apfl", alpha=0.5, adapt="never"),
        "apfl.APFL",
        samples=True,
        client={"lam": 0.5},
        server={"tau": 1},
        own_model=True,
        kept="v",
        kept_there="personal",
        why="fluke-apfl",
        reading=reading("FlukeAPFL", alpha=0.5),
    ),
    fluke(
        "FedALA, all clients",
        method("fedala", rate=1.0, share=1.0, threshold=0.01) | {"train.batch_size": 40, "cohort.fraction": 1.0},
        "fedala.FedALA",
        samples=True,
        client={"eta": 1.0, "ala_sample_size": 1.0, "conergence_threshold": 0.01},
        kept="last",
        kept_there="whole",
    ),
]
