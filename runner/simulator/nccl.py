"""NCCL's variables as NCCL 2.30 reads them: which protocol, algorithm and channel count an all-reduce gets.

Pure. Knows the grammar of ``NCCL_PROTO`` and ``NCCL_ALGO`` for the functions vLLM issues (AllReduce in the model,
Broadcast and AllGather at start); it does not know the network variables.

Source: the NCCL environment-variable reference, and behaviour of NCCL 2.28-2.30 (an unknown token or a function left
without an algorithm is an invalid usage that ends the process; a bad ``NCCL_NTHREADS`` is only replaced by 512).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from runner.schema.node import NcclProtocol, P2pLevel, Path, SimulatedNode

PROTOCOLS: tuple[NcclProtocol, ...] = ("LL", "LL128", "Simple")
ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
FUNCTIONS = ("Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce")
LEVELS: tuple[P2pLevel, ...] = ("LOC", "NVL", "PIX", "PXB", "PHB", "SYS")
"""From near to far: the same device, NVLink, one PCIe switch, several, one CPU socket, anywhere."""
_OLD_LEVELS: tuple[P2pLevel, ...] = ("LOC", "PIX", "PXB", "PHB", "SYS", "SYS")
MAX_THREADS = 512
MAX_CHANNELS = 64
"""NCCL's MAXCHANNELS."""


class InvalidUsage(ValueError):
    """NCCL would refuse to make a communicator."""


@dataclass(frozen=True)
class Nccl:
    """What the environment leaves to NCCL.

    Attributes:
        protocols: Protocols an all-reduce may use; all of them when nothing is set.
        algorithms: Algorithms it may use.
        forced: Whether ``NCCL_PROTO`` narrows the protocols.
        channels: Channels after MIN/MAX; None leaves the path's own number.
        p2p_level: How far apart two GPUs may be for peer access; None leaves it to NCCL.
        threads: Threads of a channel's block; None leaves them to NCCL.
        buffer_mib: Buffer of a channel to each peer.
    """

    protocols: tuple[NcclProtocol, ...] = PROTOCOLS
    algorithms: tuple[str, ...] = ("Ring", "Tree")
    forced: bool = False
    min_channels: int = 0
    max_channels: int = MAX_CHANNELS
    p2p_level: P2pLevel | None = None
    threads: int | None = None
    buffer_mib: float = 4.0

    def path(self, node: SimulatedNode) -> Path:
        """The way the ring takes: through peer memory only if its farthest hop may use that."""
        if node.p2p is None:
            return node.shm
        too_far = self.p2p_level is not None and LEVELS.index(self.p2p_level) < LEVELS.index(node.p2p_needs)
        return node.shm if too_far else node.p2p

    def channels(self, path: Path) -> int:
        """Channels used on ``path``: its own number, then at least the minimum, then at most the maximum."""
        return min(max(path.channels, self.min_channels), max(self.max_channels, 1))

    def protocol(self, path: Path, message_bytes: float) -> NcclProtocol:
        """The protocol an all-reduce of ``message_bytes`` per rank gets: the path's own pick if allowed."""
        for pick in path.picks:
            if pick.up_to_kib is None or message_bytes <= pick.up_to_kib * 1024:
                if pick.protocol in self.protocols:
                    return pick.protocol
                break
        return self.protocols[0] if len(self.protocols) == 1 else max(self.protocols, key=PROTOCOLS.index)


def read_nccl(env: Mapping[str, str]) -> Nccl:
    """Reads the variables.

    Raises:
        InvalidUsage: With NCCL's kind of message, for an unknown token, or for an algorithm list that leaves
            Broadcast or AllGather (which vLLM issues at start) without any.
    """
    protocols = _allowed(env.get("NCCL_PROTO", ""), PROTOCOLS)
    algorithms = _allowed(env.get("NCCL_ALGO", ""), ALGORITHMS)
    for function in ("Broadcast", "AllGather"):
        usable = {"Ring"} if function == "Broadcast" else {"Ring", "PAT"}
        if not usable & set(algorithms[function]):
            raise InvalidUsage(f"no algorithm/protocol available for function {function}")
    on_one_node = tuple(name for name in algorithms["AllReduce"] if name in ("Ring", "Tree", "NVLS"))
    if not on_one_node or not protocols["AllReduce"]:
        raise InvalidUsage("no algorithm/protocol available for function AllReduce")
    return Nccl(
        protocols=tuple(name for name in PROTOCOLS if name in protocols["AllReduce"]),
        algorithms=on_one_node,
        forced=len(protocols["AllReduce"]) < len(PROTOCOLS),
        min_channels=min(_integer(env, "NCCL_MIN_NCHANNELS", 0), MAX_CHANNELS),
        max_channels=min(max(_integer(env, "NCCL_MAX_NCHANNELS", MAX_CHANNELS), 1), MAX_CHANNELS),
        p2p_level=_level(env),
        threads=_threads(env),
        buffer_mib=_integer(env, "NCCL_BUFFSIZE", 4 * 2**20) / 2**20,
    )


def _level(env: Mapping[str, str]) -> P2pLevel | None:
    """``NCCL_P2P_DISABLE`` wins; a level that is not one of the exact words (or old digits) is ignored, as by NCCL."""
    if env.get("NCCL_P2P_DISABLE") == "1":
        return "LOC"
    text = env.get("NCCL_P2P_LEVEL", "")
    if text.isdigit():
        return _OLD_LEVELS[min(int(text), len(_OLD_LEVELS) - 1)]
    return next((level for level in LEVELS if level == text), None)


def _threads(env: Mapping[str, str]) -> int | None:
    """``NCCL_NTHREADS``: a value that is no multiple of 32 or above 512 becomes 512, one below 64 becomes 64."""
    threads = _integer(env, "NCCL_NTHREADS", 0)
    if threads <= 0:
        return None
    return MAX_THREADS if threads % 32 or threads > MAX_THREADS else max(threads, 64)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(env.get(name, default))
    except ValueError:
        return default


def _allowed(text: str, names: tuple[str, ...]) -> dict[str, list[str]]:
    """Per function, the names that ``[function:]list[;function:list...]`` allows (``^`` in front negates a list)."""
    allowed = {function: list(names) for function in FUNCTIONS}
    for index, group in enumerate(part for part in text.split(";") if part):
        function, _, listed = group.rpartition(":")
        if not function and index > 0:
            raise InvalidUsage(f"only the first group of {text!r} may leave the function out")
        chosen = _listed(listed, names)
        targets = FUNCTIONS if not function else [_name(function, FUNCTIONS)]
        for target in targets:
            allowed[target] = chosen
    return allowed


def _listed(text: str, names: tuple[str, ...]) -> list[str]:
    negated = text.startswith("^")
    chosen = {_name(token, names) for token in text.removeprefix("^").split(",")}
    return [name for name in names if (name in chosen) != negated]


def _name(token: str, names: tuple[str, ...]) -> str:
    found = [name for name in names if name.lower() == token.strip().lower()]
    if not found:
        raise InvalidUsage(f"unrecognized token {token!r}; known are {', '.join(names)}")
    return found[0]
