"""Parse the options of an export. A field that has no effect together with the others is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from proxy.api.known_fields import check_known, refuse
from proxy.export_formats.encoder import ExportFormat
from proxy.protocols.fields import (
    check_text,
    expect_bool,
    expect_list,
    expect_str,
    optional_float,
    optional_int,
    optional_object,
    optional_text,
)
from proxy.trajectory.advantages import Baseline
from proxy.trajectory.freshness import Freshness
from proxy.trajectory.layout_options import Images, Include, Keep, Layout, LayoutOptions, Padding, TooLong
from proxy.trajectory.main_reward import RAW, Granularity, MainReward
from proxy.trajectory.paths import Drift
from proxy.trajectory.purpose import Purpose
from proxy.trajectory.scores import Unrewarded
from proxy.trajectory.selection import TrainSelection, TurnSelection
from proxy.types import Credit, RewardScope
from tokengrove.errors import InvalidRequest, UnsupportedParameter

_LAYOUTS = {
    "individual": Layout.INDIVIDUAL,
    "step": Layout.INDIVIDUAL,
    "concat": Layout.CONCAT,
    "traj": Layout.CONCAT,
    "tree": Layout.TREE,
    "padded": Layout.PADDED,
}
_TRAIN_FIELDS = ("turns", "purposes", "agents", "exclude", "constrained")
_PADDED_FIELDS = ("prompt_length", "response_length", "pad_token_id", "on_too_long", "keep")
OPTION_FIELDS = (
    *("layout", "style", "format", "discount", "credit", "drift", "train", "include", *_PADDED_FIELDS),
    *("reward_name", "reward_granularity", "reward_scope", "unrewarded", "mask_unfinished"),
    *("advantages", "step_advantages", "images", "multi_modal_inputs"),
)
"""The fields of a body that say how to export."""
# A row has about 110 bytes per token, padding included: with both lengths at this limit it takes 250 MB at most.
_MAX_LENGTH = 1 << 20
# The value of `multi_modal_inputs` that means: if the model sees.
_AUTO = "auto"
_MAX_TURN = 2**31 - 1

_EnumT = TypeVar("_EnumT", bound=StrEnum)


def parse_format(body: Mapping[str, Any]) -> ExportFormat:
    """The format of an export: AReaL's if the body has `style` and no `format`, as AReaL's client sends it."""
    if body.get("style") is not None and body.get("format") is None:
        return ExportFormat.AREAL
    return parse_choice(body, "format", ExportFormat) or ExportFormat.JSON


def parse_options(body: Mapping[str, Any], filters: Mapping[str, Any]) -> LayoutOptions:
    """The options in a body and its `filters`. Raises InvalidRequest that names the field and the allowed values."""
    layout, drift = _parse_layout(body), parse_choice(body, "drift", Drift) or Drift.FORK
    if layout is Layout.TREE and drift is Drift.MASK:
        raise InvalidRequest(
            "'drift' does not apply to layout tree, where each node occurs once; leave it out", param="drift"
        )
    unfinished = body.get("mask_unfinished")
    advantages = parse_choice(body, "advantages", Baseline)
    step_advantages = parse_choice(body, "step_advantages", Baseline)
    compares = advantages is not None or step_advantages is not None
    return LayoutOptions(
        layout=layout,
        discount=optional_float(body, "discount", least=0.0, most=1.0),
        credit=parse_choice(body, "credit", Credit),
        drift=drift,
        purposes=parse_names(filters, "purpose", "filter.", tuple(Purpose)),
        agents=parse_names(filters, "agent", "filter."),
        train=_parse_train(optional_object(body, "train")),
        reward=_parse_reward(body),
        reward_scope=parse_choice(body, "reward_scope", RewardScope) or _default_scope(body),
        unrewarded=parse_choice(body, "unrewarded", Unrewarded) or (Unrewarded.SKIP if compares else Unrewarded.ZERO),
        mask_unfinished=unfinished is not None and expect_bool(unfinished, "mask_unfinished"),
        padding=_parse_padding(body, layout),
        advantages=advantages,
        step_advantages=step_advantages,
        include=_parse_include(body),
        images=parse_choice(body, "images", Images) or Images.REFERENCES,
        multi_modal_inputs=_parse_inputs(body),
        freshness=Freshness(
            min_version=optional_int(filters, "min_version", least=0, at="filter."),
            max_version_span=optional_int(filters, "max_version_span", least=0, at="filter."),
        ),
    )


def check_together(name: ExportFormat, options: LayoutOptions) -> None:
    """Raise UnsupportedParameter for an option that the format cannot represent."""
    if name is ExportFormat.AREAL and options.layout in (Layout.TREE, Layout.PADDED):
        raise UnsupportedParameter(
            "format areal supports the layouts individual and concat; choose another 'format' or 'layout'",
            param="layout",
        )
    if options.outline and options.images is Images.BYTES:
        raise UnsupportedParameter("'outline' has no bytes of images; use 'images': references", param="images")
    if options.outline and name not in (ExportFormat.JSON, ExportFormat.JSONL):
        raise UnsupportedParameter(f"'outline' does not work with format {name}; use json or jsonl", param="outline")
    if name is ExportFormat.SAFETENSORS and options.include:
        others = ", ".join(each for each in ExportFormat if each is not ExportFormat.SAFETENSORS)
        raise UnsupportedParameter(f"'include' does not work with format {name}; use one of {others}", param="include")
    compared = "advantages" if options.advantages else "step_advantages" if options.step_advantages else None
    if name is ExportFormat.AREAL and compared is not None:
        raise UnsupportedParameter(
            f"format areal has no '{compared}': AReaL's trainer computes its own; choose another 'format'",
            param=compared,
        )


def parse_choice(body: Mapping[str, Any], name: str, choices: type[_EnumT], at: str = "") -> _EnumT | None:
    """A field whose value is one of `choices`, or None if it is absent or null."""
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or value not in list(choices):
        raise InvalidRequest(f"'{at}{name}' must be one of {', '.join(choices)}", param=at + name)
    return choices(value)


def parse_names(
    body: Mapping[str, Any], name: str, at: str, choices: tuple[str, ...] | None = None
) -> frozenset[str] | None:
    """A field that is a string or a list of strings, all in `choices` if given; None if it is absent or null."""
    given = body.get(name)
    if given is None:
        return None
    values = [given] if isinstance(given, str) else expect_list(given, at + name)
    for value in values:
        check_text(expect_str(value, at + name), at + name)
        if choices is not None and value not in choices:
            raise InvalidRequest(f"'{at}{name}' must contain only {', '.join(choices)}", param=at + name)
    return frozenset(values)


def _parse_layout(body: Mapping[str, Any]) -> Layout:
    """The layout. `style` is AReaL's name for `layout`."""
    given = [(name, body[name]) for name in ("layout", "style") if body.get(name) is not None]
    for name, value in given:
        if not isinstance(value, str) or value not in _LAYOUTS:
            raise InvalidRequest(f"'{name}' must be one of {', '.join(_LAYOUTS)}", param=name)
    chosen = {_LAYOUTS[value] for _, value in given} or {Layout.CONCAT}
    if len(chosen) > 1:
        raise InvalidRequest("'style' is an alias of 'layout' and has another value: give one of them", param="style")
    return chosen.pop()


def _default_scope(body: Mapping[str, Any]) -> RewardScope | None:
    """AReaL's own export gives each leaf the sum of its path, so its `style` and its format keep that."""
    areal = body.get("style") is not None or body.get("format") == ExportFormat.AREAL
    return RewardScope.PATH if areal else None


def _parse_train(train: Mapping[str, Any]) -> TrainSelection:
    check_known(train, _TRAIN_FIELDS, "train.")
    constrained = train.get("constrained")
    return TrainSelection(
        turns=_parse_turns(train.get("turns")),
        purposes=parse_names(train, "purposes", "train.", tuple(Purpose)),
        agents=parse_names(train, "agents", "train."),
        exclude=parse_names(train, "exclude", "train.") or frozenset(),
        constrained=constrained is not None and expect_bool(constrained, "train.constrained"),
    )


def _parse_turns(value: Any) -> TurnSelection | frozenset[int]:
    if isinstance(value, list):
        for index in value:
            if type(index) is not int or not 0 <= index <= _MAX_TURN:
                raise InvalidRequest(
                    "'train.turns' must contain indexes of turns, which count from 0", param="train.turns"
                )
        return frozenset(value)
    if value is not None and (not isinstance(value, str) or value not in list(TurnSelection)):
        raise InvalidRequest("'train.turns' must be all, last or a list of turn indexes", param="train.turns")
    return TurnSelection.ALL if value is None else TurnSelection(value)


def _parse_reward(body: Mapping[str, Any]) -> MainReward:
    name = optional_text(body, "reward_name")
    if name == "":
        raise InvalidRequest("'reward_name' is empty: leave it out for the main reward", param="reward_name")
    granularity = parse_choice(body, "reward_granularity", Granularity)
    if granularity is None:
        return RAW if name is None else MainReward(name)
    if name is not None:
        message = "'reward_granularity' already names the reward (pass_rate or binary): leave out 'reward_name'"
        raise InvalidRequest(message, param="reward_name")
    return MainReward.at(granularity)


def _parse_padding(body: Mapping[str, Any], layout: Layout) -> Padding | None:
    if layout is not Layout.PADDED:
        refuse(body, _PADDED_FIELDS, "applies only with layout padded")
        return None
    lengths = [optional_int(body, name, least=1, most=_MAX_LENGTH) for name in _PADDED_FIELDS[:2]]
    for name, length in zip(_PADDED_FIELDS, lengths, strict=False):
        if length is None:
            raise InvalidRequest(f"layout padded needs '{name}', a number of tokens", param=name)
    too_long = parse_choice(body, "on_too_long", TooLong) or TooLong.REFUSE
    if too_long is not TooLong.TRUNCATE:
        refuse(body, ("keep",), "applies only with 'on_too_long': truncate")
    return Padding(
        prompt_length=lengths[0] or 0,
        response_length=lengths[1] or 0,
        pad_token_id=optional_int(body, "pad_token_id", least=0) or 0,
        on_too_long=too_long,
        keep=parse_choice(body, "keep", Keep) or Keep.HEAD,
    )


def _parse_inputs(body: Mapping[str, Any]) -> bool | None:
    """`multi_modal_inputs`: true, false, or None for `auto`."""
    given = body.get("multi_modal_inputs")
    if given == _AUTO:
        return None
    if given is not None and not isinstance(given, bool):
        raise InvalidRequest("'multi_modal_inputs' must be true, false or \"auto\"", param="multi_modal_inputs")
    return bool(given)


def _parse_include(body: Mapping[str, Any]) -> frozenset[Include]:
    names = parse_names(body, "include", "", tuple(Include)) or frozenset()
    return frozenset(map(Include, names))
