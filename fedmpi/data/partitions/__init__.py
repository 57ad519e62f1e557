"""Partitions: who owns which training sample. (labels, clients, rng, options) -> one index array per client.

Every scheme returns disjoint indices and draws random numbers only from `rng`. `site` gets the site of each sample in
place of its label.
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "iid": "fedmpi.data.partitions.random:iid",
    "quantity": "fedmpi.data.partitions.random:quantity",
    "dirichlet": "fedmpi.data.partitions.random:dirichlet",
    "shards": "fedmpi.data.partitions.shards:shards",
    "classes": "fedmpi.data.partitions.shards:classes",
    "site": "fedmpi.data.partitions.given:site",
    "file": "fedmpi.data.partitions.given:file",
}
KIND = PluginKind("partition", registry, "data.partition", ("labels", "clients", "rng"))
