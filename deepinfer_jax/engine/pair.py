"""A prompt engine and a completion engine in one process, to a caller as one engine.

A call steps the prompt engine, passes on what it has finished, and steps the completion engine.
Source: the chapter, section 11.1.
"""

from __future__ import annotations

import dataclasses

from deepinfer_jax.engine.handoff import HandOff
from deepinfer_jax.engine.loops import Engine, News
from deepinfer_jax.engine.plan import RequestOutput
from deepinfer_jax.engine.request import Request, Status


class Pair:
    """Two `Engine`s, and what is on its way from the first to the second."""

    def __init__(self, prompt: Engine, completion: Engine, width: int = 16) -> None:
        """Nothing is on its way.

        Args:
          width: blocks copied by one call of the device.

        Raises:
          ValueError: see `HandOff`.
        """
        self.prompt, self.completion = prompt, completion
        schedulers = prompt.scheduler, completion.scheduler
        self.link = HandOff(prompt.device.model, *schedulers, width)

    def check(self, request: Request) -> None:
        """The rules of both engines; see `validation.check_request`."""
        self.prompt.check(request)
        self.completion.check(request)

    def add(self, request: Request) -> None:
        """Take a prompt.

        Raises:
          ValueError: the first rule of either engine that it breaks; nothing has changed then.
        """
        self.completion.check(request)
        self.prompt.add(request)

    def abort(self, request_id: int, status: Status = Status.ABORTED) -> RequestOutput | None:
        """See `Scheduler.abort`; wherever the request is."""
        ended = self.prompt.abort(request_id, status)
        return ended or self.completion.abort(request_id, status)

    @property
    def unfinished(self) -> bool:
        """Whether a further call would do something."""
        there = bool(self.prompt.scheduler.roster.handover or self.link.waiting)
        return there or self.prompt.unfinished or self.completion.unfinished

    @property
    def decoding(self) -> bool:
        """Whether a request decodes."""
        return self.completion.decoding

    def call(self) -> News:
        """One call of each engine that has something to do."""
        news = self.prompt.call() if self.prompt.unfinished else []
        self.pass_on()
        if self.completion.unfinished:
            news += self.completion.call()
        return news

    def pass_on(self) -> None:
        """Hand over what the completion engine has room for."""
        source, device = self.prompt.device.state, self.completion.device
        memory, taken = self.link.move(source.memory, device.state.memory)
        device.state = dataclasses.replace(device.state, memory=memory)
        device.resume(taken)

    def land(self) -> News:
        """Commit the steps in flight."""
        return self.prompt.land() + self.completion.land()

    def warm_up(self, masks: bool = False, images: bool = False, pictures: bool = False) -> None:
        """Compile everything; `images` are those of the prompt engine's prefix cache."""
        self.prompt.warm_up(masks, images, pictures)
        self.completion.warm_up(masks)
        device = self.completion.device
        memory = self.link.rehearse(self.prompt.device.state.memory, device.state.memory)
        device.state = dataclasses.replace(device.state, memory=memory)
