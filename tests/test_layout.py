"""Layout strings: reading, writing, ranks and what they change in a config."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import Config
from megalite.layout import Layout, format_layout, parse_layout
from megalite.mpu import ParallelConfig


def test_every_part_is_read() -> None:
    layout = parse_layout("tp2+sp+pp2v2:zb_v+cp4:ulysses_ring+ep2+etp2+dp2+zero3+recompute:full+offload:cpu+mbs2")
    assert layout == Layout(
        parallel=ParallelConfig(
            tp=2, sequence_parallel=True, pp=2, vpp=2, schedule="zb_v", cp=4, cp_mode="ulysses_ring", ep=2, etp=2,
            zero=3,
        ),
        dp=2,
        recompute="full",
        offload="cpu",
        micro_batch_size=2,
    )  # fmt: skip
    assert layout.num_ranks == 2 * 4 * 2 * 2


def test_parts_come_in_any_order_and_default_to_one() -> None:
    assert parse_layout("dp2+pp2+tp2") == parse_layout("tp2+pp2+dp2")
    assert parse_layout("single") == parse_layout("tp1") == Layout()
    assert parse_layout("recompute:every:2").recompute == "every:2"


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("single", 1), ("tp2", 2), ("ep2", 2), ("ep4+tp2", 4), ("ep2+etp2", 4), ("ep2+cp2", 2), ("ep6+tp4", 12),
     ("ep4", 4), ("ep2+etp2+tp2+dp2", 4), ("tp2+etp2+ep2+dp2", 4), ("tp4+etp4+ep2+dp2", 8), ("ep2+pp2", 4),
     ("etp2+tp2", 2), ("tp2+pp2+dp2", 8), ("ep2+dp4", 4)],
)  # fmt: skip
def test_an_unnamed_dp_is_the_least_that_fits(text: str, ranks: int) -> None:
    layout = parse_layout(text)
    assert layout.num_ranks == ranks
    assert layout.parallel.data_parallel_size(ranks) == layout.dp


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tq2", "did you mean tp?"),
        ("tp2+spp", "did you mean sp?"),
        ("recompute", "did you mean recompute?"),
        ("zer1", "did you mean zero?"),
        ("tp2+tp4", "sets tp a second time"),
        ("tp0", "at least 1"),
        ("pp2v0", "at least 1"),
        ("tp2v2", "only pp takes"),
        ("tp2g2", "only pp takes"),
        ("pp2v2g0:interleaved", "at least 1"),
        ("dp2:ring", "only pp, cp, ep, etp take"),
        ("ep2:ring", "ep takes :all_to_all, :all_gather or :hierarchical"),
        ("ep2:hierarchical", "such as :hierarchical2"),
        ("cp2:star", "cp takes :ring, :all_gather"),
        ("cp4:ulysses_ring0", "such as :ulysses_ring4"),
        ("cp8:ulysses_ring4,0=ulysses_ring2", "such as :ulysses_ring4"),
        ("cp2:ring,every=ulysses", "such as :ring,every:4=all_gather"),
        ("tp2:ring,every:2=ulysses", "only pp, cp, ep, etp take"),
        ("etp2:half", "etp takes :whole only"),
        ("tp2++pp2", "not a part"),
        ("", "not a part"),
        ("tp", "not a part"),
        ("tp-2", "not a part"),
    ],
)
def test_errors_name_the_part(text: str, said: str) -> None:
    with pytest.raises(ValueError, match="layout") as caught:
        parse_layout(text)
    assert said in str(caught.value)


SIZE = st.sampled_from([1, 2, 3, 4, 8])


@given(
    st.builds(
        ParallelConfig,
        tp=SIZE, pp=SIZE, cp=SIZE, ep=SIZE, etp=SIZE, vpp=SIZE, sequence_parallel=st.booleans(),
        schedule=st.sampled_from(["1f1b", "gpipe", "zb_v"]), group_size=st.sampled_from([None, 3, 8]),
        cut_expert_tokens=st.booleans(), expert_dispatch=st.sampled_from(["all_to_all", "all_gather"]),
        zero=st.integers(0, 3),
        cp_mode=st.sampled_from(["ring", "all_gather", "ulysses", "ring,but_every:2=all_gather"]),
    ),
    SIZE,
    st.sampled_from(["none", "full", "every:2"]),
    st.sampled_from(["none", "cpu", "nvme"]),
    st.sampled_from([None, 1, 2]),
)  # fmt: skip
def test_writing_and_reading_are_inverse(
    parallel: ParallelConfig, dp: int, recompute: str, offload: str, rows: int | None
) -> None:
    layout = Layout(parallel=parallel, dp=dp, recompute=recompute, offload=offload, micro_batch_size=rows)
    assert parse_layout(format_layout(layout)) == layout


def test_how_tokens_reach_experts() -> None:
    layout = parse_layout("ep4:hierarchical2+etp2:whole+tp2")
    assert layout.parallel == ParallelConfig(
        ep=4, etp=2, tp=2, expert_dispatch="hierarchical", expert_node_size=2, cut_expert_tokens=False
    )
    assert parse_layout(format_layout(layout)) == layout
    assert format_layout(layout) == "tp2+ep4:hierarchical2+etp2:whole"
    assert format_layout(parse_layout("ep2:all_to_all")) == "ep2"
    assert parse_layout("ep2:all_gather").parallel.expert_dispatch == "all_gather"


def test_the_ranks_of_a_block_of_heads() -> None:
    layout = parse_layout("cp8:ulysses_ring4")
    assert layout.parallel == ParallelConfig(cp=8, cp_mode="ulysses_ring", cp_ulysses=4)
    assert format_layout(layout) == "cp8:ulysses_ring4"
    assert format_layout(parse_layout("cp8:ulysses_ring2")) == "cp8:ulysses_ring"


def test_layers_with_other_ways_across_the_cut() -> None:
    layout = parse_layout("tp2+cp8:ring,every:4=all_gather,1,3=ulysses_ring4")
    assert layout.parallel == ParallelConfig(
        tp=2, cp=8, cp_mode="ring,every:4=all_gather,1,3=ulysses_ring", cp_ulysses=4
    )
    assert format_layout(layout) == "tp2+cp8:ring,every:4=all_gather,1,3=ulysses_ring4"
    assert parse_layout(format_layout(layout)) == layout


def test_written_form_leaves_out_what_is_off() -> None:
    assert format_layout(parse_layout("mbs4+dp1+pp2:gpipe+sp+tp2")) == "tp2+sp+pp2:gpipe+mbs4"
    assert str(parse_layout("tp1")) == "single"


def test_apply_replaces_the_layout_and_nothing_else() -> None:
    config = Config()
    config = dataclasses.replace(
        config,
        parallel=ParallelConfig(tp=4, order="tp-cp-ep-pp-dp"),
        train=dataclasses.replace(config.train, recompute="full", micro_batch_size=4, seed=9),
    )
    changed = parse_layout("pp2+dp2").apply(config)
    assert changed.parallel == ParallelConfig(pp=2, order="tp-cp-ep-pp-dp")
    assert (changed.train.recompute, changed.train.micro_batch_size, changed.train.seed) == ("none", 4, 9)
    assert parse_layout("mbs1+recompute:full").apply(config).train.micro_batch_size == 1
    assert changed.model == config.model
