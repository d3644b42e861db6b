"""``python -m runner.sweep``: Optuna proposes, a Ray actor serves and loads, MLflow records.

The only room that knows all others. ``plan`` turns the command line into values, ``loop`` runs the trials, ``display``
talks to the terminal.
"""
