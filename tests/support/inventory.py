"""The project's own inventory handlers, sending to a topic of the test's own instead of `reservations`."""

from __future__ import annotations

import os

from handlers import inventory

inventory.RESULTS = os.environ["TEST_OUTPUT_TOPIC"]

reserve = inventory.reserve
reserve_many = inventory.reserve_many
count = inventory.count
