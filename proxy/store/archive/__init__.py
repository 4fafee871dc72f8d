"""Ended sessions in Parquet files, outside of the database: written, read, restored and deleted."""
