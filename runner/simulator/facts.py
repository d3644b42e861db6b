"""A described model as the facts that search spaces are checked against."""

from runner.schema.node import SimulatedModel
from runner.simulator.costs import dense_weights, kv_bytes_per_token, total_weights
from runner.space.model_facts import ModelFacts

BITS_PER_BYTE = 8


def facts_of(model: SimulatedModel) -> ModelFacts:
    """What ``ModelFacts`` says of a real model's config.json, said of a described one.

    Weights that a token passes through: the dense ones, and of the routed experts the share that is active.
    """
    experts = model.experts
    total, dense = total_weights(model), dense_weights(model)
    routed_share = experts.active / experts.total if experts else 0.0
    return ModelFacts(
        architecture=f"simulated {model.name}",
        heads=model.heads,
        kv_heads=1 if model.latent_kv else model.kv_heads,
        layers=model.layers,
        hidden=model.hidden,
        intermediate=model.intermediate,
        head_dim=model.head_dim,
        vocabulary=model.vocabulary,
        experts=experts.total if experts else 0,
        experts_per_token=experts.active if experts else 0,
        expert_intermediate=experts.intermediate if experts else None,
        mtp_layers=1 if model.mtp else 0,
        max_position=model.max_model_len,
        parameters=round(total),
        active_parameters=round(dense + (total - dense) * routed_share),
        weight_bytes=round(total * model.weight_bits / BITS_PER_BYTE),
        kv_bytes_per_token=round(kv_bytes_per_token(model)),
    )
