"""Tables fit the terminal and numbers read well."""

import hypothesis
import hypothesis.strategies as st
import pytest

from deepinfer_jax.report import table


@pytest.mark.parametrize(
    "value, unit, text",
    [
        (0.0123, "s", "12.3 ms"),
        (0.9999, "s", "1 s"),
        (3.2e-6, "s", "3.2 µs"),
        (5e-9, "s", "5 ns"),
        (0.0, "s", "0 s"),
        (7200.0, "s", "2 h"),
        (113_920, "B", "114 kB"),
        (0.3741, "%", "37.4 %"),
        (1.0, "%", "100 %"),
        (15744.2, "tokens/s", "15,744 tokens/s"),
        (12031, "", "12,031"),
        (None, "s", "-"),
        (float("nan"), "s", "-"),
        (float("inf"), "", "∞"),
        (0.00012, "", "0.00012"),
        (True, "", "yes"),
        (99.96, "", "100"),
    ],
)
def test_quantity(value, unit, text):
    assert table.quantity(value, unit) == text


@hypothesis.given(st.floats(1e-4, 1e12))
def test_three_digits_are_within_half_a_percent(value):
    assert float(table.digits(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


cells = st.one_of(st.text(max_size=60), st.integers(), st.floats(), st.none())
rows = st.lists(st.dictionaries(st.text(min_size=1, max_size=20), cells), min_size=1, max_size=4)


@hypothesis.given(rows, st.integers(20, 100))
def test_no_line_is_wider_than_asked(rows, width):
    hypothesis.assume(any(rows))
    lines = table.table(rows, width=width).splitlines()
    assert max(map(len, lines)) <= width


def test_layout():
    got = table.table(
        [{"name": "round robin", "p99": 1.5}, {"name": "two loads", "p99": 12}], title="Decode"
    )
    assert got == ("Decode\nname         p99\n-----------  ---\nround robin  1.5\ntwo loads     12")


def test_columns_that_do_not_fit_continue_below():
    got = table.table([{"case": "a", **{f"column {i}": 10**9 + i for i in range(12)}}])
    assert got.count("case") == 2 and "1,000,000,011" in got


def test_no_rows():
    assert table.table([]) == "(no rows)"
