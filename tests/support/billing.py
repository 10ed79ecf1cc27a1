"""The project's own billing handler, sending to a topic of the test's own instead of `charges-made`."""

from __future__ import annotations

import os

from handlers import billing

billing.RESULTS = os.environ["TEST_OUTPUT_TOPIC"]

charge = billing.charge
