"""Scripted engine: plays replies that a script gives, without a model; `acting` is a script that answers like one."""
