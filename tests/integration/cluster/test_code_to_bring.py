"""What a driver brings to a cluster elsewhere: actors run this checkout, whatever is installed over there."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import ray
from runner.cluster.cluster import PACKAGE, code_to_bring

@ray.remote
def there():
    from pathlib import Path
    import runner
    return runner.__file__, [path.name for path in Path().iterdir()]

ray.init(address="local", include_dashboard=False, log_to_driver=False, runtime_env=code_to_bring(PACKAGE))
file, names = ray.get(there.remote())
print(file, *sorted(names), sep="\\n")
"""


def test_actors_run_the_drivers_code(tmp_path: Path) -> None:
    """The package and the described nodes arrive; results, tests and what is hidden stay at home."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    file, *names = told.stdout.splitlines()
    assert "working_dir_files" in file, "not what is installed there"
    assert {"runner", "experiments"} <= set(names)
    assert not {"results", "tests", "build"} & set(names)
    assert not [name for name in names if name.startswith(".")]
