"""Folders of runs, as `train`, `simulate` and `compare` write them, with whatever content a test wants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

EVIL = "</script><script>document.title='broken out'</script><img src=x onerror=alert(1)><!--"


def run_folder(folder: Path, **changed: Any) -> Path:
    """A summary as a run leaves it, with some fields changed."""
    worker = {"rank": 0, "steps": 2, "compute_s": 1.0, "communicate_s": 0.5, "wait_s": 0.5, "bytes_sent": 10}
    run = {
        "strategy": "bsp", "settings": {}, "task": "digits", "world": "virtual", "workers": 1, "seed": 0,
        "steps": 2, "samples": 4, "seconds": 1.5, "samples_per_second": 2.7, "bytes_sent": 10,
        "sync_steps": 2, "local_steps": 0, "metric": "accuracy", "value": 0.5, "best": 0.5,
        "target": None, "seconds_to_target": None,
        "per_worker": [{**worker, "staleness_mean": 0.0, "staleness_max": 0}],
        "history": [{"step": 2, "seconds": 1.5, "loss": 1.0, "value": 0.5}],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps({**run, **changed}))
    return folder
