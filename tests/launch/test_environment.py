"""The launcher that started a process, and its rank, from environment variables."""

from __future__ import annotations

import pytest

from wf_backends.launch.environment import SLURM_PORTS, JobProcess, detect, first_host

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[03-06]",
}
RANKS = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
TORCHRUN = {
    **RANKS,
    **MASTER,
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
DEEPSPEED = {**RANKS, **MASTER, "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "4"}
SLURM_PORT = SLURM_PORTS[31 * 1234 % len(SLURM_PORTS) + 2]
SINGLE = JobProcess("single", 0, 1, 0, 1)

ENVIRONMENTS = {
    "nothing": ({}, SINGLE),
    "openmpi": (OPENMPI, JobProcess("openmpi", 3, 8, 1, 2)),
    "openmpi with an address": (
        OPENMPI | MASTER,
        JobProcess("openmpi", 3, 8, 1, 2, "node0", 1234),
    ),
    "openmpi inside slurm": (OPENMPI | SLURM, JobProcess("openmpi", 3, 8, 1, 2)),
    "mpich": (MPICH, JobProcess("mpich", 3, 8, 1, 2)),
    "mpich whose daemons slurm started": (
        MPICH | SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"},
        JobProcess("mpich", 3, 8, 1, 2),
    ),
    "pmi without local ranks": (
        {"PMI_RANK": "3", "PMI_SIZE": "8"},
        JobProcess("mpich", 3, 8, None, None),
    ),
    "slurm": (SLURM, JobProcess("slurm", 3, 8, 1, None, "gpu03", SLURM_PORT)),
    "slurm with one task": (
        SLURM | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"} | MASTER,
        JobProcess("slurm", 0, 1, 1, None),
    ),
    "slurm with pmi2": (
        SLURM | {"PMI_RANK": "3", "PMI_SIZE": "8"},
        JobProcess("slurm", 3, 8, 1, None, "gpu03", SLURM_PORT),
    ),
    "slurm step smaller than its job": (
        SLURM | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu05"},
        JobProcess("slurm", 3, 4, 1, None, "gpu05", SLURM_PORT),
    ),
    "slurm with an address": (SLURM | MASTER, JobProcess("slurm", 3, 8, 1, None, "node0", 1234)),
    "torchrun": (
        TORCHRUN,
        JobProcess("torchrun", 3, 8, 1, 2, "node0", 1234, restart=1, agent_store=True),
    ),
    "torchrun with one rank": (
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        JobProcess("torchrun", 0, 1, 1, 2, "node0", 1234, restart=1, agent_store=True),
    ),
    "torchrun inside slurm": (
        TORCHRUN | SLURM,
        JobProcess("torchrun", 3, 8, 1, 2, "node0", 1234, restart=1, agent_store=True),
    ),
    "deepspeed": (DEEPSPEED, JobProcess("deepspeed", 3, 8, 1, 2, "node0", 1234)),
    "ranks alone": (RANKS, JobProcess("environment", 3, 8, 1, None)),
    "address without a port": (
        RANKS | {"MASTER_ADDR": "node0"},
        JobProcess("environment", 3, 8, 1, None, "node0", 29500),
    ),
    "one rank": ({"RANK": "0", "WORLD_SIZE": "1", **MASTER}, SINGLE),
    "after init under openmpi": (
        OPENMPI | RANKS | MASTER,
        JobProcess("openmpi", 3, 8, 1, 2, "node0", 1234),
    ),
}


@pytest.mark.parametrize(("environ", "process"), ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_detect_reads_rank_and_launcher_from_the_environment(environ, process):
    assert detect(environ) == process


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "8"}, "a job of environment, but RANK is missing"),
        ({"RANK": "1"}, "a job of environment, but WORLD_SIZE is missing"),
        ({"OMPI_COMM_WORLD_SIZE": "8"}, "a job of openmpi, but OMPI_COMM_WORLD_RANK is missing"),
        (
            {"SLURM_PROCID": "0"},
            "a job of slurm, but SLURM_STEP_NUM_TASKS or SLURM_NTASKS is missing",
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "SLURM_JOB_ID or SLURM_JOBID is missing"),
        (RANKS | {"RANK": "eight"}, "RANK must be an integer, got 'eight'"),
        (RANKS | {"RANK": "8"}, "RANK=8 is no rank of a job of 8"),
        (RANKS | MASTER | {"MASTER_PORT": "0"}, "MASTER_PORT must be a port .* got 0"),
        (RANKS | MASTER | {"MASTER_PORT": "65536"}, "MASTER_PORT must be .* 65535, got 65536"),
        (RANKS | {"MASTER_ADDR": ""}, "MASTER_ADDR is empty: set it to the host of rank 0"),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "2"},
            r"a job of 2 \(SLURM_STEP_NUM_TASKS or SLURM_NTASKS\)",
        ),
        (MPICH | {"PMI_RANK": "-1"}, "PMI_RANK=-1 is no rank of a job of 8"),
    ],
)
def test_incomplete_or_contradictory_variables_are_named(environ, message):
    with pytest.raises(ValueError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("a,b", "a"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[7,9]", "gpu7"),
        ("rack[2-3]-node[010-020].site.org", "rack2-node010.site.org"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_steps_of_one_slurm_job_meet_at_different_ports():
    ports = {detect(SLURM | {"SLURM_STEP_ID": str(step)}).port for step in range(8)}
    assert len(ports) == 8 and all(port in SLURM_PORTS for port in ports)
