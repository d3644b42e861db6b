"""Ray: leases GPUs and puts the node's three calls into an actor on the machine that has them. Only here is Ray known.

It does not know what a trial is for: it carries an order to a node and a report back, and turns the end of an actor,
however it came, into a ``TrialFailure``.
"""

from runner.cluster.cluster import Cluster, NodeHandle, refuse_silence

__all__ = ["Cluster", "NodeHandle", "refuse_silence"]
