"""What the loops and the device need to know of a request besides its tokens."""

from __future__ import annotations

import dataclasses

from deepinfer_jax.engine.logprobs import Logprobs
from deepinfer_jax.engine.request import Request
from deepinfer_jax.engine.sampling_params import SamplingParams


@dataclasses.dataclass
class Answer:
    """`Request.sampling`: one answer's wishes, and the report on its prompt as it comes."""

    params: SamplingParams
    seed: int
    prompt_report: list[Logprobs] = dataclasses.field(default_factory=list)  # one per prompt token
    # behind the first

    def forced(self, output_length: int, count: int) -> list[int]:
        """Ids that the next `count` tokens must have; -1 for none."""
        asked = self.params.forced_tokens[output_length : output_length + count]
        return [*asked, *[-1] * (count - len(asked))]


def answer_of(request: Request) -> Answer:
    """The request's answer."""
    found = request.sampling
    assert isinstance(found, Answer), f"request {request.request_id} has no Answer as sampling"
    return found
