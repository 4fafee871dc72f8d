"""Parses the body of an export. Errors name the field at fault and the allowed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import orjson

from proxy.api.known_fields import refuse
from proxy.api.option_body import made_of, read_given
from proxy.api.teacher_columns import check_teachers
from proxy.trajectory.columns import columns_of
from proxy.trajectory.layout_options import Freshness, LayoutOptions
from proxy.trajectory.main_reward import RAW, MainReward
from proxy.types import VALIDATE
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.options.export import (
    EXPORT_GROUPS,
    SAMPLE_GROUPS,
    Drift,
    ExportFormat,
    Forest,
    Images,
    Layout,
    Padding,
    PageOptions,
    SampleOptions,
    Stale,
    TooLong,
    TurnCredit,
    Unrewarded,
)
from tokengrove.options.option import Option, options_of
from tokengrove.options.session import RewardScope, SessionFilter, StoredFilter, Validation
from tokengrove.options.start import Replay

FILTERS = options_of(SessionFilter)
SAMPLE_FILTERS = tuple(name for name in FILTERS if name not in options_of(StoredFilter))
"""The filters that select turns or samples; the others select sessions."""
SAMPLE_OPTIONS = options_of(*SAMPLE_GROUPS)
"""The fields that determine how samples are made."""
_EXPORT = options_of(*EXPORT_GROUPS)
_PADDED = options_of(Padding)
_FOREST = options_of(Forest)
TOKEN_OPTIONS = {name: each for name, each in _EXPORT.items() if each.about.get("tokens")}
"""The fields that affect the states of tokens."""
_VALIDATION = {Validation.SKIP: False, Validation.INCLUDE: None, Validation.ONLY: True}


@dataclass(frozen=True, slots=True)
class ParsedExport:
    """A parsed body: the sessions, options, format and page.

    `page.session_ids`: the named sessions, also if there is only one. `filters`: fields of a SessionQuery. `ended_by`:
    groups contain only sessions up to this place in the order of ends, as of a claim; None: all sessions. `delivers`:
    the sessions count as exported, so that retention may delete them.
    """

    page: PageOptions
    filters: Mapping[str, Any]
    options: LayoutOptions
    format: ExportFormat
    ended_by: int | None = None
    delivers: bool = True


def parse_export(body: Mapping[str, Any]) -> ParsedExport:
    """The export in a body. Raises InvalidRequest, which names the field and the allowed values."""
    refuse_filters(body)
    given = read_given(body, _EXPORT)
    page, name = _page(made_of(PageOptions, given)), _format(given)
    options = _layout_options(given, page, name)
    check_together(name, options)
    named = page.session_ids is not None
    filters = query_fields(page.filter, named=named)
    return ParsedExport(page, filters, options, name, delivers=not options.outline)


def parse_token_options(query: Mapping[str, str]) -> LayoutOptions:
    """The options in a query that affect the states of tokens. Values other than texts are JSON.

    Raises InvalidRequest, which names the parameter and the allowed values.
    """
    texts = {name: query[name] for name in TOKEN_OPTIONS if name in query}
    given = read_given({name: _query_value(text, TOKEN_OPTIONS[name]) for name, text in texts.items()}, TOKEN_OPTIONS)
    page = made_of(PageOptions, given)
    refuse(vars(page.filter), options_of(StoredFilter), "selects sessions, and the turn is of one already", "filter.")
    return _layout_options(given, page, ExportFormat.JSON)


def refuse_filters(body: Mapping[str, Any]) -> None:
    """Raise InvalidRequest for a filter outside of `filter`."""
    refuse(body, FILTERS, "is a filter: give it inside 'filter'")


def query_fields(chosen: StoredFilter, *, named: bool) -> dict[str, Any]:
    """The fields of a SessionQuery. `named`: validation sessions are included, unless the filter excludes them."""
    values = {name: getattr(chosen, name) for name in options_of(StoredFilter)}
    fields = {name: value for name, value in values.items() if value not in (None, {})}
    if not named:
        fields["withdrawn"] = False
    asked = named or VALIDATE in fields.get("metadata", ())
    validation = fields.pop("validation", Validation.INCLUDE if asked else Validation.SKIP)
    if (only := _VALIDATION[validation]) is not None:
        fields["validation"] = only
    return fields


def check_together(name: ExportFormat, options: LayoutOptions) -> None:
    """Raise UnsupportedParameter for an option that the format cannot represent."""
    if name is ExportFormat.AREAL and options.layout in (Layout.TREE, Layout.PADDED, Layout.FOREST):
        raise UnsupportedParameter(
            "format areal supports the layouts individual and concat; choose another 'format' or 'layout'",
            param="layout",
        )
    if options.outline and options.teachers:
        raise UnsupportedParameter("'outline' has no scores of teachers; leave out 'teachers'", param="teachers")
    taken = [column.name for column in columns_of(replace(options, mrope=True))]
    check_teachers(options.teachers, (*taken, "advantages", "step_advantages", "turn_advantages"))
    if options.outline and options.replay:
        raise UnsupportedParameter("'outline' has no recorded columns; leave out 'replay'", param="replay")
    if options.outline and options.images is Images.BYTES:
        raise UnsupportedParameter("'outline' has no bytes of images; use 'images': references", param="images")
    if options.outline and name not in (ExportFormat.JSON, ExportFormat.JSONL):
        raise UnsupportedParameter(f"'outline' does not work with format {name}; use json or jsonl", param="outline")
    if name is ExportFormat.SAFETENSORS and options.include:
        others = ", ".join(each for each in ExportFormat if each is not ExportFormat.SAFETENSORS)
        raise UnsupportedParameter(f"'include' does not work with format {name}; use one of {others}", param="include")
    names = ("advantages", "step_advantages", "turn_advantages")
    compared = next((each for each in names if getattr(options, each) is not None), None)
    if name is ExportFormat.AREAL and compared is not None:
        raise UnsupportedParameter(
            f"format areal has no '{compared}': AReaL's trainer computes its own; choose another 'format'",
            param=compared,
        )


def _page(page: PageOptions) -> PageOptions:
    """The page with its sessions in `session_ids`. Raises InvalidRequest."""
    if page.session_id is not None:
        if page.session_ids is not None:
            raise InvalidRequest("give 'session_id' or 'session_ids', not both", param="session_ids")
        page = replace(page, session_ids=(page.session_id,))
    if page.wait_s and page.session_ids is None:
        message = "'wait_s' needs 'session_id' or 'session_ids', the sessions to wait for"
        raise InvalidRequest(message, param="wait_s")
    return page


def _format(given: Mapping[str, Any]) -> ExportFormat:
    """The format of an export: AReaL's if the body has `style` and no `format`, as sent by AReaL's client."""
    default = ExportFormat.AREAL if "style" in given else ExportFormat.JSON
    chosen: ExportFormat = given.get("format", default)
    return chosen


def _layout_options(given: Mapping[str, Any], page: PageOptions, name: ExportFormat) -> LayoutOptions:
    """The layout options. An option that has no effect in combination with the others is refused by name."""
    layout = _layout(given)
    if layout is Layout.TREE and given.get("drift") is Drift.MASK:
        raise InvalidRequest(
            "'drift' does not apply to layout tree, where each node occurs once; leave it out", param="drift"
        )
    samples = made_of(SampleOptions, {**given, "layout": layout})
    chosen = page.filter
    if samples.stale is Stale.MASK and chosen.min_version is None:
        message = "'stale': mask needs 'filter.min_version', the oldest version to train; give it, or leave out 'stale'"
        raise InvalidRequest(message, param="stale")
    compares = any(each is not None for each in (samples.advantages, samples.step_advantages, samples.turn_advantages))
    if "step_weight" in given and samples.turn_advantages is not TurnCredit.GIGPO:
        raise InvalidRequest("'step_weight' applies only with 'turn_advantages': gigpo", param="step_weight")
    areal = "style" in given or name is ExportFormat.AREAL
    resolved = {
        **vars(samples),
        # AReaL's own export gives each leaf the sum of its path, so its `style` and its format keep that.
        "reward_scope": samples.reward_scope or (RewardScope.PATH if areal else None),
        "unrewarded": samples.unrewarded or (Unrewarded.SKIP if compares else Unrewarded.ZERO),
    }
    return LayoutOptions(
        **resolved,
        purposes=chosen.purpose,
        agents=chosen.agent,
        segments=chosen.lineage,
        routes=page.route,
        reward=_reward(samples),
        padding=_padding(given, layout),
        forest=_forest(given, layout),
        drops_long=given.get("on_too_long") is TooLong.DROP,
        freshness=Freshness(chosen.min_version, chosen.max_version_span),
        outline=page.outline,
    )


def _layout(given: Mapping[str, Any]) -> Layout:
    """The layout. `style` is AReaL's name for `layout`."""
    chosen = {given[name] for name in ("layout", "style") if name in given} or {Layout.CONCAT}
    if len(chosen) > 1:
        raise InvalidRequest("'style' is an alias of 'layout' and has another value: give one of them", param="style")
    return Layout(chosen.pop())


def _reward(samples: SampleOptions) -> MainReward:
    name, granularity = samples.reward_name, samples.reward_granularity
    if name == "":
        raise InvalidRequest("'reward_name' is empty: leave it out for the main reward", param="reward_name")
    if granularity is None:
        return RAW if name is None else MainReward(name)
    if name is not None:
        message = "'reward_granularity' already names the reward (pass_rate or binary): leave out 'reward_name'"
        raise InvalidRequest(message, param="reward_name")
    return MainReward.at(granularity)


def _padding(given: Mapping[str, Any], layout: Layout) -> Padding | None:
    if layout is not Layout.PADDED:
        own = [name for name in _PADDED if name != "on_too_long"]
        refuse(given, own, "applies only with layout padded")
        if layout is not Layout.FOREST:
            refuse(given, ("on_too_long",), "applies only with layouts padded and forest")
        return None
    for name in ("prompt_length", "response_length"):
        if name not in given:
            raise InvalidRequest(f"layout padded needs '{name}', a number of tokens", param=name)
    padding = made_of(Padding, given)
    if padding.on_too_long is not TooLong.TRUNCATE:
        refuse(given, ("keep",), "applies only with 'on_too_long': truncate")
    return padding


def _forest(given: Mapping[str, Any], layout: Layout) -> Forest | None:
    if layout is not Layout.FOREST:
        refuse(given, _FOREST, "applies only with layout forest")
        return None
    if given.get("on_too_long") is TooLong.TRUNCATE:
        message = "layout forest cannot truncate samples: set 'on_too_long' to refuse or drop"
        raise InvalidRequest(message, param="on_too_long")
    if "on_too_long" in given and given.get("max_tokens") is None:
        raise InvalidRequest("'on_too_long' needs 'max_tokens', the most tokens of a sequence", param="on_too_long")
    if "experts" in given and Replay.EXPERTS not in (given.get("replay") or ()):
        raise InvalidRequest("'experts' has no effect unless 'replay' has experts", param="experts")
    return made_of(Forest, given)


def _query_value(text: str, option: Option) -> Any:
    if isinstance(option.kind, type) and issubclass(option.kind, str):
        return text
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        raise InvalidRequest(f"'{option.name}' must be JSON, as in the body of an export", param=option.name) from None
