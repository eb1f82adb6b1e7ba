"""No request passes more files of a scheduler process than it did, and docs/roads.md names them."""

import json
import re
import subprocess
import sys

from fixtures import roads

# How many files each road may have: as many as today, so that none grows. In the comments, the goals.
BUDGETS = {
    "idle turn": 7,  # 9
    "first pass of a prompt": 36,  # 40
    "decode step": 26,  # 28
    "release kv_cache": 19,  # 24
    "resume kv_cache": 18,  # 24
    "pause retract": 14,  # 20
    "tensors": 34,  # 35
    "bucket": 35,  # 38
    "folder": 33,  # 36
    "delta": 35,  # 38
    "quantised to fp8": 35,  # 40
}


def test_no_road_has_become_longer_and_the_page_names_its_files() -> None:
    # In a process of its own: a profiler slows everything, and other tests have filled caches.
    command = [sys.executable, roads.__file__, "--json"]
    traced = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    longer = {name: files for name, files in traced.items() if len(files) > BUDGETS[name]}
    assert longer == {}
    assert traced.keys() == BUDGETS.keys()

    sections = re.findall(r"^## (.+): \d+ files\n\n(.+)\n", roads.PAGE.read_text(encoding="utf-8"), re.M)
    # In any order: how much is done in one turn of the loop, and so what comes next, depends on the time.
    named = {name: set(re.findall(r"`(\S+)`", files)) for name, files in sections}
    assert named == {name: set(files) for name, files in traced.items()}, f"run python {roads.__file__}"
