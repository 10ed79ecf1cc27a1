"""Kafka consume-transform-produce with exactly-once effects across Postgres and Kafka.

What handlers may import is here; nothing else is public.
"""

from processor.database import Database
from processor.failures import Reject, Retry, Unavailable
from processor.records import Message, Output, Result

__all__ = ["Database", "Message", "Output", "Reject", "Result", "Retry", "Unavailable"]
