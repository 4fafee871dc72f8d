"""The token budget of a turn: the least of the requested `max_tokens`, all limits and the room left in the context."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from proxy.models.declared import DeclaredModel
from proxy.rendering.token_bound import TooManyTokens
from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.types import ImageFile, PlacedImage, SamplingParams
from tokengrove.errors import ContextLengthExceeded, LimitReached, brief

# The tokens of a prompt are counted exactly up to this many times the context length.
_COUNTED = 4
_ALWAYS_COUNTED = 131_072
_OVERFLOW = "on_context_overflow"


def apply_budgets(
    sampling: SamplingParams,
    choices: int,
    session: LiveSession,
    prompt_tokens: int,
    settings: Settings,
    context: int,
) -> SamplingParams:
    """Return `sampling` with the `max_tokens` of each of the `choices`. `context`: the result of `context_of`.

    `max_tokens` is at least 1, or 0 if the prompt fills the context and the session's `on_context_overflow` is
    `length`. All lengths are in tokens. Raises ContextLengthExceeded, or LimitReached for a limit of the session.
    """
    limits = session.record.limits
    if limits:
        _check_session(session, choices)
    if prompt_tokens >= context:
        if limits.get(_OVERFLOW) == "length":
            return with_most(sampling, 0)
        raise ContextLengthExceeded(prompt_tokens=prompt_tokens, context_tokens=context)
    most = context - prompt_tokens
    for bound in (sampling.max_tokens, settings.max_tokens_per_turn, limits.get("max_tokens_per_turn")):
        if bound is not None and bound < most:
            most = bound
    if limits and (left := _left_in_session(session, choices)) is not None:
        most = min(most, left)
    return sampling if most == sampling.max_tokens else with_most(sampling, most)


def limited(sampling: SamplingParams, choices: int, session: LiveSession, settings: Settings) -> SamplingParams:
    """Return `sampling` within the limits of the session and the server, for a model without a known context.

    Raises LimitReached for a limit of the session.
    """
    limits = session.record.limits
    if limits:
        _check_session(session, choices)
    given = (
        sampling.max_tokens,
        settings.max_tokens_per_turn,
        limits.get("max_tokens_per_turn"),
        _left_in_session(session, choices),
    )
    most = min((each for each in given if each is not None), default=None)
    return sampling if most is None or most == sampling.max_tokens else with_most(sampling, most)


def within_route(
    sampling: SamplingParams,
    choices: int,
    session: LiveSession,
    declared: DeclaredModel | None,
    running: Callable[[], int],
) -> SamplingParams:
    """Return `sampling` within the limits of a session on a route. `running`: counts its turns that run there.

    Raises LimitReached if the session has used up a limit.
    """
    if declared is None or (declared.max_turns is None and declared.max_total_tokens is None):
        return sampling
    own = [turn for turn in session.complete() if turn.route == declared.name]
    if declared.max_turns is not None and len(own) + running() + choices > declared.max_turns:
        raise _used_up(session, declared, "max_turns", declared.max_turns)
    if declared.max_total_tokens is None:
        return sampling
    tokens = sum([turn.sampled_tokens for turn in own])
    left = (declared.max_total_tokens - tokens) // choices
    if left < 1:
        raise _used_up(session, declared, "max_total_tokens", declared.max_total_tokens)
    return sampling if sampling.max_tokens is not None and sampling.max_tokens <= left else with_most(sampling, left)


def _used_up(session: LiveSession, declared: DeclaredModel, what: str, most: int) -> LimitReached:
    return LimitReached(
        f"session {brief(session.id)} has used up the model {brief(declared.name)}: its {what} is {most}",
        param=f"models.{declared.name}.{what}",
    )


def check_images(
    session: LiveSession, placed: Iterable[PlacedImage], files: Mapping[str, ImageFile], settings: Settings
) -> None:
    """Raise LimitReached if the images of a prompt and the images of its session are together too many or too large.

    Images of concurrent turns are not counted.
    """
    new = {image.digest for image in placed} - session.images.keys()
    if not new:
        return
    size = sum(session.image_sizes.values()) + sum(len(files[digest].data) for digest in new if digest in files)
    limits = session.record.limits
    for found, what, name, of_server, setting in (
        (len(session.images) + len(new), "images", "max_images", settings.max_session_images, "--max-session-images"),
        (size, "bytes of images", "max_image_bytes", settings.max_session_image_bytes, "--max-session-image-bytes"),
    ):
        most, where = limits.get(name), f"limits.{name}"
        if most is None or of_server < most:
            most, where = of_server, setting
        if found > most:
            message = f"session {brief(session.id)} would have {found} {what}, and {most} are its most ({where})"
            raise LimitReached(f"{message}; send fewer or smaller ones, or start a new session", param=where)


def context_of(session: LiveSession | None, settings: Settings, context_length: int) -> int:
    """Return the context length in tokens, prompt plus output, of `session` or of a request without a session."""
    of_session = None if session is None else session.record.limits.get("max_context_tokens")
    for bound in (settings.max_context_tokens, of_session):
        if bound is not None and bound < context_length:
            context_length = bound
    return context_length


def most_in_prompt(session: LiveSession, context: int) -> int:
    """Return the maximum length in tokens of a prompt that is built.

    This is `context`, or several times `context` if a prompt that fills the context ends the turn with `length`.
    """
    return _COUNTED * context if session.record.limits.get(_OVERFLOW) == "length" else context


def most_counted(context: int) -> int:
    """Return the maximum length in tokens of a prompt that is only counted.

    It is above `context`, so that clients learn by how much a prompt is too long.
    """
    return max(_COUNTED * context, _ALWAYS_COUNTED)


@contextmanager
def fits(context: int) -> Iterator[None]:
    """Raise ContextLengthExceeded instead of TooManyTokens."""
    try:
        yield
    except TooManyTokens as found:
        raise too_long(found, context) from None


def too_long(found: TooManyTokens, context: int) -> ContextLengthExceeded:
    """The error of a prompt that cannot fit, whose rendering TooManyTokens has stopped."""
    return ContextLengthExceeded(prompt_tokens=found.fewest, context_tokens=context, at_least=True)


def with_most(sampling: SamplingParams, most: int) -> SamplingParams:
    """Return `sampling` with `max_tokens` set to `most`, and `min_tokens` lowered to `most` if it is higher."""
    return sampling._replace(max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def _check_session(session: LiveSession, choices: int) -> None:
    limits = session.record.limits
    max_turns = limits.get("max_turns")
    if max_turns is not None and session.turns_taken + choices > max_turns:
        raise LimitReached(
            f"session {brief(session.id)} is limited to {max_turns} turns (limits.max_turns); start a new session",
            param="limits.max_turns",
        )
    left_s = session.seconds_left()
    if left_s is not None and left_s <= 0:
        deadline_s = limits["deadline_s"]
        raise LimitReached(
            f"session {brief(session.id)} is past its deadline of {deadline_s:g} s "
            "(limits.deadline_s); start a new session",
            param="limits.deadline_s",
        )


def _left_in_session(session: LiveSession, choices: int) -> int | None:
    """Return how many tokens each choice may sample within `max_total_tokens`, or None without that limit."""
    most = session.record.limits.get("max_total_tokens")
    if most is None:
        return None
    left = (int(most) - session.sampled_tokens) // choices
    if left < 1:
        message = (
            f"session {brief(session.id)} has sampled {session.sampled_tokens} of its {most} tokens "
            "(limits.max_total_tokens), which leaves none for each choice; start a new session"
        )
        raise LimitReached(message, param="limits.max_total_tokens")
    return left
