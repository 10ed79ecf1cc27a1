"""Kafka consume-transform-produce with exactly-once effects across Postgres and Kafka.

What handlers may import is here; nothing else is public.
"""

from processor.errors import Reject, Retry, Unavailable
from processor.handling.database import Database
from processor.messages.message import Message, Messages, Output, Outputs, Result

__all__ = ["Database", "Message", "Messages", "Output", "Outputs", "Reject", "Result", "Retry", "Unavailable"]
