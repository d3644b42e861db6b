"""One ``vllm serve`` (real or simulated), owned from its start to a clean GPU.

``server.start`` brings one up and ``Server.stop`` takes it down; between them stand a supervisor process that holds
the server's whole tree, a port lease, deadlines by phase, and tables that know the server's log lines. Linux only:
ownership rests on ``/proc``, subreapers and advisory locks.
"""
