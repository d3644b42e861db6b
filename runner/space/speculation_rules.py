"""What vLLM refuses about speculative decoding, as ``rules`` does for the rest: a reason, or None."""

import itertools
from typing import Any

from runner.space.surroundings import Draft, Reading

Reason = str | None

METHODS_WITH_DRAFT = ("eagle", "eagle3", "draft_model", "dflash", "dspark")
_COUNTED_BY_ITSELF = ("mtp", "dspark", "suffix")
_DRAFTED_ON_CPU = ("ngram", "suffix", "custom_class")
_SHORT_FLAGS = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}


def draft_length(config: Reading) -> Reason:
    """Most methods must be told how many tokens to draft; MTP drafts a whole number of passes over its layers."""
    method = config.speculative_method
    asked = config.count("speculative-config", "num_speculative_tokens")
    if method is None:
        fields = ("num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
        loose = config.set_among([("json", "speculative-config", key) for key in fields])
        named = config.field("speculative-config", "model") or config.flag("spec-method") or config.flag("spec-model")
        return f"speculative-config.{loose[0][-1]} is set without a method" if loose and not named else None
    if asked is None and method not in _COUNTED_BY_ITSELF:
        return f"method `{method}` needs speculative-config.num_speculative_tokens"
    facts = config.around.facts
    if method == "mtp" and facts is not None and asked is not None:
        layers = facts.mtp_layers
        if layers and asked > layers and asked % layers:
            return f"draft tokens ({asked}) must be divisible by the model's MTP layers ({layers})"
    return None


def draft_source(config: Reading) -> Reason:
    """The model must have what the method drafts with."""
    method, facts = config.speculative_method, config.around.facts
    model = config.field("speculative-config", "model")
    if method == "mtp" and model is None and facts is not None and not facts.mtp_layers:
        return "the model has no MTP layers to draft with"
    if method not in METHODS_WITH_DRAFT:
        return None
    named = config.around.drafts.get(method)
    if model is None and named is None:
        return f"there is no draft for `{method}`: name one under `drafts` of the experiment"
    draft = named if named is not None and model in (None, named.model) else Draft(str(model))
    if draft.missing:
        return f"the draft `{draft.model}` does not exist"
    foreign = facts is not None and draft.vocabulary not in (None, facts.vocabulary)
    allowed = config.field("speculative-config", "use_heterogeneous_vocab") is True
    if method == "draft_model" and facts is not None and foreign and not allowed:
        return f"the draft's vocabulary ({draft.vocabulary}) is not the model's ({facts.vocabulary})"
    return None


def lookup_window(config: Reading) -> Reason:
    """Of the n-gram window's ends one given is both."""
    if config.speculative_method not in ("ngram", "ngram_gpu"):
        return None
    low = config.count("speculative-config", "prompt_lookup_min")
    high = config.count("speculative-config", "prompt_lookup_max")
    if low is not None and high is not None and low > high:
        return f"prompt_lookup_min ({low}) is above prompt_lookup_max ({high})"
    return None


def draft_parallel(config: Reading) -> Reason:
    """A draft model runs on one GPU or on as many as the model."""
    size = config.count("speculative-config", "draft_tensor_parallel_size")
    if size is None or size in (1, config.tensor_parallel):
        return None
    return f"draft_tensor_parallel_size ({size}) must be 1 or the model's own ({config.tensor_parallel})"


def synthetic_acceptance(config: Reading) -> Reason:
    """Acceptance by decree: exactly one of a length in 1..K+1 and falling rates, one for each draft token."""
    method = config.field("speculative-config", "rejection_sample_method")
    length = config.field("speculative-config", "synthetic_acceptance_length")
    rates = config.field("speculative-config", "synthetic_acceptance_rates")
    if method != "synthetic":
        return "synthetic acceptance is set without `rejection_sample_method: synthetic`" if length or rates else None
    if (length is None) == (rates is None):
        return "synthetic acceptance takes exactly one of synthetic_acceptance_length and synthetic_acceptance_rates"
    most = config.draft_tokens + 1
    if length is not None and not (_is_number(length) and 1 <= length <= most):
        return f"synthetic_acceptance_length ({length}) must lie in 1..{most} (1 + draft tokens)"
    if rates is not None and not _falling_shares(rates, config.draft_tokens):
        return f"synthetic_acceptance_rates must be {config.draft_tokens} values in 0..1 that never rise"
    return None


def _falling_shares(rates: Any, count: int) -> bool:
    if not isinstance(rates, list | tuple) or len(rates) != count or not all(map(_is_number, rates)):
        return False
    return all(0 <= rate <= 1 for rate in rates) and all(late <= early for early, late in itertools.pairwise(rates))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def adaptive_verification(config: Reading) -> Reason:
    """Verification that trims drafts by confidence knows it on the last pipeline stage only, and needs full graphs."""
    if config.field("speculative-config", "enable_adaptive_verification") is not True:
        return None
    if config.pipeline_parallel > 1:
        return "adaptive verification does not work with pipeline parallel"
    if config.eager or config.field("compilation-config", "cudagraph_mode") in ("NONE", "PIECEWISE"):
        return "adaptive verification needs full CUDA graphs"
    return None


def said_twice(config: Reading) -> Reason:
    """The short flags and the same fields of the JSON exclude each other."""
    for flag, key in _SHORT_FLAGS.items():
        if config.flag(flag) is not None and config.field("speculative-config", key) is not None:
            return f"--{flag} and speculative-config.{key} say the same thing: mutually exclusive"
    return None


def async_without_gpu_drafts(config: Reading) -> Reason:
    """Async scheduling, asked for explicitly, waits for no drafts that the CPU makes.

    Source: VllmConfig of vLLM 0.24 and 0.32; 0.33 drafts n-grams on the GPU.
    """
    if config.flag("async-scheduling") is not True or config.speculative_method not in _DRAFTED_ON_CPU:
        return None
    return f"no async scheduling with `{config.speculative_method}` drafts: leave async-scheduling unset, or off"


def async_on_old_runner(config: Reading) -> Reason:
    """Async scheduling, asked for explicitly, on the V1 runner: not with pipeline stages nor with CPU-made drafts."""
    if config.flag("async-scheduling") is not True or config.env("VLLM_USE_V2_MODEL_RUNNER") != "0":
        return None
    if config.pipeline_parallel > 1:
        return "the V1 model runner has no async scheduling with pipeline parallel"
    if config.speculative_method in _DRAFTED_ON_CPU:
        return f"the V1 model runner has no async scheduling with `{config.speculative_method}` drafts"
    return None
