"""Partitions: functions that assign training samples to clients.

A scheme f(labels, clients, rng, **options) returns disjoint arrays of row numbers, one per client, and draws random
numbers only from the generator `rng`. The scheme `site` gets the site of each sample in place of its label.
"""

from fedmpi.common.registry import PluginKind

registry: dict[str, str] = {
    "iid": "fedmpi.data.partitions.random_partitions:iid",
    "quantity": "fedmpi.data.partitions.random_partitions:quantity",
    "dirichlet": "fedmpi.data.partitions.random_partitions:dirichlet",
    "shards": "fedmpi.data.partitions.shards:shards",
    "classes": "fedmpi.data.partitions.shards:classes",
    "site": "fedmpi.data.partitions.site_and_file:partition_by_site",
    "file": "fedmpi.data.partitions.site_and_file:partition_from_file",
}
KIND = PluginKind("partition scheme", registry, "data.partition", ("labels", "clients", "rng"))
