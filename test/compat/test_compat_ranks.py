"""Two replicas of two ranks, in the process of a trainer of two ranks, through the import paths of verl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fixtures.compat import COMPAT_ENVIRONMENT, ROOT

TRAINER = Path(__file__).with_name("many_ranks_trainer.py")
MAKE_MODEL = "import sys, tiny_rl; tiny_rl.make_tiny_model(tiny_rl.Path(sys.argv[1]))"


def test_every_rank_of_every_replica_follows(tmp_path: Path) -> None:
    paths = [COMPAT_ENVIRONMENT["PYTHONPATH"], str(ROOT / "examples")]
    environment = {**COMPAT_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", MAKE_MODEL, str(tmp_path)], check=True, env=environment)
    done = subprocess.run(
        [sys.executable, str(TRAINER), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    replies = {}
    for update in ("at first", "by the mesh", "2 entries", "4 entries", "as before"):
        replicas, trainer = found[update]
        assert replicas == [trainer, trainer], update
        replies[update] = trainer
    assert replies["at first"] != replies["by the mesh"]
    assert replies["4 entries"] == replies["as before"]
    assert found["released"] == [True, "Released weights, kv_cache."]
    assert found["gathered"][0] is True
    done_so, why = found["refused"]
    assert done_so is False
    assert "3" in why
    assert "4" in why
    done_so, why = found["one rank refuses"]
    assert done_so is False
    assert "replica 1: rank 1: " in why
    assert found["flushed"] is True
    assert found["states"] == 2
    assert found["version"] == "4"
    assert found["loads"] == [0, 1]
    assert sorted(found["ranks"]) == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert (found["from disk"][0], found["from disk"][2]) == (True, 0)
    assert found["session"] == [True, True]
