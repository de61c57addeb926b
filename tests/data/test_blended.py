from typing import Any

import numpy as np
import pytest

from megalite.data.blended import SURPLUS, BlendedDataset, blend_order, blend_targets, exhaustive_order
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.gpt_index import split_ranges
from megalite.data.indexed import IndexedDataset
from tests.data.reference import GOLDEN, prefix, same_array, sha256_of_rows


@pytest.mark.parametrize("case", range(len(GOLDEN["blend"])))
def test_order_is_megatrons(case: int) -> None:
    expected = GOLDEN["blend"][case]
    datasets, samples = blend_order(expected["weights"], expected["size"])
    assert same_array(datasets, expected["dataset_index"])
    assert same_array(samples, expected["dataset_sample_index"])
    assert np.bincount(datasets, minlength=len(expected["weights"])).tolist() == expected["counts"]


@pytest.mark.parametrize("case", range(len(GOLDEN["exhaustive"])))
def test_exhaustive_order_is_megatrons(case: int) -> None:
    expected = GOLDEN["exhaustive"][case]
    datasets, samples = exhaustive_order(expected["sizes"])
    assert same_array(datasets, expected["dataset_index"])
    assert same_array(samples, expected["dataset_sample_index"])


def test_targets_are_megatrons() -> None:
    for case in GOLDEN["size_per_split"]:
        columns = [blend_targets(case["weights"], size, case["surplus"]) for size in case["sizes"]]
        assert [list(row) for row in zip(*columns, strict=True)] == case["out"]


TOP = GOLDEN["top_level"]


def _gpt(name: str, setting: dict[str, Any], part: int, num_samples: int | None) -> GPTDataset:
    source = IndexedDataset(prefix(name))
    sequences = (0, len(source)) if setting["blend_per_split"] else split_ranges(setting["split"], len(source))[part]
    return GPTDataset(
        source,
        seq_len=setting["sequence_length"],
        seed=setting["seed"],
        num_samples=num_samples,
        sequences=sequences,
    )


def _built(setting: dict[str, Any], part: int) -> BlendedDataset | GPTDataset:
    """What Megatron's builder makes of a setting for one part of the split."""
    size = setting["sizes"][part]
    prefixes, weights = (setting["blend_per_split"] or [(setting["prefixes"], setting["weights"])] * 3)[part]
    if weights is None:
        parts = [_gpt(name, setting, part, None if len(prefixes) > 1 else size) for name in prefixes]
        return parts[0] if len(parts) == 1 else BlendedDataset(parts, None, size)
    requests = blend_targets(weights, size, setting.get("mid_level_dataset_surplus", SURPLUS))
    parts = [_gpt(name, setting, part, n) for name, n in zip(prefixes, requests, strict=True)]
    return BlendedDataset(parts, weights, sum(blend_targets(weights, size)))


def _is_recorded(blend: BlendedDataset, expected: dict[str, Any]) -> bool:
    rows = [blend[i].tokens for i in range(len(blend))]
    return (
        same_array(blend.dataset_index, expected["dataset_index"])
        and same_array(blend.sample_index, expected["dataset_sample_index"])
        and [len(d) for d in blend.datasets] == [m["len"] for m in expected["mid"]]
        and sha256_of_rows(rows) == expected["tokens_sha256_int64"]
    )


@pytest.mark.parametrize("case", range(len(TOP)))
@pytest.mark.parametrize("part", [0, 1, 2])
def test_whole_blends_are_megatrons(case: int, part: int) -> None:
    setting, result = TOP[case]["setting"], TOP[case]["result"]
    if "error" in result:
        if setting["weights"] == [0.0, 1.0]:
            return  # weight 0 leaves a dataset out with a notice: tested below
        with pytest.raises(ValueError, match="not negative, and not all zero"):
            _built(setting, part)
        return
    expected = result[("train", "valid", "test")[part]]
    if expected is None:
        return
    built = _built(setting, part)
    if isinstance(built, BlendedDataset) and "mid" in expected:
        assert _is_recorded(built, expected)
    else:
        assert len(built) == expected["len"]


@pytest.mark.parametrize("seed", range(30))
def test_shares_hold_in_every_prefix(seed: int) -> None:
    random = np.random.RandomState(seed)
    weights = random.rand(random.randint(1, 6)) ** 4
    weights /= weights.sum()
    size = int(random.randint(1, 400))
    datasets, samples = blend_order(weights.tolist(), size)
    requests = blend_targets(weights.tolist(), size, SURPLUS)
    for i, weight in enumerate(weights):
        taken = np.cumsum(datasets == i)
        ahead = taken - weight * np.arange(1, size + 1)
        assert ahead.min() > -2 and ahead.max() < 1
        assert samples[datasets == i].tolist() == list(range(taken[-1]))
        assert taken[-1] <= requests[i]


def test_weight_zero_is_left_out_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    data = GPTDataset(IndexedDataset(prefix("a_u16")), seq_len=16, seed=1)
    blend = BlendedDataset([data, data], [0.0, 2.0], 20)
    assert blend.counts() == [0, 20] and "weight 0 and is left out" in caplog.text


def test_bad_blends() -> None:
    data = GPTDataset(IndexedDataset(prefix("a_u16")), seq_len=16, seed=1)
    for weights in ([0.0, 0.0], [1.0, -0.5], [float("nan"), 1.0]):
        with pytest.raises(ValueError, match="not negative, and not all zero"):
            BlendedDataset([data, data], weights, 10)
    with pytest.raises(ValueError, match="1 blend weights for 2 datasets"):
        BlendedDataset([data, data], [1.0], 10)
    with pytest.raises(ValueError, match="blend weights need a size"):
        BlendedDataset([data, data], [1.0, 2.0])
    with pytest.raises(ValueError, match="draws 100 samples from dataset 0, which has 91"):
        BlendedDataset([data], [1.0], 100)
    with pytest.raises(IndexError, match="sample 10 of 10"):
        BlendedDataset([data], [1.0], 10)[10]
