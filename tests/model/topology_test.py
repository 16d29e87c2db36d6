"""Cross-layer sharing: the released model's roles, and each rule broken once."""

import dataclasses

import pytest

from deepinfer_jax.model.topology import Mode, check, topology
from deepinfer_jax.presets import small, tiny, v41_flash


def test_the_released_model():
    layers = topology(v41_flash()).layers
    ids = {mode: [x.id for x in layers if x.mode is mode] for mode in Mode}
    assert ids[Mode.WINDOW] == [0, 1]
    assert ids[Mode.FULL] == [2, 8, 14, 20]
    assert ids[Mode.REINDEX] == [24, 28, 32, 36]
    assert len(ids[Mode.REUSE]) == 30
    assert [x.id for x in layers if x.offers_candidates] == [20]
    assert [x.id for x in layers if x.uses_candidates] == [24, 28, 32, 36]
    assert {x.kv_source for x in layers[20:]} == {20} and layers[19].kv_source == 14
    assert [layers[i].index_source for i in (21, 24, 27, 39)] == [20, 24, 24, 36]
    assert [layers[i].ratio for i in (1, 2, 19, 20, 39)] == [0, 2, 2, 1, 1]


@pytest.mark.parametrize("preset", [tiny, small, v41_flash])
def test_presets_have_every_mode(preset):
    assert {x.mode for x in topology(preset()).layers} == set(Mode)


def broken(layer, **change):
    """tiny's topology with one layer changed; its sources: KV 2, 4; index 2, 4, 6."""
    made = topology(tiny())
    layers = list(made.layers)
    layers[layer] = dataclasses.replace(layers[layer], **change)
    return dataclasses.replace(made, layers=tuple(layers))


@pytest.mark.parametrize(
    ("layer", "change", "message"),
    [
        (3, {"kv_source": 4}, "layer 3 names 4 as its kv_source; a source lies at or before"),
        (3, {"kv_source": 1}, "layer 3 names 1 as its kv_source; .* its own source"),
        (7, {"kv_source": 2, "index_source": 2}, "layer 7 reads from kv_source 2 past .4."),
        (7, {"index_source": 4}, "layer 7 reads from index_source 4 past .6."),
        (4, {"kv_source": 2, "index_source": 2}, "layer 5 names 4 as its kv_source"),
        (5, {"ratio": 2}, "layer 5 has ratio 2 but its source 4 has 1"),
        (6, {"offers_candidates": True}, "candidate source 6 is a reindex layer"),
        (3, {"uses_candidates": True}, "layer 3 uses candidates but no earlier layer"),
    ],
)
def test_a_broken_rule_is_named(layer, change, message):
    with pytest.raises(ValueError, match=message):
        check(tiny(), broken(layer, **change))


def test_a_selection_does_not_outlive_its_rows():
    made = topology(tiny())
    layers = tuple(
        dataclasses.replace(x, index_source=2) if x.id in (4, 5) else x for x in made.layers
    )
    with pytest.raises(
        ValueError, match="layer 4 uses the selection of 2, made from the rows of 2"
    ):
        check(tiny(), dataclasses.replace(made, layers=layers))


def test_no_segment_crosses_the_boundary():
    made = topology(tiny())
    layers = tuple(
        dataclasses.replace(x, kv_source=2, index_source=2, ratio=2) if x.id >= 2 else x
        for x in made.layers
    )
    with pytest.raises(ValueError, match="layer 4 reads the rows of 2 across the boundary at 4"):
        check(tiny(), dataclasses.replace(made, layers=layers))


def test_a_pool_smaller_than_the_selection():
    config = tiny()
    object.__setattr__(config, "candidate_topk_blocks", 1)
    with pytest.raises(ValueError, match="layer 4 offers 4 candidate rows for index_topk 8"):
        topology(config)
