"""Tells receivers of the operator's choice what happens, by HTTP: at least once, signed, in no order.

Events are rows of an outbox (`store.sql.webhooks`); nothing here delays a turn.
"""
