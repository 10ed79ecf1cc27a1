"""Decides what an error means for the batch: one message is at fault, some message is, or none is. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from processor.engine.failing.classify import Kind
from processor.engine.failing.outcomes import Again, Culprit, Unattributed, Wait
from processor.errors import ProcessorError, text_of
from processor.handling.errors import HandlerError, NotYet, SentTogether
from processor.postgres import sqlstates

if TYPE_CHECKING:
    from processor.engine.failing.classify import Judge

# A batch is run again unchanged this often if no message is at fault. After that, one is searched for.
TRIES_IN_PLACE = 3


def attribute(
    error: Exception, *, tries: int, careful: Collection[str], judge: Judge
) -> Again | Culprit | Unattributed | Wait | Exception:
    """Return the outcome that an error of a batch means after this many `tries`, or an exception to raise instead.

    `careful` names the statements that are sent so that a refused write shows its message.
    """
    in_handler, index = isinstance(error, HandlerError), None
    if isinstance(error, NotYet):
        return Again(str(error))
    if isinstance(error, HandlerError):
        index, error = error.index, error.error
    if isinstance(error, ProcessorError):
        return error
    text = f"{type(error).__name__}: {text_of(error)}"
    explicit = in_handler and judge.is_explicit(error)
    if sqlstates.is_passing(error) and not explicit and (tries < TRIES_IN_PLACE or not in_handler):
        return Again(text)
    if index is not None:
        return Culprit(index, error)
    if (judge.kind(error) is Kind.OUTAGE) if in_handler else sqlstates.is_outage(error):
        return Wait(text)
    if isinstance(error, SentTogether) and error.what not in careful:
        return Again(text, careful_with=error.what)
    if in_handler or sqlstates.is_about_data(error) or sqlstates.is_bystander(error):
        return Unattributed(error)
    return error
