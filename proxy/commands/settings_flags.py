"""A flag for each setting, with its default, in the groups of the settings page. What most people set comes first."""

from __future__ import annotations

import inspect

from proxy.settings import Settings
from tokengrove.commands.signatures import Command, flag_parameter, with_flags
from tokengrove.options.option import Option, options_of

FIRST = "What most people set"
_GROUPS = {
    FIRST: "model engine engine_arg host port workers database_url admin_key max_context_tokens log_level",
    "Address": (
        "public_url agent_port agent_host expose expose_timeout_s allowed_hosts allowed_origins page "
        "forwarded_allow_ips"
    ),
    "Model and rendering": (
        "tokenizer served_model_name models model_hosts max_live_versions adapter_pinning family tool_parser "
        "reasoning_parser thinking_retention"
    ),
    "Engine": ("engine_timeout_s stream_interval pause_timeout_s mismatch_limit"),
    "Database": ("migrate"),
    "Access": (
        "metrics_key trainer_key reader_key metrics_port rewards_by require_key allow_chosen_keys "
        "refresh_by_key key_lifetime_s"
    ),
    "Sessions": (
        "capacity_control max_live_sessions session_idle_s episode_idle_s episode_turns episode_lineage "
        "keep_days keep archive_to search max_staleness batch_size webhook webhook_secret webhook_timeout_s "
        "webhook_attempts discount credit"
    ),
    "Limits": (
        "max_turns_in_flight shared_running_requests max_connections hosted_tools agent_max_connections "
        "agent_max_requests agent_max_body_bytes reconnect_s strict_sampling replay max_kept alternatives "
        "max_tokens_per_turn max_body_bytes max_inflight_body_bytes session_memory_bytes image_memory_bytes "
        "max_session_images max_session_image_bytes max_request_images max_image_bytes max_image_pixels "
        "allow_image_urls image_hosts image_url_timeout_s max_body_values database_wait_s shutdown_timeout_s "
        "log_format log_content"
    ),
}
HEADINGS = {name: heading for heading, names in _GROUPS.items() for name in names.split()}
"""The heading of each setting in `--help`: that of the settings page, or FIRST."""


def takes_settings(command: Command) -> Command:
    """Add a flag for each setting. A flag that is not given is None, so that its variable or default applies."""
    settings = options_of(Settings)
    return with_flags(command, [_flag(settings[name]) for name in HEADINGS])


def _flag(setting: Option) -> inspect.Parameter:
    default = "none" if setting.default in (None, ()) else str(setting.default)
    text, heading = f"{setting.help} [{default}]", HEADINGS[setting.name]
    # Settings checks bounds: its errors name the variable or the place in the file that a value comes from.
    return flag_parameter(setting, help=text, negated=True, bounded=False, heading=heading)
