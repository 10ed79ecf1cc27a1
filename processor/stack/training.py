"""Makes the archive that halves the start of a broker, by running one once and recording what it loads.

On two cores a broker starts in 1.0 s instead of 2.6 s; recording takes some 10 s, once for each Java
and Kafka version. Everything works without the archive too, so no failure here is an error.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from processor.errors import SetupError
from processor.stack import jars, ports
from processor.stack.guard import Guard
from processor.stack.java import Runtime
from processor.stack.kafka import Broker
from processor.stack.state import Shape, State, Store

RECORD_SECONDS = 60.0


def train(runtime: Runtime) -> None:
    """Write the runtime's archive; an empty one if this Java cannot, so that it is not tried again."""
    archive = runtime.archive
    if archive is None:
        return
    with jars.locked(archive.parent):
        if archive.exists():
            return
        partial = archive.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        try:
            _record(runtime, partial)
        except SetupError:
            partial.unlink(missing_ok=True)
        partial.touch()
        partial.replace(archive)


def _record(runtime: Runtime, archive: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="processor-stack-training-") as folder:
        store = Store(Path(folder).resolve())
        # The recording broker belongs to no stack a user knows of: nobody else would stop it.
        guard = Guard(store.directory)
        recorder = (f"-XX:AOTCacheOutput={archive}",)
        broker = Broker(1, store, secured=False, runtime=runtime, java_options=recorder)
        try:
            with store.lock():
                state = State.new(Shape())
                state.server(broker.name).ports = ports.choose(broker.port_names, {}, ())
                store.write(state)
                broker.launch_and_record()
            broker.wait_ready()
            broker.terminate(RECORD_SECONDS)
        finally:
            broker.kill()
            guard.dismiss()
