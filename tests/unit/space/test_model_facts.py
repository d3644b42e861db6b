"""A model's shape and size are read from its config.json, with overrides applied."""

import json
from pathlib import Path
from typing import Any

import pytest

from runner.errors import UsageError
from runner.space.model_facts import GIB, model_facts, read_model_facts
from tests.spaces import DENSE_CONFIG, dense

SHIPPED = Path(__file__).parents[3] / "experiments" / "models" / "qwen3-8b-shape"

MOE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8"},
}


def test_a_dense_model() -> None:
    """The shipped 8B shape: heads, layers, 7.2 billion weights with the reduced vocabulary, 13.4 GiB in bf16."""
    facts = read_model_facts(SHIPPED)
    assert (facts.heads, facts.kv_heads, facts.layers, facts.intermediate) == (32, 8, 36, 12288)
    assert facts.vocabulary == 32000
    # By hand: 36 x (4096 x 128 x (2 x 32 + 2 x 8) + 3 x 4096 x 12288) + 2 x 32000 x 4096.
    assert facts.parameters == 36 * (4096 * 128 * 80 + 3 * 4096 * 12288) + 2 * 32000 * 4096
    assert facts.weight_bytes == 2 * facts.parameters
    assert facts.kv_bytes_per_token == 2 * 36 * 2 * 8 * 128
    assert facts == dense(architectures=["Qwen3ForCausalLM"], max_position_embeddings=40960)


def test_a_mixture_of_experts_with_latent_attention() -> None:
    """671 billion weights, 37 billion of them active (as its authors say), one latent KV head, an MTP layer."""
    facts = model_facts(MOE)
    assert facts.parameters == pytest.approx(671e9, rel=0.01)
    assert facts.active_parameters == pytest.approx(37e9, rel=0.03)
    assert facts.weight_bytes == facts.parameters
    assert (facts.experts, facts.experts_per_token, facts.kv_heads, facts.mtp_layers) == (256, 8, 1, 1)
    assert facts.kv_bytes_per_token == 2 * 61 * (512 + 64)
    assert facts.quantisation == "fp8"


def test_overrides_replace_and_merge() -> None:
    """Scalars replace, objects merge into sub-configs."""
    assert model_facts(DENSE_CONFIG, {"num_hidden_layers": 4}).layers == 4
    nested = {"text_config": dict(DENSE_CONFIG), "architectures": ["VisionForCausalLM"]}
    facts = model_facts(nested, {"text_config": {"num_hidden_layers": 2}})
    assert (facts.layers, facts.heads, facts.architecture) == (2, 32, "VisionForCausalLM")


@pytest.mark.parametrize(
    ("changes", "bytes_each"),
    [
        ({"torch_dtype": "float32"}, 4.0),
        ({"dtype": "float16"}, 2.0),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, 0.5),
        ({"quantization_config": {"quant_method": "awq"}}, 0.5),
        ({"quantization_config": {"quant_method": "fp8"}}, 1.0),
    ],
)
def test_bytes_follow_dtype_and_quantisation(changes: dict[str, Any], bytes_each: float) -> None:
    """Of a weight, by what the config says."""
    facts = dense(**changes)
    assert facts.weight_bytes / facts.parameters == pytest.approx(bytes_each, rel=1e-6)


def test_tied_embeddings_are_counted_once() -> None:
    """The head is the embedding."""
    assert dense().parameters - dense(tie_word_embeddings=True).parameters == 32000 * 4096


def test_stored_weights_win_over_computed_ones(tmp_path: Path) -> None:
    """Where safetensors files lie in the folder, their size counts; not under overrides, which change the shape."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE_CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    assert read_model_facts(tmp_path).weight_bytes == 1000
    assert read_model_facts(tmp_path, {"num_hidden_layers": 1}).weight_bytes > GIB / 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("{", "not valid JSON"),
        ("[]", "must be an object"),
        ("{}", "no usable `num_attention_heads`"),
        ('{"num_attention_heads": 0}', "found 0"),
        ('{"num_attention_heads": "many"}', 'found "many"'),
    ],
)
def test_a_broken_model_folder_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    """Missing, malformed, or not a decoder's config."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=words):
        read_model_facts(tmp_path)
