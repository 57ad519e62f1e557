"""Who owns which training sample: (labels, clients, rng, options) -> one index array per client.

Every scheme hands out disjoint indices and draws from `rng` alone. `site` is shown the site of each sample
in place of its label.
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
