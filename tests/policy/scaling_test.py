"""Scaling: the Day-6 node schedule, limits in their order, and no scale-in above 0.8."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_jax.policy import scaling

# DeepSeek-V3/R1 Inference System Overview (day 6): nodes over 24 h from 12:00, and minutes held.
DAY_6_NODES = np.array([278, 218, 188, 158, 128, 98, 68, 98, 128, 188, 218, 278])
DAY_6_MINUTES = np.array([720, 75, 45, 45, 15, 30, 180, 30, 30, 30, 30, 210])


def target(current, demand, capacity=1, low=0, high=10**6, spare=0, up=10**6, down=10**6, use=0.5):
    return scaling.target(current, demand, capacity, low, high, spare, up, down, use)


def test_day_6_average_is_226_75_nodes():
    assert DAY_6_MINUTES.sum() == 24 * 60
    assert scaling.time_average(DAY_6_NODES, DAY_6_MINUTES) == 226.75


def test_demand_reproduces_the_day_6_schedule():
    """Demand of 18 nodes' work less than the spare 20 allow, in steps of at most 60 nodes."""
    capacity = 73_700
    nodes = [278]
    for wanted in DAY_6_NODES[1:]:
        demand = (int(wanted) - 20) * capacity - capacity // 2  # half a node short: rounds up
        nodes.append(int(target(nodes[-1], demand, capacity, 68, 278, 20, 60, 60)))
    assert nodes == DAY_6_NODES.tolist()
    assert scaling.time_average(np.array(nodes), DAY_6_MINUTES) == 226.75


def test_rate_limits_then_bounds():
    assert target(10, 100, up=5) == 15
    assert target(100, 10, down=5) == 95
    assert target(10, 100, up=50, high=30) == 30
    assert target(10, 0, low=4) == 4
    assert target(50, 60, high=40, up=3) == 40  # the bound moved: it wins over rate limits
    assert target(10, 25, capacity=10, spare=2) == 5
    assert target(10, 30, capacity=10, spare=2) == 5
    assert target(10, 31, capacity=10, spare=2) == 6


def test_no_scale_in_above_the_utilisation_limit():
    assert target(10, 3, use=0.8) == 3  # the limit itself still allows it
    assert target(10, 3, use=0.81) == 10
    assert target(10, 30, use=0.99) == 30
    assert target(50, 3, high=40, use=0.9) == 40


@settings(max_examples=200, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 60), min_size=6, max_size=6),
    capacity=st.integers(1, 7),
    use=st.sampled_from([0.5, 0.8, 0.9]),
)
def test_properties_and_both_namespaces(numbers, capacity, use):
    current, demand, low, extra, step, spare = numbers
    arguments = (current, demand, capacity, low, low + extra, spare, step, step, use)
    got = int(scaling.target(*arguments))
    assert low <= got <= low + extra
    clipped = min(max(current, low), low + extra)
    assert abs(got - clipped) <= step
    if use > 0.8:
        assert got >= clipped
    wanted = (demand + capacity - 1) // capacity + spare
    assert (got - clipped) * (wanted - clipped) >= 0 or wanted not in range(low, low + extra + 1)
    assert int(TARGET(*map(jnp.asarray, arguments))) == got


TARGET = jax.jit(scaling.target)


def test_demands():
    assert scaling.prefill_demand(np.array([1000, 902]), np.array([0, 768])) == 1134
    assert scaling.decode_demand(np.array([3, 0, 4])) == 7
