"""SQL: functions over one connection, which the writer's thread or a reader's thread runs inside a transaction."""
