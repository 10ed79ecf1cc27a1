"""Offsets moved with Kafka's own tool: what was done is skipped, and nothing is sent again."""

from __future__ import annotations

import signal

import pytest
from confluent_kafka import ConsumerGroupState
from confluent_kafka.admin import AdminClient

from processor.stack import Stack
from tests.conftest import Deploy, Start
from tests.support.deployments import Deployment
from tests.support.waiting import eventually


def rewind(stack: Stack, deployed: Deployment) -> None:
    """`kafka-consumer-groups --reset-offsets --to-earliest`, which needs a group without members."""
    admin = AdminClient({"bootstrap.servers": deployed.bootstrap_servers, "log_level": 0})

    def empty() -> bool:
        described = admin.describe_consumer_groups([deployed.consumer])[deployed.consumer].result()
        return bool(described.state == ConsumerGroupState.EMPTY)

    eventually(empty, 15, "the group without members")
    done = stack.kafka_tool(
        "kafka-consumer-groups",
        *("--group", deployed.consumer, "--topic", deployed.input_topic),
        *("--reset-offsets", "--to-earliest", "--execute"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(deployed.verifier().committed().values()) == {0}, done.stdout


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_rewind_to_the_beginning_applies_and_sends_nothing_again(
    protocol: str, local_stack: Stack, deployment: Deploy, start: Start
) -> None:
    deployed = deployment(protocol=protocol)
    verifier = deployed.verifier()
    feed = deployed.feed()
    feed.send(800)
    first = start(deployed)
    before = verifier.assert_exactly_once()
    first.terminate()
    assert first.wait() == 0, first.tail()

    rewind(local_stack, deployed)
    again = start(deployed)
    again.wait_for("partition_ready", found="rewound", start=0, count=deployed.partitions)
    after = verifier.assert_exactly_once()
    assert (after.rows, after.outputs) == (before.rows, before.outputs)
    feed.send(100)
    verifier.assert_exactly_once()


# In the first batch; the first transaction of all only says where reading begins.
@pytest.mark.parametrize("point", ["after_postgres_commit=kill@1", "before_kafka_commit=kill@2"])
def test_a_rewind_after_a_crash_applies_and_sends_nothing_again(
    point: str, local_stack: Stack, deployment: Deploy, start: Start
) -> None:
    """Of what was published just before, and not marked as sent yet, a repeat is allowed: here nothing was."""
    deployed = deployment()
    deployed.feed().send(800)
    crashed = start(deployed, failpoints=point)
    assert crashed.wait() == -signal.SIGKILL, crashed.tail()
    rewind(local_stack, deployed)
    again = start(deployed)
    again.wait_for("partition_ready", start=0, count=deployed.partitions)
    assert again.events("partition_ready", found="rewound"), again.tail()
    deployed.verifier().assert_exactly_once()


@pytest.mark.parametrize("point", ["after_portion", "after_reposition"])
def test_killed_while_a_rewind_after_a_crash_is_followed_sends_nothing_again(
    point: str, local_stack: Stack, deployment: Deploy, start: Start
) -> None:
    deployed = deployment(partitions=1)
    deployed.feed().send(400)
    crashed = start(deployed, failpoints="after_postgres_commit=kill@1")
    assert crashed.wait() == -signal.SIGKILL, crashed.tail()
    rewind(local_stack, deployed)
    doomed = start(deployed, failpoints=f"{point}=kill")
    assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    again = start(deployed)
    again.wait_for("partition_ready", found="rewound" if point == "after_portion" else "in_step", start=0)
    assert not again.events("stored_outputs_sent")
    deployed.verifier().assert_exactly_once()
