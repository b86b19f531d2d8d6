"""What several threads tell of one job, one after the other, reaches the scheduler thread as one message."""

from vllm_tiered_offload.contract.jobs import JobMetadata, ReqContext
from vllm_tiered_offload.contract.keys import OffloadKey
from vllm_tiered_offload.tiers.fs.faults import Fault
from vllm_tiered_offload.tiers.fs.index import Write
from vllm_tiered_offload.tiers.fs.jobs import Job, JobTable
from vllm_tiered_offload.tiers.fs.messages import Answers, Inbox, Loaded, Stored

KEYS = tuple(OffloadKey(bytes([number])) for number in range(6))


def new_job(job_id: int) -> Job:
    return JobTable().begin(JobMetadata(job_id, KEYS, tuple(range(6)), True, ReqContext("r")), epoch=0)


def new_write(key: OffloadKey) -> Write:
    return Write(key, memoryview(b""), 1, [])


def told(*messages: Loaded | Stored | Answers) -> list[object]:
    inbox = Inbox()
    for message in messages:
        inbox.put(message)
    return list(inbox.take_urgent())


def test_loads_of_one_job() -> None:
    job = new_job(1)
    (message,) = told(
        Loaded(job, [0, 2], moved=20, seconds=0.5),
        Loaded(job, [], [(1, Fault.CORRUPT, True)], seconds=0.25),
        Loaded(job, [3], moved=10, seconds=0.25),
    )
    assert message == Loaded(job, [0, 2, 3], [(1, Fault.CORRUPT, True)], 30, 1.0)


def test_other_jobs_and_other_messages_stay_apart_and_in_order() -> None:
    """Also a job with the same id: it is not the same job."""
    one, other, answers = new_job(1), new_job(1), Answers(0, KEYS)
    messages = told(Loaded(one, [0]), Loaded(other, [1]), answers, Loaded(other, [2]), Loaded(one, [3]))
    assert [message if message is answers else (message.job is one, message.good) for message in messages] == [
        (True, [0]),
        (False, [1]),
        answers,
        (False, [2]),
        (True, [3]),
    ]


def test_stores_of_one_epoch() -> None:
    writes = [new_write(key) for key in KEYS]
    first, second = told(Stored(3, writes[:1], 0.5), Stored(3, writes[1:4], 0.5), Stored(4, writes[4:], 2.0))
    assert (first.writes, first.seconds, first.epoch) == (writes[:4], 1.0, 3)
    assert (second.writes, second.seconds, second.epoch) == (writes[4:], 2.0, 4)
