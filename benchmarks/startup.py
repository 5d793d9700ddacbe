"""Time `surgery --help` and `import surgery` as whole processes, in seconds; medians.

python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "surgery --help": [sys.executable, "-m", "surgery", "--help"],
    "import surgery": [sys.executable, "-c", "import surgery"],
    "python -c pass": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    for name, command in COMMANDS.items():
        print(f"{name}: {statistics.median(seconds(command) for _ in range(11)):.3f} s")


if __name__ == "__main__":
    main()
