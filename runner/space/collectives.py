"""NCCL's environment variables: their grammar, their canonical spelling, and which of them exclude each other.

NCCL ignores most wrong values without a word and dies on others, so everything is checked here first. Written from
NCCL 2.28 to 2.30 (what vLLM 0.24 to 0.33 ship). Knows nothing of vLLM.
"""

import re
from collections.abc import Callable

_ALGORITHMS = ("tree", "ring", "collnetdirect", "collnetchain", "nvls", "nvlstree", "pat")
_PROTOCOLS = {"ll": "LL", "ll128": "LL128", "simple": "Simple"}
_FUNCTIONS = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
_P2P_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")
_P2P_DIGITS = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
"""The levels' old names (``levelsOldToNew`` of NCCL 2.30)."""
_NOT_FOR_ALLREDUCE_ON_ONE_NODE = {
    "pat": "PAT has no all-reduce",
    "nvlstree": "NVLSTree is disabled on a single node",
    "collnetdirect": "CollNet needs a network that reduces, which one node does not have",
    "collnetchain": "CollNet needs a network that reduces, which one node does not have",
}

Check = Callable[[str], str | None]
"""A value -> what would be right, or None when it is."""


_WHOLE = re.compile(r"0|[1-9]\d*")
"""A number as NCCL reads it too: it takes one that begins with 0 for an octal one, 0512 for 330."""


def _whole(low: int, high: int | None = None) -> Check:
    def check(value: str) -> str | None:
        fits = _WHOLE.fullmatch(value) and low <= int(value) and (high is None or int(value) <= high)
        return None if fits else f"a whole number {f'{low}..{high}' if high is not None else f'from {low}'}"

    return check


def _one_of(*values: str) -> Check:
    def check(value: str) -> str | None:
        return None if value in values else f"one of {', '.join(values)} (exactly so)"

    return check


def _threads(low: int, high: int) -> Check:
    def check(value: str) -> str | None:
        fits = _WHOLE.fullmatch(value) and int(value) % 32 == 0 and low <= int(value) <= high
        # NCCL only notes other values in its log and takes its maximum: 100 would mean 512.
        return None if fits else f"a multiple of 32 in {low}..{high}; NCCL would take {high} instead"

    return check


def _power_of_two(value: str) -> str | None:
    fits = re.fullmatch(r"[1-9]\d*", value) and int(value).bit_count() == 1
    return None if fits else "bytes, a power of two, e.g. 4194304"


def _protocols(value: str) -> str | None:
    return _list_grammar(value, tuple(_PROTOCOLS), "LL, LL128, Simple")


def _algorithms(value: str) -> str | None:
    wrong = _list_grammar(value, _ALGORITHMS, ", ".join(_ALGORITHMS))
    if wrong:
        return wrong
    groups = _groups(value)
    for function, names in groups:
        kept = _kept(names, _ALGORITHMS)
        if function is None and "ring" not in kept:
            # Broadcast and Reduce exist as ring only, and vLLM broadcasts at start: NCCL would end the server.
            return f"keep ring for the other functions: `ring,tree;allreduce:{'/'.join(kept)}`"
        if function in ("broadcast", "reduce") and "ring" not in kept:
            return f"{function} exists as ring only"
    for function, names in groups:
        kept = _kept(names, _ALGORITHMS)
        if function == "allreduce" and all(name in _NOT_FOR_ALLREDUCE_ON_ONE_NODE for name in kept):
            return f"{_NOT_FOR_ALLREDUCE_ON_ONE_NODE[kept[0]]}; use ring, tree or nvls"
    return None


def _list_grammar(value: str, known: tuple[str, ...], spoken: str) -> str | None:
    for position, (function, names) in enumerate(_groups(value)):
        if function is None and position > 0:
            return "only the first `;` group may lack a function"
        if function is not None and function not in _FUNCTIONS:
            return f"functions are {', '.join(_FUNCTIONS)}; the form is `function:list`"
        tokens = names.removeprefix("^").split(",")
        if any("^" in token for token in tokens):
            return "`^` stands once, at the start of a list, and negates all of it"
        if any(token not in known for token in tokens):
            return f"a list of {spoken}"
        if not _kept(names, known):
            return f"this forbids everything; a list of {spoken}"
    return None


def _groups(value: str) -> list[tuple[str | None, str]]:
    """``ring,tree;allreduce:tree`` -> [(None, "ring,tree"), ("allreduce", "tree")], in lower case."""
    groups: list[tuple[str | None, str]] = []
    for group in value.lower().split(";"):
        function, colon, names = group.partition(":")
        groups.append((function, names) if colon else (None, function))
    return groups


def _kept(names: str, known: tuple[str, ...]) -> list[str]:
    listed = names.removeprefix("^").split(",")
    return [name for name in known if (name in listed) != names.startswith("^")]


_CTA_POLICY = re.compile(r"(?:DEFAULT|EFFICIENCY|ZERO)(?:\|(?:DEFAULT|EFFICIENCY|ZERO))*|[012]")


def _cta_policy(value: str) -> str | None:
    fits = _CTA_POLICY.fullmatch(value) and not ("ZERO" in value and "EFFICIENCY" in value)
    return None if fits else "DEFAULT, EFFICIENCY or ZERO (the last two not together), or 0, 1, 2"


def _mixing(value: str) -> str | None:
    if value == "0":
        return "1: vLLM launches prefill eagerly and decode by graph on one communicator, which 0 makes unsafe"
    return None if value == "1" else "1"


def _level(value: str) -> str | None:
    if value in _P2P_LEVELS or value in _P2P_DIGITS:
        return None
    return f"one of {', '.join(_P2P_LEVELS)}, in upper case; NCCL ignores anything else without a word"


_ON_OFF = _one_of("0", "1")

_CHECKS: dict[str, Check] = {
    "NCCL_PROTO": _protocols,
    "NCCL_ALGO": _algorithms,
    "NCCL_NTHREADS": _threads(64, 512),
    "NCCL_LL128_NTHREADS": _threads(160, 640),
    "NCCL_MIN_NCHANNELS": _whole(1, 64),
    "NCCL_MAX_NCHANNELS": _whole(1, 64),
    "NCCL_MIN_P2P_NCHANNELS": _whole(1, 64),
    "NCCL_MAX_P2P_NCHANNELS": _whole(1, 64),
    "NCCL_MIN_CTAS": _whole(1, 64),
    "NCCL_MAX_CTAS": _whole(1, 64),
    "NCCL_NCHANNELS_PER_NET_PEER": _whole(1, 64),
    "NCCL_CGA_CLUSTER_SIZE": _whole(0, 8),
    "NCCL_CTA_POLICY": _cta_policy,
    "NCCL_BUFFSIZE": _power_of_two,
    "NCCL_LL_BUFFSIZE": _power_of_two,
    "NCCL_LL128_BUFFSIZE": _power_of_two,
    "NCCL_P2P_LEVEL": _level,
    "NCCL_P2P_DISABLE": _ON_OFF,
    "NCCL_SHM_DISABLE": _ON_OFF,
    "NCCL_NVLS_ENABLE": _one_of("0", "1", "2"),
    "NCCL_NVLS_NCHANNELS": _whole(1, 64),
    "NCCL_CUMEM_ENABLE": _ON_OFF,
    "NCCL_CUMEM_HOST_ENABLE": _ON_OFF,
    "NCCL_GRAPH_MIXING_SUPPORT": _mixing,
    "NCCL_GRAPH_REGISTER": _ON_OFF,
    "NCCL_LOCAL_REGISTER": _ON_OFF,
    "NCCL_IGNORE_CPU_AFFINITY": _ON_OFF,
    "NCCL_LAUNCH_MODE": _one_of("PARALLEL", "GROUP"),
    "NCCL_IB_DISABLE": _ON_OFF,
    "NCCL_PXN_DISABLE": _ON_OFF,
    "NCCL_NVB_DISABLE": _ON_OFF,
    "NCCL_DMABUF_ENABLE": _ON_OFF,
    "NCCL_MNNVL_ENABLE": _one_of("0", "1", "2"),
    "NCCL_COLLNET_ENABLE": _ON_OFF,
}

_LEGACY = {"NCCL_MIN_NRINGS": "NCCL_MIN_NCHANNELS", "NCCL_MAX_NRINGS": "NCCL_MAX_NCHANNELS"}
FREE_PREFIXES = ("NCCL_IB_", "NCCL_NET", "NCCL_SOCKET_", "NCCL_SYM_", "NCCL_WIN_", "NCCL_TOPO_", "NCCL_GRAPH_FILE")
"""Families of the network, the topology and the symmetric kernels: their names are not checked."""
_DEBUG = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")
VARIABLES = frozenset({*_CHECKS, *_LEGACY, *_DEBUG})
"""Names that ``check_variable`` has something to say of."""


def check_variable(name: str, value: str) -> tuple[str, str] | None:
    """What is wrong with setting ``name`` to ``value``, and what would be right; None when nothing is."""
    if name in _LEGACY:
        return f"`{name}` is a legacy name", f"write {_LEGACY[name]}"
    if name in _DEBUG:
        return f"`{name}` would slow every timed run", "NCCL's log is collected by evidence starts only (EVIDENCE=1)"
    check = _CHECKS.get(name)
    right = None if check is None else check(value)
    return None if right is None else (f"`{value}` is no value of {name}", f"what would be right: {right}")


def canonical(name: str, value: str) -> str:
    """One spelling for one meaning. ``NCCL_ALGO`` always in the two-part form that NCCL 2.30 and 2.31 read alike."""
    if name not in ("NCCL_PROTO", "NCCL_ALGO", "NCCL_P2P_LEVEL") or _CHECKS[name](value) is not None:
        return value  # what is no list at all, and kept to fail, stays as it is
    if name == "NCCL_P2P_LEVEL":
        return _P2P_DIGITS.get(value, value)
    groups = _groups(value)
    if name == "NCCL_PROTO":
        spelt = [(function, _listed(names, _PROTOCOLS)) for function, names in groups]
    else:
        ends = groups if groups[0][0] is None else [(None, "ring,tree"), *groups]
        spelt = [(function, ",".join(sorted(_kept(names, _ALGORITHMS)))) for function, names in ends]
    return ";".join(f"{function}:{names}" if function else names for function, names in spelt)


def _listed(names: str, spellings: dict[str, str]) -> str:
    """``^ll128`` -> ``LL,Simple``. NCCL reads both as the same switches (``parseList`` of 2.30)."""
    return ",".join(spellings[name] for name in _kept(names, tuple(spellings)))


def allreduce_algorithms(value: str | None) -> list[str]:
    """Algorithms that ``NCCL_ALGO`` leaves to all-reduce, lower case. None: all."""
    return _left_to_allreduce(value, _ALGORITHMS)


def allreduce_protocols(value: str | None) -> list[str]:
    """Protocols that ``NCCL_PROTO`` leaves to all-reduce, lower case. None: all."""
    return _left_to_allreduce(value, tuple(_PROTOCOLS))


def _left_to_allreduce(value: str | None, known: tuple[str, ...]) -> list[str]:
    if value is None:
        return list(known)
    groups = _groups(value)
    left = list(known)
    for function, names in groups:
        if function in (None, "allreduce"):
            left = _kept(names, known)
    return left
