"""A client that speaks for a group without being in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from confluent_kafka import Consumer

from processor.kafka import connections

if TYPE_CHECKING:
    from processor.settings.kafka import KafkaSettings


def outsider(settings: KafkaSettings, group: str) -> Consumer:
    """Return a client that never joins the group, and from which the broker takes offsets while there is no member.

    Always of the classic protocol: with the other one a client has a member's name before it has joined.
    """
    config = settings.admin_config() | {"group.id": group, "enable.auto.commit": False}
    return Consumer(config, logger=connections.silent)
