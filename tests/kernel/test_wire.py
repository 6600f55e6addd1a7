import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow import wire
from regrow.ids import MeshShape


def test_round_trip_keeps_everything() -> None:
    spec = wire.GenerationSpec(
        job="gpt",
        epoch=3,
        generation=7,
        mesh=MeshShape(3, 2, 1),
        world_size=6,
        nodes=("n0", "n1", "n2"),
        micro_batches=(3, 3, 2),
        restore=wire.RestorePoint(step=41, directory="/x"),
    )
    start = wire.StartGeneration(
        epoch=3,
        seq=9,
        spec=spec,
        job_spec=wire.JobSpec(job="gpt", argv=("train.py",), mesh_table={6: MeshShape(3, 2, 1)}),
        workers=(wire.WorkerAssignment(rank=4, local_rank=0),),
        group_rank=2,
        master_address="127.0.0.1:4000",
    )
    assert wire.decode(wire.encode(start), wire.ToAgent) == start


def test_unknown_type_is_not_an_error() -> None:
    assert wire.decode(b'{"type":"from_the_future","x":1}', wire.FromAgent) == wire.Unknown("from_the_future")


def test_added_fields_are_ignored_and_missing_optional_ones_filled_in() -> None:
    beat = wire.decode(b'{"type":"beat","seq":4,"colour":"red"}', wire.FromAgent)
    assert beat == wire.Beat(seq=4)


@pytest.mark.parametrize("line", [b'{"type":"beat"}', b'{"type":"beat","seq":"four"}'])
def test_known_type_with_wrong_content_is_an_error(line: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode(line, wire.FromAgent)


def test_too_long_a_line_is_refused() -> None:
    with pytest.raises(msgspec.DecodeError, match="over the limit"):
        wire.decode(b" " * (wire.MAX_MESSAGE_BYTES + 1), wire.FromAgent)


@given(st.binary(max_size=200))
def test_garbage_never_raises_anything_else(data: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        wire.decode(data, wire.FromAgent)


@pytest.mark.parametrize("union", [wire.FromWorker, wire.FromAgent, wire.ToAgent, wire.PeerMessage])
def test_tags_are_unique(union: object) -> None:
    members = union.__args__
    tags = [member.__struct_config__.tag for member in members]
    assert len(set(tags)) == len(members)
