"""Which replica runs which lanes."""

from lanewise.errors import UserError


def lanes_of(replica: int, replicas: int, lanes: int) -> range:
    """The contiguous lanes of one replica. Counts differ by at most one when `lanes` does not divide.

    Raises UserError if there are more replicas than lanes: a replica without a lane would have nothing to do.
    """
    if replicas > lanes:
        raise UserError(
            f"{replicas} replicas but only {lanes} lanes: use at most {lanes} workers, or start a run with more "
            f"batch.lanes (they define the bits of a run, so an existing run keeps its own)"
        )
    return range(replica * lanes // replicas, (replica + 1) * lanes // replicas)
