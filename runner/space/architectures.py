"""Model classes that vLLM treats apart, by version."""

from runner.space.surroundings import Reading

_SINCE_0_24 = frozenset(
    {
        "DeepseekV4ForCausalLM",
        "DeepSeekV4MTPModel",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
    }
)
_SINCE_0_32 = _SINCE_0_24 | {
    "DeepseekV32ForCausalLM",
    "DeepseekV32MTPModel",
    "DeepseekV4ForConditionalGeneration",
    "DeepseekV41ForCausalLM",
    "Dots3NoteForCausalLM",
    "Dots3NoteMTPModel",
    "Glm5NextForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Glm5NextMTPModel",
    "GlmMoeDsaForCausalLM",
    "HYV4ForCausalLM",
    "HYV4MTPModel",
    "InklingForCausalLM",
    "InklingForConditionalGeneration",
    "KimiK3ForConditionalGeneration",
    "KimiK3MTPModel",
    "KimiLinearForCausalLM",
    "Qwen4ExpForCausalLM",
    "Qwen4ExpForConditionalGeneration",
    "Qwen4ExpMTP",
}


def breakable_graphs(config: Reading) -> bool:
    """Whether vLLM captures this model with "breakable" graphs, which turns its whole compilation off.

    Then the compilation mode and every pass, fused all-reduce among them, change nothing.

    Source: VllmConfig of vLLM 0.24 and 0.32 (CUDA); a version between counts as the older.
    """
    asked = config.env("VLLM_USE_BREAKABLE_CUDAGRAPH")
    if asked is not None:
        return asked == "1"
    facts = config.around.facts
    if facts is None or facts.architecture is None or config.around.device == "cpu":
        return False
    known = _SINCE_0_32 if config.around.version >= (0, 32, 0) else _SINCE_0_24
    return facts.architecture in known
