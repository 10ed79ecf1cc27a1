"""What a stack is and which processes belong to it: one JSON file, always whole, behind one lock."""

from __future__ import annotations

import base64
import fcntl
import os
import secrets
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import BaseModel, Field, ValidationError

from processor.errors import SetupError
from processor.stack.process import ProcessId, wait_until

LOCK_SECONDS = 300.0


class Shape(BaseModel, frozen=True):
    """What the data was created for; it cannot change afterwards."""

    brokers: int = 1
    sasl: bool = False
    tls: bool = False

    def __str__(self) -> str:
        options = ["--sasl"] * self.sasl + ["--tls"] * self.tls
        return " ".join([f"--brokers {self.brokers}", *options])


class ServerState(BaseModel):
    ports: dict[str, int] = Field(default_factory=dict)
    process: ProcessId | None = None


class State(BaseModel):
    """Everything that has to survive the command that wrote it."""

    shape: Shape
    cluster_id: str
    postgres_password: str
    sasl_password: str
    postgres_home: Path | None = None
    overrides: dict[str, str] = Field(default_factory=dict)
    servers: dict[str, ServerState] = Field(default_factory=dict)

    @classmethod
    def new(cls, shape: Shape) -> State:
        return cls(
            shape=shape,
            cluster_id=_cluster_id(),
            postgres_password=secrets.token_hex(16),
            sasl_password=secrets.token_hex(16),
        )

    def server(self, name: str) -> ServerState:
        return self.servers.setdefault(name, ServerState())


class Store:
    """Reads and writes the state of the stack in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "state.json"
        self._threads = threading.Lock()

    def read(self) -> State | None:
        """The state, or None where no stack was ever started."""
        try:
            return State.model_validate_json(self.path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValidationError as error:
            raise SetupError(f"{self.path} is damaged: remove it with `processor stack down --purge`") from error
        except OSError as error:
            raise SetupError(f"cannot read {self.path}: {error.strerror}") from error

    def require(self) -> State:
        state = self.read()
        if state is None:
            raise SetupError(f"no stack in {self.directory}: start one with `processor stack up`")
        return state

    def write(self, state: State) -> None:
        """Replace the file in one step, readable by us alone: it holds passwords."""
        partial = self.path.with_suffix(".partial")
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(state.model_dump_json(indent=2))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)

    @contextmanager
    def change(self) -> Iterator[State]:
        """Read, change and write as one step among the threads of this process; needs `lock`."""
        with self._threads:
            state = self.require()
            yield state
            self.write(state)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep every other `up`, `down` and `start` on this directory out until we are done."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            ignore = self.directory / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n")
            file = (self.directory / "lock").open("w")
        except OSError as error:
            raise SetupError(
                f"cannot write to {self.directory}: {error.strerror}: "
                "name another folder with --directory or PROCESSOR_STACK_DIR"
            ) from error
        with file:
            if not wait_until(lambda: _locked(file.fileno()), LOCK_SECONDS):
                raise SetupError(f"another `processor stack` command has been working in {self.directory} for minutes")
            yield


def _cluster_id() -> str:
    """A random id in Kafka's spelling."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # Kafka's tools would read a leading dash as an option.
        if not text.startswith("-"):
            return text


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
