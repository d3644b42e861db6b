"""The server's environment, built from a known base: what Ray or the shell left behind does not come along.

Pure, but for ``stray_files``, which looks at the two places where NCCL finds a configuration file.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from runner.errors import UsageError
from runner.schema.launch import LaunchConfig
from runner.space.surroundings import PROTECTIVE, protective_variables

_KNOWN = frozenset(
    {
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LANGUAGE",
        "TZ",
        "TERM",
        "TMPDIR",
        "VIRTUAL_ENV",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONNOUSERSITE",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LIBRARY_PATH",
        "CPATH",
        "CC",
        "CXX",
        "CUDAHOSTCXX",
        "CUDA_HOME",
        "CUDA_PATH",
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_DRIVER_CAPABILITIES",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "all_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "ALL_PROXY",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_DATA_HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_ENDPOINT",
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_DATASETS_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HUGGING_FACE_HUB_TOKEN",
        "VLLM_CACHE_ROOT",
        "VLLM_CONFIG_ROOT",
        "VLLM_ASSETS_CACHE",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
        "FLASHINFER_WORKSPACE_BASE",
        "TORCH_HOME",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "TORCH_EXTENSIONS_DIR",
        "NUMBA_CACHE_DIR",
        "SIMULATED_NODE",
    }
)
"""Where programs, libraries, caches, proxies and certificates are: what every server of this host needs alike."""

_STRAY_PREFIXES = ("NCCL_", "VLLM_", "CUDA_", "TORCH_NCCL_", "NVSHMEM_", "FLASHINFER_")
_LABELS = frozenset({"CUDA_VERSION", "NCCL_VERSION"})
"""What container images say of themselves; neither CUDA nor NCCL reads them."""
_LOCALE_PREFIX = "LC_"


def server_env(config: LaunchConfig, base: Mapping[str, str], *, allow: Iterable[str] = ()) -> dict[str, str]:
    """The environment of a server with ``config``: the known part of ``base``, what is allowed, the configuration's.

    Args:
        config: What to launch.
        base: The environment of the process that starts the server.
        allow: Stray variables that may come along (``allow_env`` of the experiment).

    Raises:
        UsageError: The configuration contradicts a variable that protects this host.
    """
    check_protection(config.env, protective_variables(base))
    wanted = _KNOWN.union(allow)
    kept = {name: value for name, value in base.items() if name in wanted or name.startswith(_LOCALE_PREFIX)}
    return kept | config.env | protective_variables(base)


def check_protection(env: Mapping[str, str], protected: Mapping[str, str]) -> None:
    """Raises UsageError when ``env`` sets a protective variable of the host to anything else."""
    for name, value in protected.items():
        if env.get(name, value) != value:
            raise UsageError(
                f"{name}={env[name]} contradicts this host, which sets {name}={value} to protect itself and others",
                remedy=f"leave {name} out",
            )


def stray_variables(base: Mapping[str, str]) -> dict[str, str]:
    """Variables of ``base`` that would change what a server does and that nobody chose for this study."""
    protective = protective_variables(base)
    return {
        name: value
        for name, value in sorted(base.items())
        if name.startswith(_STRAY_PREFIXES) and name not in (_KNOWN | _LABELS | protective.keys())
    }


def stray_files(base: Mapping[str, str]) -> dict[str, str]:
    """NCCL's configuration files that a server started with ``base`` would read: path -> text.

    A file that says no more than this host's protective variables do is none.

    Source: NCCL 2.30 reads /etc/nccl.conf and then ``NCCL_CONF_FILE``, or ``~/.nccl.conf`` without it.
    """
    own = base.get("NCCL_CONF_FILE") or (f"{base['HOME']}/.nccl.conf" if base.get("HOME") else None)
    paths = [Path("/etc/nccl.conf"), *([Path(own)] if own else [])]
    found = {str(path): path.read_text(encoding="utf-8", errors="replace") for path in paths if path.is_file()}
    return {path: text for path, text in found.items() if not _only_protects(text)}


def _only_protects(text: str) -> bool:
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    settings = [line.partition("=")[::2] for line in lines if line]
    return all(PROTECTIVE.get(name.strip()) == value.strip() for name, value in settings)
