"""Text from tokens as they come: whole characters only, and nothing that may belong to a stop.

A character's bytes may span tokens, and a token's text may depend on the one before it. So a short
window is decoded twice, without and with the new tokens, and the difference is the news, unless it
ends in the middle of a character.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
LONGEST = 4  # bytes of a character, hence tokens that may lack its end


class Detokeniser:
    """The text of one answer."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._tokenizer, self._stop, self._include = tokenizer, tuple(stop), include_stop
        self._ids: list[int] = []
        self._start = 0  # ids before this one are in no window
        self._done = 0  # ids before this one are in `_held` or given out
        self._held = ""
        self.stopped: str | None = None  # the stop string that ended the answer

    def feed(self, tokens: Sequence[int]) -> str:
        """Text that is certain now. Tokens behind a stop string are ignored."""
        news = ""
        for token in tokens:
            if self.stopped is not None:
                break
            self._ids.append(token)
            self._held += self._decode(last=False)
            news += self._release()
        return news

    def finish(self) -> str:
        """What was held back; call once no token will come."""
        if self.stopped is not None:
            return ""
        self._held += self._decode(last=True)
        news = self._release()
        rest, self._held = ("", "") if self.stopped is not None else (self._held, "")
        return news + rest

    def _decode(self, last: bool) -> str:
        """Text of the ids that are not done, if it ends with a whole character."""
        before = self._tokenizer.decode(self._ids[self._start : self._done])
        text = self._tokenizer.decode(self._ids[self._start :])
        waiting = len(self._ids) - self._done
        if text.endswith(BROKEN) and waiting < LONGEST and not last:
            return ""
        self._start, self._done = self._done, len(self._ids)
        return text[len(before) :]

    def _release(self) -> str:
        """Cut `_held` at the first stop string, or before what may become one."""
        found = [(self._held.find(s), s) for s in self._stop if s in self._held]
        if found:
            at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))  # the first to end
            self.stopped = stop
            text, self._held = self._held[: at + len(stop) * self._include], ""
            return text
        keep = max((_overlap(self._held, s) for s in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)
