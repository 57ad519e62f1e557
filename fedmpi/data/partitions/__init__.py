"""Partitions: who owns which training sample. (labels, clients, rng, options) -> one index array per client.

Every scheme returns disjoint indices and draws random numbers only from `rng`. `site` gets the site of each sample in
place of its label.
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "iid": "fedmpi.data.partitions.random_partitions:iid",
    "quantity": "fedmpi.data.partitions.random_partitions:quantity",
    "dirichlet": "fedmpi.data.partitions.random_partitions:dirichlet",
    "shards": "fedmpi.data.partitions.shards:shards",
    "classes": "fedmpi.data.partitions.shards:classes",
    "site": "fedmpi.data.partitions.site_and_file:site",
    "file": "fedmpi.data.partitions.site_and_file:file",
}
KIND = PluginKind("partition", registry, "data.partition", ("labels", "clients", "rng"))
