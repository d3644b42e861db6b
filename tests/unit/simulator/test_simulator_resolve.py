"""What the server makes of its command line, and what it refuses, in vLLM's words and in the right phase."""

import pytest

from runner.schema.node import SimulatedModel
from runner.simulator.arguments import parse
from runner.simulator.describe import from_config, load_model, load_node
from runner.simulator.launch import Launch, Refused
from runner.simulator.resolve import Resolved, resolve

H200 = load_node("2x-h200-nvlink")
BOX = load_node("8x-rtx-pro-6000")
DENSE = load_model("qwen3-8b")
MOE = load_model("glm5-744b-moe-4.5bit")


def resolved(*words: str, env: dict[str, str] | None = None) -> Resolved:
    return resolve(parse(["model", "--max-model-len", "4096", *words]), env or {}, H200, DENSE)


def launch(*words: str, env: dict[str, str] | None = None) -> Launch:
    return resolved(*words, env=env).launch


def test_defaults_of_a_large_gpu() -> None:
    """1024 sequences and 8192 tokens on 139 GiB, graphs of 1..512 tokens, prefix cache and async scheduling on."""
    got = launch("-tp", "2")
    assert (got.max_num_seqs, got.max_num_batched_tokens) == (1024, 8192)
    assert got.capture_sizes[:5] == (1, 2, 4, 8, 16)
    assert got.capture_sizes[-1] == 512
    assert got.prefix_caching
    assert got.async_scheduling
    assert got.runner == "V2"
    assert got.all_reduce == ("CUSTOM", "PYNCCL")
    assert got.graph_mode == "FULL_AND_PIECEWISE"


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        (["--enforce-eager"], "NONE"),
        (["-O0"], "NONE"),
        (["-O", "1"], "PIECEWISE"),
        (["--optimization-level=3"], "FULL_AND_PIECEWISE"),
        (["--compilation-config", '{"cudagraph_mode": "full_decode_only"}'], "FULL_DECODE_ONLY"),
        (["-cc.cudagraph_mode=PIECEWISE"], "PIECEWISE"),
        (["-cc.cudagraph_mode", "PIECEWISE", "-cc.mode=0"], "NONE"),
        (["--compilation-config", '{"mode": "NONE"}'], "FULL_DECODE_ONLY"),
    ],
)
def test_graph_modes(words: list[str], mode: str) -> None:
    """Levels, literals, dotted pieces and the downgrades between them."""
    got = launch(*words)
    assert got.graph_mode == mode
    assert (got.capture_sizes == ()) == (mode == "NONE")


def test_capture_sizes() -> None:
    """Taken as given; what is above the token budget is dropped, with a warning."""
    assert launch("--cudagraph-capture-sizes", "4", "1", "2").capture_sizes == (1, 2, 4)
    got = resolved("--max-num-seqs", "64", "--max-num-batched-tokens", "64", "--cudagraph-capture-sizes", "8", "128")
    assert got.launch.capture_sizes == (8,)
    assert "overridden by config" in got.warnings[0]
    assert "Truncating" in resolved("--max-cudagraph-capture-size", "42").warnings[0]


@pytest.mark.parametrize(
    ("window", "lookup"),
    [("", (5, 5)), (', "prompt_lookup_max": 3', (3, 3)), (', "prompt_lookup_min": 1, "prompt_lookup_max": 3', (1, 3))],
)
def test_the_lookup_window(window: str, lookup: tuple[int, int]) -> None:
    """Five words where nothing is said, both ends where one is; n-gram methods alone have one."""
    asked = '{"method": "ngram", "num_speculative_tokens": 3' + window + "}"
    assert launch("-sc", asked).lookup == lookup
    assert launch().lookup is None


def test_ngram_moves_to_the_old_runner() -> None:
    """It turns async scheduling off, rounds capture sizes to multiples of 1 + K, and says so."""
    got = resolved("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}')
    assert (got.launch.runner, got.launch.async_scheduling) == ("V1", False)
    assert all(size % 4 == 0 for size in got.launch.capture_sizes)
    assert len(got.warnings) == 2


def test_synthetic_acceptance() -> None:
    """A length of 2.5 is one whole draft and half of the next."""
    spec = (
        '{"method": "ngram", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic",'
        ' "synthetic_acceptance_length": 2.5}'
    )
    assert launch("-sc", spec).synthetic_acceptance == (1.0, 0.5, 0.0)


@pytest.mark.parametrize(
    ("words", "env", "where", "says"),
    [
        (["-tp", "3"], {}, "config", "must be divisible by tensor parallel size (3)"),
        (["-tp", "4"], {}, "config", "larger than the number of available GPUs"),
        (["--max-model-len", "100000"], {}, "config", "greater than the derived max_model_len"),
        (["--max-num-seqs", "512", "--max-num-batched-tokens", "256"], {}, "config", "must be greater than or equal"),
        (["--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"], {}, "config", "is smaller than"),
        (["--gpu-memory-utilization", "1.5"], {}, "config", "gpu_memory_utilization"),
        (["--load-format", "floppy"], {}, "worker", "Load format"),
        (["--enable-expert-parallel"], {}, "config", "experts"),
        (["-cc", '{"cudagraph_mode": "TOTAL"}'], {}, "config", "KeyError"),
        (["-cc", '{"pass_config": {"enable_async_tp": true}}'], {}, "config", "enable_async_tp"),
        (["-cc", '{"cudagraph_mod": "FULL"}'], {}, "config", "compilation_config.cudagraph_mod: Unexpected keyword"),
        (["-sc", '{"method": "mtp", "tokens": 2}'], {}, "config", "speculative_config.tokens: Unexpected keyword"),
        (["-cc", '{"cudagraph_capture_sizes": []}'], {}, "config", "at least one element"),
        (
            ["--cudagraph-capture-sizes", "8", "--max-cudagraph-capture-size", "16"],
            {},
            "config",
            "consistent with the max value",
        ),
        (["-sc", '{"method": "eagle3", "num_speculative_tokens": 2}'], {}, "config", "Unsupported"),
        (["-sc", '{"method": "ngram"}'], {}, "config", "num_speculative_tokens"),
        (
            ["-sc", '{"method":"ngram","num_speculative_tokens":2,"prompt_lookup_min":5,"prompt_lookup_max":2}'],
            {},
            "config",
            "prompt_lookup_min",
        ),
        (
            ["-sc", '{"method":"ngram","num_speculative_tokens":2}', "--async-scheduling"],
            {},
            "config",
            "Async scheduling",
        ),
        (["-dp", "2"], {}, "config", "knows tensor, pipeline and expert"),
        (["-pp", "2"], {"VLLM_PP_LAYER_PARTITION": "18,17"}, "weights", "does not match num_hidden_layers"),
        (["-pp", "2"], {"VLLM_PP_LAYER_PARTITION": "36"}, "weights", "does not match pp_size"),
        (["-tp", "2"], {"NCCL_ALGO": "Tree"}, "worker", "no algorithm/protocol available"),
        (["-tp", "2"], {"NCCL_PROTO": "Quick"}, "worker", "ncclInvalidUsage"),
        (["--gpu-memory-utilization", "0.05"], {}, "profile", "No available memory for the cache blocks"),
        (["--gpu-memory-utilization", "1.0"], {}, "capture", "CUDA out of memory"),
    ],
)
def test_what_is_refused(words: list[str], env: dict[str, str], where: str, says: str) -> None:
    """Each in the phase in which vLLM finds out."""
    with pytest.raises(Refused) as refused:
        launch(*words, env=env)
    assert says in refused.value.message
    assert refused.value.where == where


def test_memory_by_arithmetic() -> None:
    """The 744B model fits eight GPUs, as 4 x 2 too, and not four; a short cache is refused with what would fit."""
    fits = resolve(parse(["m", "-tp", "8", "--max-model-len", "4096"]), {}, BOX, MOE).launch
    assert fits.weights_gib == pytest.approx(48.7, abs=0.5)
    assert fits.kv_cache_tokens > 4096
    assert resolve(parse(["m", "-tp", "4", "-pp", "2", "--max-model-len", "4096"]), {}, BOX, MOE).launch.world == 8
    with pytest.raises(Refused) as refused:
        resolve(parse(["m", "-tp", "4", "--max-model-len", "4096"]), {}, BOX, MOE)
    assert "out of memory" in refused.value.message
    assert launch("--num-gpu-blocks-override", "100").kv_cache_tokens == 1600
    with pytest.raises(Refused) as refused:
        resolve(parse(["m", "--kv-cache-memory-bytes", "1000000"]), {}, H200, DENSE)
    assert "larger than the available KV cache memory" in refused.value.message


@pytest.mark.parametrize("words", [["--no-such-flag"], ["--max-num-seqs", "many"], ["--dtype", "int3"], ["-cc", "{"]])
def test_the_command_line_is_refused_with_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """As argparse does."""
    with pytest.raises(SystemExit) as ended:
        parse(["model", *words])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_spellings_of_flags() -> None:
    """Underscores, equals signs, short forms; of dotted pieces and a literal the pieces win."""
    got = parse(["m", "--max_num_seqs=7", "-tp=2", "-cc", '{"mode": 3}', "-cc.cudagraph_mode=NONE", "-O1"])
    assert (got.max_num_seqs, got.tensor_parallel_size, got.optimization_level) == (7, 2, 1)
    assert got.compilation_config == {"cudagraph_mode": "NONE"}
    assert parse(["m", "--max-model-len", "4k"]).max_model_len == 4000


def config(**changes: object) -> SimulatedModel:
    shape: dict[str, object] = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "vocab_size": 32000,
        "max_position_embeddings": 40960,
        "torch_dtype": "bfloat16",
    }
    return from_config(shape | changes, name="shape")


def test_a_model_from_its_config_json() -> None:
    """The same shape as the YAML file; a mixture keeps its experts."""
    got = config()
    assert got.model_copy(update={"name": DENSE.name, "source": DENSE.source}) == DENSE
    mixture = config(num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    assert mixture.experts is not None
    assert (mixture.experts.total, mixture.experts.active) == (128, 8)
