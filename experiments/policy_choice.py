"""All routing policies in one compiled program: which one decides is a number of the scenario.

A policy is a branch-free function, so every registered one is evaluated and one answer is taken.
`pull` is no routing policy (the simulator compiles another queue for it) and is left out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from deepinfer_jax.policy import registry
from deepinfer_jax.policy.view import (
    DecodeView,
    PolicyParameters,
    PrefillView,
    RequestView,
    namespace,
)
from deepinfer_jax.simulator.cluster import ClusterConfig
from deepinfer_jax.simulator.scenario import Scenario

PREFILL = tuple(name for name in registry.names("prefill") if name != "pull")
DECODE = registry.names("decode")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen(PolicyParameters):
    """The parameters of all policies, and which of `PREFILL` and `DECODE` decide. Scalars."""

    prefill_choice: Any = 0
    decode_choice: Any = 0


def prefill(view: PrefillView, request: RequestView, parameters: Chosen) -> Any:
    """The engine that policy number `prefill_choice` takes."""
    made = [registry.POLICIES["prefill"][name](view, request, parameters) for name in PREFILL]
    return namespace(view.quota_used).stack(made)[parameters.prefill_choice]


def decode(view: DecodeView, request: RequestView, parameters: Chosen) -> Any:
    """The rank that policy number `decode_choice` takes."""
    made = [registry.POLICIES["decode"][name](view, request, parameters) for name in DECODE]
    return namespace(view.tokens).stack(made)[parameters.decode_choice]


def together(cluster: ClusterConfig) -> ClusterConfig:
    """`cluster` with its registered policies replaced by the choice; others keep their program."""
    changes: dict[str, Any] = {}
    if cluster.prefill_policy in PREFILL:
        changes["prefill_policy"] = f"{__name__}:prefill"
    if cluster.decode_policy in DECODE:
        changes["decode_policy"] = f"{__name__}:decode"
    return dataclasses.replace(cluster, **changes)


def choose(scenario: Scenario, cluster: ClusterConfig) -> Scenario:
    """The numbers of a `together` cluster, deciding as `cluster` says."""
    known = {
        field.name: getattr(scenario.policy, field.name)
        for field in dataclasses.fields(PolicyParameters)
    }
    which = [
        names.index(name) if name in names else 0
        for names, name in ((PREFILL, cluster.prefill_policy), (DECODE, cluster.decode_policy))
    ]
    return dataclasses.replace(
        scenario, policy=Chosen(**known, prefill_choice=which[0], decode_choice=which[1])
    )
