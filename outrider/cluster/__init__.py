"""A local cluster: the four services as child processes of this one. What `outrider up` runs. Torch-free.

with Cluster(ClusterConfig(port=0)) as cluster:
    with Client(cluster.router_address) as client:
        ...
assert set(cluster.exit_statuses.values()) == {0}
"""
