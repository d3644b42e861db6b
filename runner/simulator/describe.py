"""Node and model descriptions from files: YAML of this project, or a model folder with a ``config.json``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.errors import UsageError
from runner.schema.node import Experts, SimulatedModel, SimulatedNode
from runner.space.document import read_model
from runner.space.model_facts import merged, model_facts

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
EXPERT_EFFICIENCY = 0.5
"""Share of bandwidth and throughput that expert kernels reach when a config.json is all that is known; a guess."""


def load_node(name: str) -> SimulatedNode:
    """A node by path, or by name from ``experiments/nodes``.

    Raises:
        UsageError: No such file, or not a node.
    """
    return read_model(_file(name, "nodes"), SimulatedNode)


def load_model(name: str, overrides: Mapping[str, Any] | None = None) -> SimulatedModel:
    """A model by path of a YAML file or of a folder with a ``config.json``, or by name from ``experiments/models``.

    Args:
        name: Path or name.
        overrides: ``--hf-overrides``; only for a ``config.json``.

    Raises:
        UsageError: No such file, or not a model.
    """
    for folder in (Path(name), EXPERIMENTS.parent / name, EXPERIMENTS / "models" / name):
        path = folder / "config.json"
        if path.is_file():
            return from_config(json.loads(path.read_text(encoding="utf-8")), name=folder.name, overrides=overrides)
    return read_model(_file(name, "models"), SimulatedModel)


def from_config(config: Mapping[str, Any], *, name: str, overrides: Mapping[str, Any] | None = None) -> SimulatedModel:
    """A model from its own config.json; efficiencies are the defaults, acceptance rates too."""
    facts = model_facts(config, overrides)
    text = merged(config, overrides)
    experts = None
    if facts.experts and facts.expert_intermediate:
        experts = Experts(
            total=facts.experts,
            active=facts.experts_per_token,
            intermediate=facts.expert_intermediate,
            shared=int(text.get("n_shared_experts") or 0),
            dense_layers=int(text.get("first_k_dense_replace") or 0),
            bandwidth_efficiency=EXPERT_EFFICIENCY,
            compute_efficiency=EXPERT_EFFICIENCY,
        )
    latent = text.get("kv_lora_rank")
    return SimulatedModel(
        name=name,
        source="config.json",
        layers=facts.layers,
        hidden=facts.hidden,
        heads=facts.heads,
        kv_heads=facts.heads if latent else facts.kv_heads,
        head_dim=facts.head_dim,
        intermediate=facts.intermediate or 4 * facts.hidden,
        vocabulary=facts.vocabulary,
        tied_embeddings=bool(text.get("tie_word_embeddings", False)),
        max_model_len=facts.max_position or 4096,
        weight_bits=8.0 * facts.weight_bytes / facts.parameters,
        latent_kv=int(latent) + int(text.get("qk_rope_head_dim") or 0) if latent else None,
        experts=experts,
    )


def _file(name: str, folder: str) -> Path:
    places = (Path(name), EXPERIMENTS.parent / name, EXPERIMENTS / folder / name, EXPERIMENTS / folder / f"{name}.yaml")
    for path in places:
        if path.is_file():
            return path
    known = sorted(path.stem for path in (EXPERIMENTS / folder).glob("*.yaml"))
    raise UsageError(
        f"no simulated {folder.removesuffix('s')} {name!r}", remedy=f"give a file, or one of: {', '.join(known)}"
    )
