"""Runs of many episodes: several samples per task, with retries, a journal to resume from, a summary and an export."""

from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs.episodes_run import Played, Prepared, play_prepared, prepare, run_episodes
from tokengrove.runs.observer import Observer
from tokengrove.runs.summary import Summary

__all__ = ["Observer", "Played", "Prepared", "RunOptions", "Summary", "play_prepared", "prepare", "run_episodes"]
