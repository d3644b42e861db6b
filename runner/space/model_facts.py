"""What a model's own ``config.json`` says about how it can be launched: heads, layers, experts, size in bytes.

Sizes are computed from shapes (within a few percent of the files for the usual decoder architectures); the files
themselves are only looked at by ``read_model_facts``.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.errors import UsageError
from runner.schema.base import Model

GIB = 2**30

_BYTES_BY_DTYPE = {"float32": 4.0, "float": 4.0, "float16": 2.0, "half": 2.0, "bfloat16": 2.0}
_BITS_BY_QUANTISATION = {"fp8": 8, "mxfp8": 8, "nvfp4": 4, "mxfp4": 4, "modelopt_fp4": 4, "awq": 4, "gptq": 4}


class ModelFacts(Model):
    """Shape of a decoder. None: the config does not say.

    Attributes:
        heads: Query heads; ``kv_heads`` the key/value ones (latent attention has one).
        intermediate: Width of the dense feed-forward.
        experts: Routed experts a layer, 0 for a dense model; ``expert_intermediate`` is the width of one.
        mtp_layers: Layers for multi-token prediction that the checkpoint carries.
        parameters: Weights in all, computed from the shape.
        active_parameters: Weights that one token passes through.
        weight_bytes: Bytes of all weights, as stored or computed.
        kv_bytes_per_token: Bytes of KV cache a token takes over all layers, at two bytes a number.
        quantisation: Method of the checkpoint, if it is quantised.
    """

    architecture: str | None = None
    heads: int
    kv_heads: int
    layers: int
    hidden: int
    intermediate: int | None = None
    head_dim: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int | None = None
    mtp_layers: int = 0
    max_position: int | None = None
    dtype: str = "bfloat16"
    quantisation: str | None = None
    parameters: int
    active_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """``config`` with ``--hf-overrides`` applied: scalars replace, objects merge into sub-configs."""
    result = dict(config)
    for key, value in (overrides or {}).items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return result


def model_facts(config_json: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> ModelFacts:
    """Facts from a parsed ``config.json`` with ``--hf-overrides`` applied. Multimodal models: their text part.

    Raises:
        UsageError: A number that every decoder has is missing or is not a positive whole number.
    """
    whole = merged(config_json, overrides)
    text = whole.get("text_config")
    config = {**whole, **text} if isinstance(text, Mapping) else whole
    heads = _positive(config, "num_attention_heads", "n_head")
    hidden = _positive(config, "hidden_size", "n_embd")
    layers = _positive(config, "num_hidden_layers", "n_layer")
    vocabulary = _positive(config, "vocab_size")
    latent = _optional(config, "kv_lora_rank")
    kv_heads = 1 if latent else (_optional(config, "num_key_value_heads") or heads)
    head_dim = _optional(config, "head_dim") or hidden // heads
    experts = _optional(config, "num_experts", "n_routed_experts", "num_local_experts") or 0
    per_token = _optional(config, "num_experts_per_tok", "moe_topk") or 0
    parameters, active = _parameters(config, heads, kv_heads, head_dim, experts, per_token)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    quantisation, bytes_each = _bytes_per_weight(config, dtype)
    architectures = whole.get("architectures") or [None]
    kv_width = latent + (_optional(config, "qk_rope_head_dim") or 0) if latent else 2 * kv_heads * head_dim
    return ModelFacts(
        architecture=architectures[0],
        heads=heads,
        kv_heads=kv_heads,
        layers=layers,
        hidden=hidden,
        intermediate=_optional(config, "intermediate_size", "n_inner"),
        head_dim=head_dim,
        vocabulary=vocabulary,
        experts=experts,
        experts_per_token=per_token,
        expert_intermediate=_optional(config, "moe_intermediate_size"),
        mtp_layers=_optional(config, "num_nextn_predict_layers", "mtp_num_hidden_layers") or 0,
        max_position=_optional(config, "max_position_embeddings", "n_positions"),
        dtype=dtype,
        quantisation=quantisation,
        parameters=parameters,
        active_parameters=active,
        weight_bytes=int(parameters * bytes_each),
        kv_bytes_per_token=2 * layers * kv_width,
    )


def _optional(config: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _positive(config: Mapping[str, Any], *names: str) -> int:
    value = _optional(config, *names)
    if value is None or value < 1:
        found = config.get(names[0], "nothing")
        raise UsageError(
            f"the model's config.json has no usable `{names[0]}` (found {json.dumps(found)})",
            remedy="is it the config.json of a decoder-only language model?",
        )
    return value


def _parameters(
    config: Mapping[str, Any], heads: int, kv_heads: int, head_dim: int, experts: int, per_token: int
) -> tuple[int, int]:
    """All weights, and those one token passes through. Norms and biases (below 0.1 %) are left out."""
    hidden = _positive(config, "hidden_size", "n_embd")
    layers = _positive(config, "num_hidden_layers", "n_layer")
    vocabulary = _positive(config, "vocab_size")
    attention = _attention_parameters(config, hidden, heads, kv_heads, head_dim)
    dense = 3 * hidden * (_optional(config, "intermediate_size", "n_inner") or 4 * hidden)
    embedding = vocabulary * hidden
    head = 0 if config.get("tie_word_embeddings") else embedding
    if not experts:
        total = layers * (attention + dense) + embedding + head
        return total, total
    expert = 3 * hidden * (_optional(config, "moe_intermediate_size") or _optional(config, "intermediate_size") or 0)
    shared = (_optional(config, "n_shared_experts") or 0) * expert
    dense_layers = min(_optional(config, "first_k_dense_replace") or 0, layers)
    sparse_layers = layers - dense_layers
    common = layers * attention + dense_layers * dense + sparse_layers * (shared + hidden * experts) + embedding + head
    return common + sparse_layers * experts * expert, common + sparse_layers * per_token * expert


def _attention_parameters(config: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    latent = _optional(config, "kv_lora_rank")
    if not latent:
        return hidden * head_dim * (2 * heads + 2 * kv_heads)
    rope = _optional(config, "qk_rope_head_dim") or 0
    nope = _optional(config, "qk_nope_head_dim") or head_dim
    value = _optional(config, "v_head_dim") or head_dim
    q_rank = _optional(config, "q_lora_rank")
    query = hidden * q_rank + q_rank * heads * (nope + rope) if q_rank else hidden * heads * (nope + rope)
    return query + hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden


def _bytes_per_weight(config: Mapping[str, Any], dtype: str) -> tuple[str | None, float]:
    quantisation = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(quantisation, Mapping):
        return None, _BYTES_BY_DTYPE.get(dtype, 2.0)
    method = str(quantisation.get("quant_method") or quantisation.get("quant_algo") or "quantised").lower()
    bits = _optional(quantisation, "bits", "w_bit") or _BITS_BY_QUANTISATION.get(method, 8)
    return method, bits / 8


def read_model_facts(folder: Path, overrides: Mapping[str, Any] | None = None) -> ModelFacts:
    """Facts of a model folder; where it holds safetensors files, their real size is its ``weight_bytes``.

    Raises:
        UsageError: No readable config.json in the folder.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read the model's config.json: {error.strerror}",
            remedy="give the folder of a Hugging Face model, with config.json in it",
            path=path,
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid JSON: {error}", path=path, remedy="the model folder is broken") from None
    if not isinstance(config, dict):
        raise UsageError("the top of config.json must be an object", path=path)
    facts = model_facts(config, overrides)
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return facts.model_copy(update={"weight_bytes": stored}) if stored and not overrides else facts
