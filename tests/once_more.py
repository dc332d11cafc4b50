"""Run tests, and each that fails or whose process dies once more, alone, in a fresh process.

    python tests/once_more.py -n 2 -m slow tests

A test that passes alone is printed as unstable, and does not fail the run: chance, or tests that disturb each other.
One that fails again is a fault. The arguments are those of pytest.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

MOST = 5  # failures that may be chance: more of them are a fault
SECONDS = 600  # for a test alone
FAILED = 1  # exit code of pytest: tests ran, and some failed


def main(arguments: Sequence[str]) -> int:
    """Run the tests, then those that failed; return the exit code."""
    code, failed = run(arguments)
    if code != FAILED or not failed or len(failed) > MOST:
        return code
    unstable = []
    for name in failed:
        print(f"\nonce more, alone: {name}", flush=True)
        if run(["-m", "slow or not slow", name], SECONDS)[0]:
            return FAILED
        unstable.append(name)
    print("\nunstable: failed beside other tests, passed alone", *unstable, sep="\n  ", flush=True)
    return 0


def run(arguments: Sequence[str], seconds: float | None = None) -> tuple[int, list[str]]:
    """Run pytest in a fresh process; return its exit code and the tests that failed."""
    with tempfile.TemporaryDirectory() as place:
        try:
            command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={place}", *arguments]
            code = subprocess.run(command, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            print(f"not done after {seconds:.0f} s", flush=True)
            return FAILED, []
        file = Path(place) / "v/cache/lastfailed"
        return code, list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
