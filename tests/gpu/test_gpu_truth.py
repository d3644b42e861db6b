"""The load benchmark and ``vllm bench serve`` on one real server, both by so many requests over the whole wall."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from runner.node import Node
from runner.schema.experiment import LevelProtocol
from runner.schema.trial import Measurement
from runner.serving import gpu
from tests.fakes.two_gpus import GPUS, ROOT, experiment, order

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(len(gpu.gpus()) < len(GPUS), reason="needs two GPUs"),
]

REQUESTS = {1: 16, 10: 100, 64: 384}
"""About 8 s each on an 8B shape."""

VLLM_CLI = ROOT / "runner" / "serving" / "launcher.py"


def make_tokenizer(folder: Path, words: int) -> None:
    """One word a token: text and ids turn into each other exactly, which the peer's random prompts rely on."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0", "model_max_length": 4096}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Path]]:
    """The experiment's baseline with a tokenizer, since the peer sends and gets text."""
    folder = tmp_path_factory.mktemp("truth")
    make_tokenizer(folder / "tokenizer", experiment().workload.vocabulary or 0)
    asked = order(folder, layers=None, skip_tokenizer_init=None, tokenizer=str(folder / "tokenizer"))
    levels = {concurrency: LevelProtocol(requests=count) for concurrency, count in REQUESTS.items()}
    protocol = asked.protocol.model_copy(update={"levels": levels})
    node = Node(folder / "node", gpu_ids=GPUS)
    node.start(asked.model_copy(update={"protocol": protocol, "ladder": tuple(REQUESTS)}))
    yield node, folder
    node.stop()


def ours(node: Node, concurrency: int) -> Measurement:
    return node.measure(concurrency)[0]


def peer_tok_s(node: Node, folder: Path, concurrency: int) -> float:
    """What ``vllm bench serve`` says."""
    server, load = node._server, experiment().workload
    assert server is not None
    port = server.base_url.rsplit(":", 1)[1]
    command = [
        *(sys.executable, str(VLLM_CLI), "bench", "serve", "--backend", "vllm", "--host", "127.0.0.1", "--port", port),
        *("--model", server.served_name, "--tokenizer", str(folder / "tokenizer"), "--dataset-name", "random"),
        *("--random-input-len", str(load.input_tokens), "--random-output-len", str(load.output_tokens)),
        *("--ignore-eos", "--temperature", "0", "--disable-tqdm", "--num-prompts", str(REQUESTS[concurrency])),
        *("--max-concurrency", str(concurrency), "--seed", str(concurrency)),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "peer.json"),
    ]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads((folder / "peer.json").read_text())
    assert told["completed"] == REQUESTS[concurrency]
    return float(told["output_throughput"])


@pytest.mark.parametrize("concurrency", REQUESTS)
def test_agrees_with_the_peer_within_2_percent(concurrency: int, served: tuple[Node, Path]) -> None:
    """Ours before and after the peer, so that drift does not count as difference; tokens equal on both sides."""
    node, folder = served
    first = ours(node, concurrency)
    peer = peer_tok_s(node, folder, concurrency)
    second = ours(node, concurrency)
    for level in (first, second):
        assert level.valid, level.reason
        assert level.tokens_client == level.tokens_server
    mean = ((first.output_tok_s or 0.0) + (second.output_tok_s or 0.0)) / 2
    print(
        f"C={concurrency}: ours {first.output_tok_s:.1f} and {second.output_tok_s:.1f}, vllm bench serve {peer:.1f} "
        f"tok/s, difference {100 * (mean / peer - 1):+.2f} %"
    )
    assert abs(mean / peer - 1) < 0.02
