"""Keys inside vLLM's structured flags. vLLM refuses one that it does not know, after a start of half a minute.

Knows names only; what values they take is in ``values``. Keys of vLLM 0.32.0 (vllm/config), with those that 0.24 and
0.33 have besides.
"""

import difflib
from collections.abc import Iterator

_PASSES = """
    fuse_norm_quant fuse_act_quant fuse_attn_quant fuse_allreduce_rms fuse_act_padding fuse_mla_dual_rms_norm
    fuse_rope_kvcache fuse_rope_kvcache_cat_mla fuse_qk_norm_rope_kvcache fuse_gemm_comms enable_sp
    enable_qk_norm_rope_fusion eliminate_noops fi_allreduce_fusion_max_size_mb rope_kvcache_fusion_max_token_num
    sp_min_token_num
"""
_COMPILATION = """
    mode debug_dump_path cache_dir compile_cache_save_format backend custom_ops ir_enable_torch_wrap splitting_ops
    compile_mm_encoder cudagraph_mm_encoder encoder_cudagraph_token_budgets encoder_cudagraph_max_frames_per_batch
    encoder_cudagraph_max_vision_items_per_batch cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes
    decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints inductor_compile_config inductor_passes
    cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs cudagraph_specialize_lora
    use_inductor_graph_partition pass_config max_cudagraph_capture_size dynamic_shapes_config fast_moe_cold_start
"""
_SPECULATION = """
    enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization
    moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
    disable_padded_drafter_batch disable_eagle_block_drop use_local_argmax_reduction use_heterogeneous_vocab
    prompt_lookup_max prompt_lookup_min parallel_drafting num_speculative_tokens_per_batch_size
    suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_min_token_prob draft_load_config rejection_sample_method synthetic_acceptance_rates
    synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk
    draft_lm_head_quantization
"""

KEYS: dict[tuple[str, ...], frozenset[str]] = {
    ("compilation-config",): frozenset(_COMPILATION.split()),
    ("compilation-config", "pass_config"): frozenset(_PASSES.split()),
    ("compilation-config", "dynamic_shapes_config"): frozenset({"type", "evaluate_guards", "assume_32_bit_indexing"}),
    ("speculative-config",): frozenset(_SPECULATION.split()),
}
"""Place in a structured flag -> the keys that vLLM knows there. Places that are not listed are not judged."""

_GONE_PASSES = ("enable_sequence_parallelism", "enable_async_tp", "enable_fusion", "enable_attn_fusion")

_CLOSE = 0.85
"""A letter or two off; keys of newer versions differ more."""


def misspelt(path: tuple[str, ...]) -> tuple[str, str] | None:
    """What is wrong with the keys of ``path``, and what is meant; None when they may be right."""
    for place, key in _unknown(path):
        if place[-1] == "pass_config" and key in _GONE_PASSES:
            return f"the pass `{key}` is refused at start", "vLLM has had no such pass since before 0.24"
        close = difflib.get_close_matches(key, KEYS[place], n=1, cutoff=_CLOSE)
        if close:
            return f"{'.'.join(place)} has no `{key}`: refused at start", f"did you mean {close[0]}?"
    return None


def unlisted(path: tuple[str, ...]) -> bool:
    """Whether one of the keys is none of those that are known where it stands."""
    return any(_unknown(path))


def _unknown(path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for depth in range(1, len(path)):
        place, key = path[:depth], path[depth]
        if place in KEYS and key not in KEYS[place]:
            yield place, key
