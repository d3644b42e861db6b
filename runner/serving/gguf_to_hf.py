"""Turns a GGUF file of a Llama-shaped model into a folder of safetensors, tokenizer and configuration.

Knows tied or untied embeddings, grouped key/value heads and byte-level BPE vocabularies; nothing of other
architectures. Run in a process of its own by ``runner.serving.bundled``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_OUTSIDE_LAYERS = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
}
_IN_LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_COMPUTED = "rope_freqs"
_CONTROL_TOKEN = 3
"""GGUF's token type of special tokens."""


def main() -> None:
    """``SOURCE.gguf TARGET_FOLDER``; the folder must exist."""
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    reader = GGUFReader(source)
    tensors = weights(reader)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = configuration(reader, tied="lm_head.weight" not in tensors)
    (target / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(reader, target)


def weights(reader: GGUFReader) -> dict[str, torch.Tensor]:
    """Every tensor in bfloat16 under its Hugging Face name."""
    heads, kv_heads = _field(reader, "llama.attention.head_count"), _field(reader, "llama.attention.head_count_kv")
    tensors: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        if name == _COMPUTED:
            continue
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        if name in _OUTSIDE_LAYERS:
            key = _OUTSIDE_LAYERS[name]
        else:
            _, layer, part = name.split(".")
            key = f"model.layers.{layer}.{_IN_LAYERS[part]}.weight"
            if part in ("attn_q", "attn_k"):
                values = _unpermuted(values, heads if part == "attn_q" else kv_heads)
        tensors[key] = values.to(torch.bfloat16).contiguous()
    return tensors


def _unpermuted(values: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves that rotary embedding turns; Hugging Face keeps them apart."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def configuration(reader: GGUFReader, *, tied: bool) -> dict[str, Any]:
    """``config.json``."""
    hidden, heads = _field(reader, "llama.embedding_length"), _field(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": round(float(_field(reader, "llama.attention.layer_norm_rms_epsilon")), 10),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": int(_field(reader, "tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(_field(reader, "tokenizer.ggml.eos_token_id")),
        "torch_dtype": "bfloat16",
    }


def write_tokenizer(reader: GGUFReader, target: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` from the vocabulary and merges in the file."""
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = _field(reader, "tokenizer.ggml.token_type")
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        "model_max_length": _field(reader, "llama.context_length"),
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _field(reader: GGUFReader, name: str) -> Any:
    """The value of one field of the file's header; None when it has none of that name."""
    field = reader.fields.get(name)
    return None if field is None else field.contents()
