"""The registry of methods: name -> "module:Class". Listing it imports nothing."""

registry: dict[str, str] = {
    "ditto": "fedmpi.methods.ditto:Ditto",
    "fedavg": "fedmpi.methods.fedavg:FedAvg",
    "fedld": "fedmpi.methods.fedld:FedLD",
    "fedpac": "fedmpi.methods.fedpac:FedPAC",
    "fedprox": "fedmpi.methods.fedprox:FedProx",
    "fedproto": "fedmpi.methods.fedproto:FedProto",
    "fedrep": "fedmpi.methods.fedrep:FedRep",
    "fedsol": "fedmpi.methods.fedsol:FedSOL",
    "scaffold": "fedmpi.methods.scaffold:Scaffold",
}
