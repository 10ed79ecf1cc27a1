"""One KRaft node, broker and controller in one process, and Kafka's own command-line tools."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

from processor.errors import SetupError
from processor.stack import probe
from processor.stack.display import Display
from processor.stack.java import Runtime
from processor.stack.ports import LOOPBACK
from processor.stack.process import ProcessId, clean_environment, one_line, spawn
from processor.stack.server import Server, workshop
from processor.stack.state import State, Store

INTERNAL = "INTERNAL"
CONTROLLER = "CONTROLLER"
CLIENT = "CLIENT"
MECHANISM = "SCRAM-SHA-512"
SASL_USER = "processor"
TLS_FOLDER = "tls"

TOOLS = {
    "kafka-configs": "kafka.admin.ConfigCommand",
    "kafka-console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "kafka-consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "kafka-delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "kafka-features": "org.apache.kafka.tools.FeatureCommand",
    "kafka-get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "kafka-leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "kafka-metadata-quorum": "org.apache.kafka.tools.MetadataQuorumCommand",
    "kafka-reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "kafka-topics": "org.apache.kafka.tools.TopicCommand",
    "kafka-transactions": "org.apache.kafka.tools.TransactionsCommand",
}

BROKER_LOGGING = """\
status = error
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = ${sys:stack.log}
appender.file.filePattern = ${sys:stack.log}.%i
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d %p %m (%c)%n%throwable
appender.file.policies.type = SizeBasedTriggeringPolicy
appender.file.policies.size = 20MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 2
rootLogger.level = info
rootLogger.appenderRef.file.ref = file
"""

TOOLS_LOGGING = """\
status = error
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %p %m (%c)%n
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
"""


def is_secured(state: State) -> bool:
    """Whether clients have a listener of their own, apart from the one between the brokers."""
    return state.shape.sasl or state.shape.tls


def client_protocol(state: State) -> str:
    """Kafka's name for what clients have to speak."""
    return {
        (False, False): "PLAINTEXT",
        (True, False): "SASL_PLAINTEXT",
        (False, True): "SSL",
        (True, True): "SASL_SSL",
    }[state.shape.sasl, state.shape.tls]


class Broker(Server):
    """One node of the cluster."""

    stop_signal = signal.SIGTERM

    def __init__(
        self,
        node_id: int,
        store: Store,
        *,
        secured: bool,
        runtime: Runtime | None = None,
        java_options: tuple[str, ...] = (),
    ) -> None:
        super().__init__(broker_name(node_id), store)
        self.node_id = node_id
        self.port_names = (INTERNAL, CONTROLLER, CLIENT) if secured else (INTERNAL, CONTROLLER)
        self._known_runtime = runtime
        self._java_options = java_options
        self._folder = store.directory / self.name
        self._data = self._folder / "data"

    def marker(self) -> str:
        return f"-Dstack.broker={self._folder}"

    def output(self) -> Path:
        return self.log.with_suffix(".out")

    def launch(self) -> ProcessId:
        state = self.store.require()
        self._folder.mkdir(mode=0o700, exist_ok=True)
        (self._folder / "log4j2.properties").write_text(BROKER_LOGGING)
        (self._folder / "server.properties").write_text(_as_text(settings(self.node_id, state, "data")))
        if not self._data.exists():
            self._format(state)
        # Paths relative to its folder: Java and Kafka's lists of folders would misread some characters.
        return spawn(
            self._runtime().command(
                *self._java_options,
                "-Dlog4j2.configurationFile=log4j2.properties",
                f"-Dstack.log=../logs/{self.log.name}",
                self.marker(),
                "kafka.Kafka",
                "server.properties",
            ),
            directory=self._folder,
            output=self.output(),
            environment=_environment(),
        )

    def is_ready(self) -> bool:
        """It answers, for our cluster, and counts itself among the brokers that serve clients."""
        cluster = probe.ask(self.ports[INTERNAL])
        return (
            cluster is not None
            and cluster.cluster_id == self.store.require().cluster_id
            and self.node_id in cluster.node_ids
        )

    def sees(self, node_ids: frozenset[int]) -> bool:
        """Whether it knows all of these brokers to serve clients."""
        cluster = probe.ask(self.ports[INTERNAL])
        return cluster is not None and node_ids <= cluster.node_ids

    def _format(self, state: State) -> None:
        with workshop(self._folder) as made:
            properties = made / "format.properties"
            properties.write_text(_as_text(settings(self.node_id, state, f"{made.name}/data")))
            scram = f"{MECHANISM}=[name={SASL_USER},password={state.sasl_password}]"
            done = run_tool(
                self._folder,
                self._runtime(),
                "kafka.tools.StorageTool",
                *("format", "--cluster-id", state.cluster_id, "--config", f"{made.name}/{properties.name}"),
                *(("--add-scram", scram) if state.shape.sasl else ()),
            )
            if done.returncode != 0:
                said = one_line(done.stderr or done.stdout)
                raise SetupError(f"{self.name}: formatting its data failed: {said}")
            (made / "data").rename(self._data)

    def _runtime(self) -> Runtime:
        return self._known_runtime or Runtime.find(self.store.directory / "jars", Display())


def broker_name(node_id: int) -> str:
    return f"broker-{node_id}"


def run_tool(
    directory: Path, runtime: Runtime, main: str, *arguments: str, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run one of Kafka's command-line tools to its end, in this directory."""
    (directory / "tools-log4j2.properties").write_text(TOOLS_LOGGING)
    return subprocess.run(
        runtime.command("-Dlog4j2.configurationFile=tools-log4j2.properties", main, *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=directory,
        timeout=timeout,
        start_new_session=True,
        env=_environment(),
        check=False,
    )


def _environment() -> dict[str, str]:
    """Ours, without what would reconfigure Java; with UTF-8, or it cannot read every folder's name."""
    return clean_environment("KAFKA_", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "LC_") | {"LC_ALL": "C.UTF-8"}


def settings(node_id: int, state: State, data: str) -> dict[str, str]:
    """The configuration of one node; everything in it follows from the state."""
    nodes = range(1, state.shape.brokers + 1)
    ports = {node: state.server(broker_name(node)).ports for node in nodes}
    replication = min(3, state.shape.brokers)
    in_sync = 2 if replication == 3 else 1
    listeners = [INTERNAL, *([CLIENT] if is_secured(state) else [])]
    addresses = {name: f"{name}://{LOOPBACK}:{port}" for name, port in ports[node_id].items()}
    found = {
        "process.roles": "broker,controller",
        "node.id": node_id,
        "controller.quorum.voters": ",".join(f"{node}@{LOOPBACK}:{ports[node][CONTROLLER]}" for node in nodes),
        "listeners": ",".join(addresses[name] for name in [*listeners, CONTROLLER]),
        "advertised.listeners": ",".join(addresses[name] for name in listeners),
        "listener.security.protocol.map": (
            f"{INTERNAL}:PLAINTEXT,{CONTROLLER}:PLAINTEXT,{CLIENT}:{client_protocol(state)}"
        ),
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": INTERNAL,
        "log.dirs": data,
        "auto.create.topics.enable": "false",
        "default.replication.factor": replication,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replication,
        "transaction.state.log.replication.factor": replication,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replication,
        "share.coordinator.state.topic.min.isr": in_sync,
        # The defaults of 50 make the first consumer and the first transaction wait for 50 partitions.
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.num.partitions": 4,
        "group.initial.rebalance.delay.ms": 0,
        # A crashed consumer is noticed in seconds instead of 45, in both group protocols. Not lower by
        # default: on a busy laptop a healthy one would be thrown out; a test may set less by `overrides`.
        "group.min.session.timeout.ms": 1000,
        "group.consumer.min.session.timeout.ms": 1000,
        "group.consumer.session.timeout.ms": 6000,
        "group.consumer.min.heartbeat.interval.ms": 100,
        "group.consumer.heartbeat.interval.ms": 500,
        # The transaction of a crashed producer is aborted soon after its timeout, not up to 10 s later.
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
        # A killed broker is fenced, and its partitions get new leaders, in 3 s instead of 9. A single one
        # has to wait for the end of its own old session when it comes back.
        "broker.session.timeout.ms": 3000 if state.shape.brokers > 1 else 1500,
        "broker.heartbeat.interval.ms": 300,
        "num.network.threads": 2,
        "num.io.threads": 4,
        "log.cleaner.dedupe.buffer.size": 4 * 1024 * 1024,
        **(_sasl() if state.shape.sasl else {}),
        **(_tls() if state.shape.tls else {}),
        **state.overrides,
    }
    return {name: str(value) for name, value in found.items()}


def _sasl() -> dict[str, str]:
    listener = f"listener.name.{CLIENT.lower()}"
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    return {
        "sasl.enabled.mechanisms": MECHANISM,
        f"{listener}.sasl.enabled.mechanisms": MECHANISM,
        f"{listener}.{MECHANISM.lower()}.sasl.jaas.config": f"{module} required;",
    }


def _tls() -> dict[str, str]:
    listener = f"listener.name.{CLIENT.lower()}"
    return {
        f"{listener}.ssl.keystore.type": "PEM",
        f"{listener}.ssl.keystore.location": f"../{TLS_FOLDER}/server.pem",
        f"{listener}.ssl.truststore.type": "PEM",
        f"{listener}.ssl.truststore.location": f"../{TLS_FOLDER}/ca.pem",
    }


def _as_text(properties: Mapping[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in properties.items())
