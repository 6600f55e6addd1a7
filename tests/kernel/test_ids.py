import pytest

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape, Token, check_name, new_incarnation


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("dp=2,tp=2,pp=2", MeshShape(dp=2, tp=2, pp=2)),
        ("dp3.tp2", MeshShape(dp=3, tp=2)),
        ("2x2x3", MeshShape(dp=2, tp=2, pp=3)),
        ("2 1 4 2", MeshShape(dp=2, tp=1, pp=4, cp=2)),
        ("PP=4", MeshShape(pp=4)),
    ],
)
def test_mesh_is_read_in_every_form(text: str, mesh: MeshShape) -> None:
    assert MeshShape.parse(text) == mesh
    assert MeshShape.parse(str(mesh)) == mesh


@pytest.mark.parametrize("text", ["", "dp=0", "dp=2,dp=3", "xp=2", "2", "dp=-1", "dp=two", "1x2x3x4x5"])
def test_nonsense_mesh_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        MeshShape.parse(text)
    assert repr(text) in caught.value.what
    assert caught.value.exit_code == 2
    assert caught.value.hint


@pytest.mark.parametrize("mesh", [MeshShape(2, 2, 2), MeshShape(3, 2, 1), MeshShape(1, 2, 3), MeshShape(2, 2, 2, 2)])
def test_ranks_and_coordinates_are_inverse(mesh: MeshShape) -> None:
    seen = [mesh.rank(**mesh.coordinates(rank)) for rank in range(mesh.world_size)]
    assert seen == list(range(mesh.world_size))


def test_tensor_parallel_peers_are_neighbours() -> None:
    mesh = MeshShape(dp=2, tp=2, pp=2)
    assert mesh.coordinates(1) == {"dp": 0, "pp": 0, "cp": 0, "tp": 1}
    assert mesh.coordinates(2) == {"dp": 0, "pp": 1, "cp": 0, "tp": 0}
    assert mesh.coordinates(4) == {"dp": 1, "pp": 0, "cp": 0, "tp": 0}


def test_rank_outside_the_mesh_is_an_error() -> None:
    with pytest.raises(ValueError, match="outside mesh"):
        MeshShape(2, 1, 1).coordinates(2)


def test_epoch_weighs_more_than_generation() -> None:
    assert Token(2, 1) > Token(1, 9)
    assert Token(1, 2) > Token(1, 1)


@pytest.mark.parametrize("name", ["n0", "gpu-17.rack_3", "a"])
def test_usable_names(name: str) -> None:
    assert check_name("node", name) == name


@pytest.mark.parametrize("name", ["", "N0", "-a", "a/b", "a" * 64, "a b", "ä"])
def test_unusable_names(name: str) -> None:
    with pytest.raises(ConfigurationError):
        check_name("node", name)


def test_incarnations_differ() -> None:
    assert new_incarnation() != new_incarnation()
