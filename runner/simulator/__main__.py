"""``python -m runner.simulator serve MODEL ...``: passes for ``vllm serve``, with no GPU and no model.

It takes vLLM's arguments and environment, logs its start in vLLM's words, forks an engine core and workers, answers
vLLM's HTTP API and ``/metrics``, and streams tokens in real time at the pace that a cost model gives for a described
node (``runner/simulator/costs.py``). Its first log line, ``/version`` and ``/server_info`` say "simulated".

``python -m runner.simulator calibrate`` prints how close the described nodes come to measured figures.

Environment of its own:

    SIMULATED_NODE      node: YAML path or name in experiments/nodes (default 8x-rtx-pro-6000)
    SIMULATED_START_S   seconds the whole start takes (default 1)
    SIMULATED_SEED      switches noise on: one draw of speed per start, small ones per step
    SIMULATED_AGE_H     age of the node in hours, for the drift in its YAML
    SIMULATED_ACCESS_LOG=1   one log line a request
    SIMULATED_FAULT     what shall go wrong, several separated by ";" (all of them: ``runner/simulator/faults.py``)
        hang_at:weights            crash_at:capture:torch.OutOfMemoryError: CUDA out of memory.
        engine_fails_at:init:...   exit0_after:2           kill_worker_after:2
        engine_dead_after:100      engine_stuck_after:100  engine_dead_after:100;green_health
        stream_error_after:5       truncate_after:3        short_output:2      tokens_per_chunk:4
        no_usage  no_counters  wrong_counter:5  wrong_model:other  no_cache_reset  prefix_hits
        sigterm_deaf  orphan  double_fork  log_flood:1000  silent  slow_start:5

Memory is arithmetic and always on: what does not fit ends like vLLM, with its message, in the phase where it shows.
"""

import os
import sys

from runner.simulator import calibration
from runner.simulator.faults import BadFault, read_faults
from runner.simulator.serve import serve


def main(words: list[str]) -> int:
    """Run the command in ``words``; the exit code."""
    if words[:1] == ["serve"]:
        try:
            faults = read_faults(os.environ.get("SIMULATED_FAULT", ""))
        except BadFault as error:
            print(f"SIMULATED_FAULT: {error}", file=sys.stderr)
            return 2
        return serve(words[1:], os.environ, faults)
    if words == ["calibrate"]:
        checks = calibration.story_checks() + calibration.h200_checks(calibration.h200_figures())
        print(calibration.table(checks))
        return 0 if all(check.passes for check in checks) else 1
    print("usage: python -m runner.simulator serve MODEL [vLLM's flags] | calibrate", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
