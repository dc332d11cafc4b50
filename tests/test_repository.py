"""What is in the repository names nothing of the machine that it was made on."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = "home", "work", "tmp", "root", "Users", "mnt", "opt"
# put together, so that this file holds none
INSTALL = re.compile(
    rf"(?:pip3?|pipx|uv) (?:tool )?(?:{'install'}|add|run|wheel|download) (?!-e )[^\n]*\bcollab[-_]heads\b".encode()
)
PLACE = re.compile(rf"(?<![\w.~}})])/(?:{'|'.join(FOLDERS)})/[\w.-]+|[\w.-]*{'site'}-packages/[\w.-]+".encode())


def tracked() -> list[Path]:
    """The files of the repository; without git, those of a source distribution."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    return [path for name in listed.stdout.decode().split("\0")[:-1] if (path := ROOT / name).is_file()]


def test_no_file_names_a_place_on_a_machine():
    files = tracked()
    assert {"README.md", "pyproject.toml", "benchmarks/results/seen_marian.json"} <= {
        str(path.relative_to(ROOT)) for path in files
    }
    places = {str(path.relative_to(ROOT)): PLACE.search(path.read_bytes()) for path in files}
    assert {name: match[0] for name, match in places.items() if match} == {}


@pytest.mark.parametrize("place", ("home/me/model", "work/data/x.gz", "tmp/run", "usr/lib/site" + "-packages/torch"))
def test_such_places_are_seen(place):
    for text in (f'"model": "/{place}"', f"python x.py --out /{place}", f"x=/{place}"):
        assert PLACE.search(text.encode())
    for text in ("<a>/home/", "collab_heads/work/x", "https://x.org/tmp/a", "~/work/x", "${ROOT}/tmp/x"):
        assert not PLACE.search(text.encode())


def test_no_file_installs_the_package_from_an_index():
    """It is on none, where anyone may take its name: what says how to install it is `extras.INSTALL`."""
    found = {str(path.relative_to(ROOT)): INSTALL.search(path.read_bytes()) for path in tracked()}
    assert {name: match[0] for name, match in found.items() if match} == {}


def test_such_lines_are_seen():
    pip, package = f"pip {'install'}", "collab-heads"
    for line in (f"{pip} {package}", f'{pip} -U "{package}[plots]"', f"uv {pip} -q collab_heads"):
        assert INSTALL.search(line.encode()), line
    for line in (f'{pip} -e ".[train]"', f"{pip} -e /checkout/collab_heads", f"pip show {package}", f"{pip} torch"):
        assert not INSTALL.search(line.encode()), line
