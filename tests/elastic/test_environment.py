import pytest

from lanewise.elastic.environment import _first_host, detect
from lanewise.errors import UserError


def test_alone():
    assert detect({}) is None
    assert detect({"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_STEP_ID": "0"}) is None


def test_torchrun():
    env = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
    place = detect(env)
    assert (place.rank, place.world, place.local_rank, place.host, place.port) == (3, 8, 1, "h", 29500)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        detect({"RANK": "0", "WORLD_SIZE": "2"})


def test_slurm_ranks_agree_on_the_first_host_and_a_port():
    env = {
        "SLURM_NTASKS": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NODELIST": "gpu-[008-010],m4",
        "SLURM_LOCALID": "1",
    }
    places = [detect({**env, "SLURM_PROCID": str(rank)}) for rank in range(4)]
    assert [p.rank for p in places] == [0, 1, 2, 3]
    assert {(p.host, p.port, p.world) for p in places} == {("gpu-008", places[0].port, 4)}
    assert 15000 <= places[0].port < 30000
    assert detect({**env, "SLURM_PROCID": "0", "SLURM_STEP_ID": "1"}).port != places[0].port


def test_mpi_on_one_host_and_on_several():
    env = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "123456"}
    assert detect({**env, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}).host == "127.0.0.1"
    with pytest.raises(UserError, match="MPI did not say"):
        detect({**env, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


@pytest.mark.parametrize(
    ("nodes", "first"), [("n1", "n1"), ("n[1-3,7],m4", "n1"), ("gpu-[008-010]", "gpu-008"), ("a,b", "a")]
)
def test_first_host_of_a_node_list(nodes, first):
    assert _first_host(nodes) == first
