"""`generating_args` of a configuration as the sampling of a session. No setting is dropped in silence."""

from __future__ import annotations

from typing import Any

from proxy.errors import InvalidRequest

_NAMES = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
_WITHOUT_MEANING = frozenset(
    {
        "do_sample",  # false is temperature 0, see below
        "include_stop_str_in_output",  # the tokens always have the stop string, as sampled
        "length_penalty",  # of beam search
        "logprobs",  # every sampled token has its logprob
        "max_length",  # of prompt and output: the configuration's sequence_length
        "num_beams",
        "num_return_sequences",  # ROLL's environments always take one
    }
)


def sampling_of(generating_args: Any, max_tokens_per_step: int | None = None) -> dict[str, Any]:
    """The `sampling` of a session: its `max_tokens` is the less of `max_new_tokens` and `max_tokens_per_step`.

    `generating_args` is a mapping, an object with `to_dict()`, or None. A setting that is None is not set; one that
    neither ROLL nor the server knows is sent on, and the server names it in its refusal. Raises InvalidRequest for beam
    search, which samples no logprobs.
    """
    given = {name: value for name, value in _as_dict(generating_args).items() if value is not None}
    if int(given.get("num_beams", 1)) > 1:
        raise InvalidRequest(
            f"generating_args.num_beams is {given['num_beams']}; rollouts are sampled: leave it out, or set 1",
            param="num_beams",
        )
    sampling = {_NAMES.get(name, name): value for name, value in given.items() if name not in _WITHOUT_MEANING}
    if given.get("do_sample") is False:
        sampling["temperature"] = 0.0
    bounds = [int(most) for most in (sampling.get("max_tokens"), max_tokens_per_step) if most]
    sampling.pop("max_tokens", None)
    return {**sampling, "max_tokens": min(bounds)} if bounds else sampling


def _as_dict(generating_args: Any) -> dict[str, Any]:
    if generating_args is None:
        return {}
    to_dict = getattr(generating_args, "to_dict", None)
    return dict(to_dict() if callable(to_dict) else generating_args)
