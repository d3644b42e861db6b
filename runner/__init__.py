"""Finds the fastest way to launch vLLM on your own GPUs.

Optuna proposes a launch configuration, a Ray actor brings up ``vllm serve`` on the GPU node and runs the load
benchmark at each concurrency, MLflow records tok/s and how far the goal still is. Imports point down, line by line::

    sweep  best  doctor            entry points (python -m runner.X)
    search  cluster  tracking      Optuna | Ray | MLflow, one room each
    trial                          one trial seen from the driver
    node                           start, measure, stop on the GPU node
    serving  load  simulator  records
    verdict                        pure: objective, guard-rails, ranking
    space                          pure: YAML -> knobs -> LaunchConfig -> argv + env
    schema                         every value that crosses a file or process border
    errors
"""
