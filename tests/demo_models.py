"""Model folders with results for tests of the demo page."""

import json
import shutil

from documents import ROOT
from vaswani.training.circumstances import circumstances, weights_sha256

FROZEN = ROOT / "tests" / "frozen" / "0.1"
SAMPLES = ["nine hundred and ninety", "seven"]
RESULTS = {
    "data": {"train": "number words"},
    "pairs": {"train": 20_000},
    "settings": {"languages": ["en", "de"]},
    "test": {"samples": [{"source": s, "translation": "x", "reference": "x"} for s in SAMPLES]},
}


def trained(path, **results):
    """Copy a small trained model, and write a results file with these values."""
    shutil.copytree(FROZEN, path)
    content = {
        **circumstances(),
        "command": "train",
        "commit": "1234567",
        "weights_sha256": weights_sha256(path),
        **results,
    }
    (path / "results.json").write_text(json.dumps(content))
    return str(path)
