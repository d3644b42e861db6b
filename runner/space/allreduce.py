"""Which path vLLM's tensor-parallel all-reduces take, as far as the configuration tells."""

from runner.space.architectures import breakable_graphs
from runner.space.defaults import defaults
from runner.space.surroundings import Reading

_FLASHINFER = ("env", "VLLM_ALLREDUCE_USE_FLASHINFER")


def fuses_allreduce(config: Reading) -> bool:
    """Whether all-reduce may be fused with the norm after it: asked for, or by itself at level 2 where it is compiled.

    Whether it then is depends on the GPU and on FlashInfer; the server tells.
    """
    asked = config.field("compilation-config", "pass_config", "fuse_allreduce_rms")
    compiled = not config.eager and config.flag("optimization-level") != 0 and not breakable_graphs(config)
    return compiled and (asked is True or (asked is None and config.flag("optimization-level") != 1))


def fuses_across_stages(config: Reading) -> bool:
    """Whether it may be fused while there are pipeline stages too, which is known to hang at warm-up (vllm#43616)."""
    return config.tensor_parallel > 1 and config.pipeline_parallel > 1 and fuses_allreduce(config)


def uses_flashinfer(config: Reading) -> bool:
    """Whether FlashInfer's all-reduce may stand before the others; so it is taken where its default is not known."""
    asked = config.env(_FLASHINFER[1])
    return (asked if asked is not None else defaults(config.around.version).get(_FLASHINFER)) != "0"


def takes_nccl(config: Reading) -> bool:
    """Whether nothing stands before NCCL for an all-reduce of tensor parallelism."""
    return (
        config.flag("disable-custom-all-reduce") is True
        and config.env("VLLM_ALLREDUCE_USE_SYMM_MEM") == "0"
        and not uses_flashinfer(config)
        and not fuses_allreduce(config)
    )
