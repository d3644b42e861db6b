"""Which experiment a space gets, and what the machine adds to it."""

import os
from pathlib import Path

import pytest

from runner.errors import UsageError
from runner.schema.experiment import Engine, Settings
from runner.space import Machine, this_machine
from runner.space.surroundings import PROTECTIVE
from runner.sweep.plan import FLASHINFER_ALL_REDUCE, Options, default_experiment, make_plan, model_of, off_multicast
from tests.studies import experiment

SIMULATED = """
engine: {kind: simulated, node: 2x-h200-p2p-off}
model: experiments/models/qwen3-8b-shape
workload: {prompts: random_tokens}
ladder: [1]
"""


@pytest.mark.parametrize(
    ("space", "gpus", "expected"),
    [
        ("cpu.yaml", 0, "local-cpu"),
        ("search_spaces/cpu.yaml", 8, "local-cpu"),
        ("nccl.yaml", 8, "local-gpu"),
        ("nccl", 0, "simulated-8xpcie"),
    ],
)
def test_the_space_and_the_machine_choose_the_experiment(space: str, gpus: int, expected: str) -> None:
    """A CPU space is for CPUs; others are real where GPUs are, and simulated only where none is."""
    assert default_experiment(space, gpus) == expected


def test_a_missing_model_folder_is_said_before_anything_starts() -> None:
    """A path that is not there is no hub name."""
    with pytest.raises(UsageError, match="is not there"):
        model_of(experiment().model_copy(update={"model": "./no-such-model"}))


def test_a_hub_name_is_passed_on_without_facts() -> None:
    """Nothing is known of a model that only a hub has, and nothing is ruled out by it."""
    assert model_of(experiment().model_copy(update={"model": "org/name"})) == ("org/name", None)


def test_a_broken_model_folder_is_said(tmp_path: Path) -> None:
    """A folder whose config.json is no model's names the file."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json"):
        model_of(experiment().model_copy(update={"model": str(tmp_path)}))


def test_no_compiler_means_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a C++ compiler the CPU experiment's default is eager, in one line."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    plan = make_plan(Options(space="cpu.yaml"))
    assert plan.experiment.defaults.flags["enforce-eager"] is True
    assert any("C++ compiler" in note for note in plan.notes)


def test_a_sweep_without_gpus_is_called_simulated() -> None:
    """A space that needs GPUs gets a simulated node here, and the first note says so."""
    plan = make_plan(Options(space="nccl.yaml"))
    assert plan.experiment.engine.kind == "simulated"
    assert "SIMULATED" in plan.notes[0]


def test_a_real_gpu_experiment_without_gpus_is_refused() -> None:
    """Naming a real experiment on a machine without GPUs is an error, never a silent simulation."""
    with pytest.raises(UsageError, match="needs a GPU"):
        make_plan(Options(space="nccl.yaml", experiment="local-gpu"))


def test_an_engine_on_a_cpu_has_no_gpus() -> None:
    """GPUs of the machine do not count for a CPU experiment."""
    assert make_plan(Options(space="cpu.yaml")).gpus == 0
    assert Engine(device="cpu").gpus is None


def test_a_protected_host_keeps_flashinfers_multicast_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host turns multicast off, FlashInfer's own all-reduce is off by default, pinned or not."""
    for name, value in PROTECTIVE.items():
        monkeypatch.setenv(name, value)
    machine = this_machine(os.environ)
    plain = off_multicast(experiment(), machine)
    assert plain.defaults.env == {FLASHINFER_ALL_REDUCE: "0"}
    pinned = experiment().model_copy(update={"pinned": Settings(env={FLASHINFER_ALL_REDUCE: "0"})})
    assert off_multicast(pinned, machine) == pinned
    assert off_multicast(experiment(), Machine()) == experiment()


def test_token_ids_are_drawn_below_the_models_own_vocabulary(tmp_path: Path) -> None:
    """`random_tokens` without a vocabulary takes it from config.json."""
    (tmp_path / "simulated.yaml").write_text(SIMULATED)
    plan = make_plan(Options(space="cudagraph.yaml", experiment=str(tmp_path / "simulated.yaml")))
    assert plan.experiment.workload.vocabulary == 32000


def test_requests_longer_than_the_server_takes_are_refused() -> None:
    """Found before anything starts, with both numbers."""
    with pytest.raises(UsageError, match=r"up to 192 tokens and max-model-len is 100"):
        make_plan(Options(space="cpu.yaml", serve="--max-model-len 100"))


def test_a_model_folder_without_weights_is_said(tmp_path: Path) -> None:
    """A configuration alone, or a file cut short, is no model; with dummy weights it is one."""
    shape = Path(__file__).parents[3] / "experiments" / "models" / "qwen3-8b-shape"
    (tmp_path / "config.json").write_text((shape / "config.json").read_text())
    given = experiment().model_copy(update={"model": str(tmp_path)})
    with pytest.raises(UsageError, match="has no weights"):
        model_of(given)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="cut short"):
        model_of(given)
    dummy = given.model_copy(update={"defaults": Settings(flags={"load-format": "dummy"})})
    assert model_of(dummy)[0] == str(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 64)
    assert model_of(given)[0] == str(tmp_path)


@pytest.mark.parametrize(
    "lines",
    [
        'defaults: {env: {MY_STORE: "http://me:s3cretpw@proxy:3128"}}',
        'pinned: {flags: {download-dir: "s3://me:s3cretpw@store"}}',
        "defaults: {json: {model-loader-extra-config: {token: hf_0123456789abcdefghij}}}",
    ],
)
def test_a_secret_in_an_experiment_is_refused(tmp_path: Path, lines: str) -> None:
    """Settings go into records, MLflow and profiles; the message does not repeat the secret."""
    (tmp_path / "simulated.yaml").write_text(f"{SIMULATED}{lines}\n")
    with pytest.raises(UsageError, match="sets a secret") as raised:
        make_plan(Options(space="nccl.yaml", experiment=str(tmp_path / "simulated.yaml")))
    assert "s3cretpw" not in str(raised.value)


@pytest.mark.parametrize(
    "knob", ["{env: HF_TOKEN, choices: [abc]}", '{env: MY_STORE, choices: ["s3://me:s3cretpw@store"]}']
)
def test_a_secret_in_a_space_is_refused(tmp_path: Path, knob: str) -> None:
    """What a knob may set is recorded as well."""
    (tmp_path / "space.yaml").write_text(f"knobs:\n  a: {knob}\n")
    with pytest.raises(UsageError, match=r"sets a secret|HF_TOKEN") as raised:
        make_plan(Options(space=str(tmp_path / "space.yaml")))
    assert "s3cretpw" not in str(raised.value)


def test_a_first_try_that_is_no_point_of_the_space_is_said_before_a_study_begins(tmp_path: Path) -> None:
    """A misspelt label in ``search.try_first`` must not leave a study behind that refuses the corrected one."""
    text = f"{SIMULATED}search: {{try_first: [{{protocol: L}}]}}\n"
    (tmp_path / "simulated.yaml").write_text(text)
    with pytest.raises(UsageError, match="try_first"):
        make_plan(Options(space="nccl.yaml", experiment=str(tmp_path / "simulated.yaml")))


def test_an_adopted_interpreter_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHON= with a typing mistake is one message, before anything starts."""
    monkeypatch.setenv("TOK100_PYTHON", "/nowhere/bin/python")
    with pytest.raises(UsageError, match="PYTHON=/nowhere/bin/python is no program"):
        make_plan(Options(space="cpu.yaml"))


def test_a_misspelt_flag_is_refused_on_a_simulated_engine_too(tmp_path: Path) -> None:
    """In a space, in the experiment and on the command line, as a real engine's help would tell."""
    text = "knobs: {a: {flag: %s, choices: [8]}}\n"
    (tmp_path / "wrong.yaml").write_text(text % "max-num-seq")
    (tmp_path / "right.yaml").write_text(text % "max-num-seqs")
    (tmp_path / "simulated.yaml").write_text(SIMULATED + "defaults: {flags: {max-num-seq: 8}}\n")
    right = str(tmp_path / "right.yaml")
    for options in (
        Options(space=str(tmp_path / "wrong.yaml")),
        Options(space=right, experiment=str(tmp_path / "simulated.yaml")),
        Options(space=right, serve="--max-num-seq 3"),
    ):
        with pytest.raises(UsageError, match=r"the simulated engine has no flag --max-num-seq\n.*mean `max-num-seqs`"):
            make_plan(options)
    assert make_plan(Options(space=right, serve="--no-enforce-eager")).space.knobs[0].labels == ("8",)
