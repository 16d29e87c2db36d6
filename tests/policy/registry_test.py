"""Policies by name and by path, and what a typo is told."""

import pytest

from deepinfer_jax.policy import decode, prefill, registry


def test_names_resolve_to_their_functions():
    assert registry.resolve("prefill", "dynamo_cost") is prefill.dynamo_cost
    assert registry.resolve("decode", "random") is decode.random
    for kind in registry.POLICIES:
        for name in registry.names(kind):
            assert registry.resolve(kind, name).__name__ == name


def test_own_policy_by_path():
    path = "deepinfer_jax.policy.decode:two_load"
    assert registry.resolve("decode", path) is decode.two_load


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("decode", "two_laod", "did you mean 'two_load'"),
        ("prefill", "cacheaware", "did you mean 'cache_aware'"),
        ("prefil", "pull", "prefill, decode"),
        ("decode", "no.such.module:f", "no.such.module"),
        ("decode", "deepinfer_jax.policy.decode:nothing", "nothing"),
        ("decode", "deepinfer_jax.policy.decode:PARTS", "not callable"),
        ("decode", ":f", "package.module:function"),
    ],
)
def test_errors_propose_a_remedy(kind, name, told):
    with pytest.raises(ValueError, match=told):
        registry.resolve(kind, name)
