"""Asked against effective: what differs is said, spelling is not a difference, silence is not one either."""

from pathlib import Path

import pytest

from runner.records import read_study
from runner.schema.base import FlagValue
from runner.schema.launch import Effective, LaunchConfig
from runner.space.asked import asked_and_effective

ROOT = Path(__file__).parents[3]
TOLD: dict[str, FlagValue | None] = {
    "scheduler_config.max_num_seqs": 512,
    "model_config.dtype": "torch.bfloat16",
    "model_config.enforce_eager": False,
    "load_config.device": "cpu",
    "device_config.device": "cuda",
    "compilation_config.pass_config.fuse_allreduce_rms": False,
}
EFFECTIVE = Effective(settings=TOLD, graph_mode="FULL_DECODE_ONLY", capture_sizes=(1, 2, 4))


@pytest.mark.parametrize(
    ("flags", "structured", "said"),
    [
        ({"max-num-seqs": 512, "dtype": "bfloat16", "enforce-eager": False}, {}, ()),
        ({"max-num-seqs": 1024}, {}, ("--max-num-seqs: asked 1024 -> effective 512",)),
        ({"dtype": "float16"}, {}, ("--dtype: asked float16 -> effective torch.bfloat16",)),
        ({"device": "tpu", "port": 8000}, {}, ()),
        (
            {},
            {"compilation-config": {"cudagraph_mode": "FULL", "pass_config": {"fuse_allreduce_rms": True}}},
            (
                "compilation-config.cudagraph_mode: asked FULL -> effective FULL_DECODE_ONLY",
                "compilation-config.pass_config.fuse_allreduce_rms: asked True -> effective False",
            ),
        ),
        (
            {},
            {"compilation-config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}},
            ("compilation-config.cudagraph_capture_sizes: asked [1, 2, 4, 8] -> effective [1, 2, 4]",),
        ),
    ],
)
def test_what_differs_is_said(
    flags: dict[str, FlagValue], structured: dict[str, dict[str, object]], said: tuple[str, ...]
) -> None:
    """One line each, in the words of the command line; ambiguous and untold names are left alone."""
    config = LaunchConfig(model="m", flags=flags, structured=structured)
    assert asked_and_effective(config, EFFECTIVE) == said


def test_real_servers_ran_what_they_were_asked() -> None:
    """The recorded H200 trials: nothing differs, so nothing is said by mistake of spelling."""
    _, records = read_study(ROOT / "results" / "recorded" / "2x-h200-p2p-off")
    compared = [record for record in records if record.effective is not None and record.effective.settings]
    assert len(compared) >= 10
    for record in compared:
        assert record.effective is not None
        assert asked_and_effective(record.config, record.effective) == (), record.params


def test_an_inert_variable_is_named_with_the_backend_that_makes_it_so() -> None:
    """The user asked for a protocol, and the custom all-reduce never asks NCCL."""
    config = LaunchConfig(model="x", gpus=2, env={"NCCL_PROTO": "LL", "NCCL_P2P_LEVEL": "SYS"})
    custom = Effective(all_reduce=("CUSTOM", "PYNCCL"))
    assert asked_and_effective(config, custom) == ("NCCL_PROTO: asked LL -> inert: all-reduces take CUSTOM",)
    assert asked_and_effective(config, Effective(all_reduce=("PYNCCL",))) == ()
    assert asked_and_effective(config, Effective()) == ()
