"""Kafka consume-transform-produce with exactly-once effects across Postgres and Kafka."""
