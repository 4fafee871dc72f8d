"""The result of one episode, in JSON types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tokengrove.rollout.failure_log import FailedEpisode

FailureKind = Literal["agent", "timeout", "no_data", "reward", "scorer", "server", "worker", "cancelled"]
"""The kind of a failure:

- `agent`: the agent raised an exception, or its command exited with a code that is a failure
- `timeout`: the agent exceeded its time limit
- `no_data`: the episode has no complete turn, or there was nothing to play
- `reward`: the reward function or verifier failed
- `scorer`: a scorer failed
- `server`: the server failed, refused a request or was not reached
- `worker`: the process or node of the episode died
- `cancelled`: the run was ended
"""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One attempt at one episode. `failure` is None if it was played to its end; its session is then Finished.

    `reward`: the score of its session; None without a reward. `scores`: the scorers' values by name; for a scorer of
    turns, the mean. `traceback`: of the exception that ended it, if any. `turns` and the token counts cover the
    complete turns; `seconds` is the time from its start to its end.
    """

    task_id: str
    sample: int
    attempt: int
    session_id: str
    reward: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    failure: FailureKind | None = None
    message: str | None = None
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    traceback: str | None = None

    @property
    def failed(self) -> FailedEpisode | None:
        """The failed episode; None without a failure. Its type is that of the exception, if any, else `failure`."""
        if self.failure is None:
            return None
        kind, colon, message = (self.message or "").partition(": ")
        if not self.traceback or not colon or not kind.replace(".", "").isidentifier():
            kind, message = self.failure, self.message or "without a reason"
        about = f"{self.task_id}, sample {self.sample}", self.session_id
        return FailedEpisode(kind, message, *about, self.traceback or "")

    def as_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)
