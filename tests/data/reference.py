"""Results of Megatron-core's own data pipeline, kept in tests/data/golden."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent / "golden"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text())
EOD = GOLDEN["eod"]


def prefix(name: str) -> str:
    """The prefix of a token file."""
    return str(FOLDER / name)


def same_array(found: np.ndarray, expected: dict[str, Any]) -> bool:
    """Whether an array is the recorded one: dtype, shape and bytes."""
    digest = hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()
    return (found.dtype.name, list(found.shape), digest) == (expected["dtype"], expected["shape"], expected["sha256"])


def sha256_of_rows(rows: list[np.ndarray]) -> str:
    """The hash of int64 rows laid end to end."""
    return hashlib.sha256(np.concatenate(rows).astype("<i8").tobytes()).hexdigest()
