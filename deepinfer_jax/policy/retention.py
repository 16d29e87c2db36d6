"""Which stored KV a storage node gives up: by age (TTL), by pressure (watermark and LRU), or both.

The goal (72 hours), the sizing rule (24 hours per server) and the TTL are three different numbers;
only the TTL is a rule of this module. How age and pressure rank is not published, hence the
`precedence` parameter. Source: the chapter, section 11.3.2.
"""

from __future__ import annotations

from deepinfer_jax.policy.view import Array, namespace

DAY_SECONDS = 86_400
AGENT_TTL_SECONDS = 3 * DAY_SECONDS
CHATBOT_TTL_SECONDS = 7 * DAY_SECONDS

PRECEDENCES = ("age_first", "class_first", "pressure_first")


def expired(last_use: Array, now: Array, ttl: Array) -> Array:
    """Whether an entry was last used `ttl` or longer ago; one time unit, any shape."""
    return now - last_use >= ttl


def reclaim_amount(used: Array, high: Array, low: Array) -> Array:
    """Bytes to free: none up to the `high` watermark, above it down to `low`. All in bytes."""
    return namespace(used, high, low).where(used > high, used - low, 0)


def least_recent(
    last_use: Array, size: Array, evictable: Array, amount: Array, traffic: Array | None = None
) -> Array:
    """The shortest prefix of the evictable entries in LRU order that frees `amount`. bool [K].

    Args:
      last_use: [K], ties by index.
      size: bytes, [K].
      evictable: bool [K]: present and not pinned.
      amount: bytes to free; all evictable entries go when they do not suffice.
      traffic: classes [K]; the highest goes first, LRU ranks inside a class. None: one class.
    """
    xp = namespace(last_use, size, evictable, amount)
    order = xp.argsort(last_use, stable=True)
    if traffic is not None:
        order = order[xp.argsort(-traffic[order], stable=True)]
    freed = xp.where(evictable, size, 0)[order]
    before = xp.cumsum(freed) - freed
    place = xp.argsort(order, stable=True)
    return evictable & (before < amount)[place]


def victims(
    last_use: Array,
    size: Array,
    evictable: Array,
    now: Array,
    ttl: Array,
    amount: Array,
    precedence: str = "age_first",
    traffic: Array | None = None,
) -> Array:
    """Entries to delete now: the expired ones, and least recent ones until `amount` is freed.

    `age_first` deletes what has expired and asks LRU only for the bytes still missing.
    `class_first` does the same, but takes those bytes from the highest traffic class first.
    `pressure_first` frees the whole amount in LRU order, whatever the TTLs, then deletes what has
    expired. They differ where TTLs do: an expired agent entry may be younger than a live chat.

    Args:
      last_use: [K].
      size: bytes, [K].
      evictable: bool [K]: present and not pinned; nothing else is ever deleted.
      now: in the unit of `last_use`.
      ttl: scalar or [K].
      amount: bytes, from `reclaim_amount`.
      precedence: one of `PRECEDENCES`.
      traffic: classes [K], which `class_first` needs.

    Returns:
      bool [K].

    Raises:
      ValueError: an unknown precedence, or `class_first` without classes.
    """
    if precedence not in PRECEDENCES:
        raise ValueError(f"precedence {precedence!r} is unknown: use {' or '.join(PRECEDENCES)}")
    xp = namespace(last_use, size, evictable, now, ttl, amount)
    aged = evictable & expired(last_use, now, ttl)
    if precedence == "pressure_first":
        return aged | least_recent(last_use, size, evictable, amount)
    if precedence == "class_first" and traffic is None:
        raise ValueError("precedence 'class_first' ranks classes, but traffic is missing: give it")
    missing = amount - xp.sum(xp.where(aged, size, 0))
    ranks = traffic if precedence == "class_first" else None
    return aged | least_recent(last_use, size, evictable & ~aged, missing, ranks)
