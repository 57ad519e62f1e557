"""The registry of methods: name -> "module:Class". Listing it imports nothing."""

registry: dict[str, str] = {
    "ditto": "fedmpi.methods.ditto:Ditto",
    "fedasam": "fedmpi.methods.fedasam:FedASAM",
    "fedavg": "fedmpi.methods.fedavg:FedAvg",
    "fedbn": "fedmpi.methods.fedbn:FedBN",
    "fedcm": "fedmpi.methods.fedcm:FedCM",
    "feddyn": "fedmpi.methods.feddyn:FedDyn",
    "fedld": "fedmpi.methods.fedld:FedLD",
    "fednova": "fedmpi.methods.fednova:FedNova",
    "fedntd": "fedmpi.methods.fedntd:FedNTD",
    "fedpac": "fedmpi.methods.fedpac:FedPAC",
    "fedproto": "fedmpi.methods.fedproto:FedProto",
    "fedprox": "fedmpi.methods.fedprox:FedProx",
    "fedrep": "fedmpi.methods.fedrep:FedRep",
    "fedsam": "fedmpi.methods.fedsam:FedSAM",
    "fedsol": "fedmpi.methods.fedsol:FedSOL",
    "feduv": "fedmpi.methods.feduv:FedUV",
    "gradproj": "fedmpi.methods.gradproj:GradProj",
    "moon": "fedmpi.methods.moon:MOON",
    "scaffold": "fedmpi.methods.scaffold:Scaffold",
}
