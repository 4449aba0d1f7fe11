import hashlib
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from aorta.device import environment as module
from aorta.device.cuda import pci_address
from aorta.device.environment import (
    collect_devices,
    collect_environment,
    collect_versions,
    environment_warnings,
    program_commit,
    user_variables,
)
from aorta.records.schema import DeviceKind


@pytest.fixture
def no_nccl_file(tmp_path: Path) -> dict[str, str]:
    return {"HOME": str(tmp_path)}


def test_only_what_the_runtimes_act_on_is_kept(no_nccl_file: dict[str, str]) -> None:
    environ = no_nccl_file | {
        "NCCL_ALGO": "Ring",
        "RCCL_MSCCL_ENABLE": "0",
        "RCCL_OF_A_NEW_VERSION": "1",
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
        "GPU_MAX_HW_QUEUES": "8",
        "OMP_NUM_THREADS": "4",
        "PATH": "/bin",
        "WANDB_API_KEY": "0123456789abcdef",
    }
    kept = collect_environment(environ)
    assert list(kept) == [
        "CUDA_VISIBLE_DEVICES",
        "GPU_MAX_HW_QUEUES",
        "NCCL_ALGO",
        "OMP_NUM_THREADS",
        "RCCL_MSCCL_ENABLE",
        "RCCL_OF_A_NEW_VERSION",
    ]
    assert kept["CUDA_VISIBLE_DEVICES"].startswith("GPU-8932f937")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_AUTH_TOKEN", "x"),
        ("PYTORCH_INDEX", "https://someone:word@host/simple"),
        ("CUDA_DOWNLOAD", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
        ("NCCL_NET_PLUGIN", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
        ("NCCL_SOMETHING", "hunter2"),
        ("CUDA_VISIBLE_DEVICES", "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MEFCQ0RFRg=="),
        ("HIP_SOMETHING", "Zm9vYmFyYmF6cXV4MTIzNDU2Nzg5MEFCQ0RFRg=="),
    ],
)
def test_secrets_are_left_out(name: str, value: str, no_nccl_file: dict[str, str]) -> None:
    assert collect_environment(no_nccl_file | {name: value}) == {}


def test_the_nccl_file_counts_and_the_environment_wins(tmp_path: Path) -> None:
    (tmp_path / ".nccl.conf").write_text("# tuned\nNCCL_ALGO=Tree\nNCCL_PROTO = LL  # small\nnonsense\n")
    kept = collect_environment({"HOME": str(tmp_path), "NCCL_ALGO": "Ring"})
    assert kept == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}

    named = tmp_path / "other.conf"
    named.write_text("NCCL_DEBUG=WARN\n")
    assert collect_environment({"HOME": str(tmp_path), "NCCL_CONF_FILE": str(named)}) == {
        "NCCL_CONF_FILE": str(named),
        "NCCL_DEBUG": "WARN",
    }


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        pytest.param({}, "cuda", [], id="nothing-set"),
        pytest.param(
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "cuda", ["CUDA_DEVICE_MAX_CONNECTIONS=1"], id="one"
        ),
        pytest.param({"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, "cuda", [], id="eight-connections"),
        pytest.param({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "cpu", [], id="no-gpu"),
        pytest.param(
            {"TORCH_NCCL_BLOCKING_WAIT": "1"}, "cuda", ["TORCH_NCCL_BLOCKING_WAIT=1"], id="blocking"
        ),
        pytest.param({"TORCH_NCCL_BLOCKING_WAIT": "0"}, "cuda", [], id="not-blocking"),
        pytest.param({"CUDA_LAUNCH_BLOCKING": "1"}, "cuda", ["CUDA_LAUNCH_BLOCKING=1"], id="launch"),
        pytest.param({}, "hip", ["GPU_MAX_HW_QUEUES=4 (the default)"], id="default-queues-alias"),
        pytest.param({"GPU_MAX_HW_QUEUES": "2"}, "hip", ["GPU_MAX_HW_QUEUES=2 (set)"], id="set-too-low"),
        pytest.param(
            {"GPU_MAX_HW_QUEUES": "8", "AMD_SERIALIZE_KERNEL": "3"},
            "hip",
            ["AMD_SERIALIZE_KERNEL=3"],
            id="serialised",
        ),
        pytest.param(
            {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "cpu", ["TORCH_DISTRIBUTED_DEBUG=DETAIL"], id="detail"
        ),
        pytest.param({"TORCH_DISTRIBUTED_DEBUG": "INFO"}, "cpu", [], id="info"),
    ],
)
def test_settings_that_falsify_numbers_are_named(
    environ: dict[str, str], platform: DeviceKind, expected: list[str], no_nccl_file: dict[str, str]
) -> None:
    lines = environment_warnings(no_nccl_file | environ, platform, num_streams=6)
    assert [line.partition(":")[0] for line in lines] == expected
    assert all("\n" not in line for line in lines)


def test_four_streams_fit_the_default_queues(no_nccl_file: dict[str, str]) -> None:
    assert environment_warnings(no_nccl_file, "hip", num_streams=4) == []


def test_versions_and_devices_are_known_without_a_gpu() -> None:
    versions = collect_versions()
    assert versions["aorta"]
    assert versions["python"]
    assert versions["torch"]
    devices = collect_devices()
    assert devices[0]["name"]
    assert devices[0]["memory_bytes"] > 0


def test_a_package_outside_a_checkout_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "__file__", str(tmp_path / "aorta" / "device" / "environment.py"))
    assert module._checkout_commit() is None


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Sep 16 2025",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build",
    ],
)
def test_the_driver_version_is_read_from_the_kernel_module(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_read_text", lambda path: text if "nvidia" in path else "")
    assert module._driver_version() == "580.159.04"


def test_pci_addresses_are_written_as_the_tools_write_them() -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    assert pci_address(properties) == "0000:c1:00"
    assert pci_address(SimpleNamespace()) is None


@pytest.mark.gpu(1)
def test_gpus_say_who_they_are() -> None:
    device = collect_devices()[0]
    assert device["kind"] in ("cuda", "hip")
    assert device["pci_address"]
    assert device["num_compute_units"] > 0
    assert collect_versions()["driver"]


# ---- of the user --------------------------------------------------------------------------------


def test_variables_of_the_user_are_named_without_their_values() -> None:
    found = user_variables(
        {
            "MENDED": "1",
            "DATASET": "/data/a",
            "COPY": "/data/a",
            "OTHER": "/data/b",
            "ACCOUNT": "123456789012",
        }
    )
    assert found["MENDED"] == "1"
    assert found["DATASET"] == found["COPY"] == "#" + hashlib.sha256(b"/data/a").hexdigest()[:4]
    assert found["OTHER"] != found["DATASET"]
    assert found["ACCOUNT"].startswith("#")


@pytest.mark.parametrize(
    "name",
    ["PATH", "SLURM_JOB_ID", "RANK", "_", "GITHUB_RUN_ID", "REDIS_PORT", "AORTA_X", "NCCL_ALGO", "LC_ALL"],
)
def test_variables_of_shells_and_launchers_are_not_the_users(name: str) -> None:
    assert user_variables({name: "1"}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [("HF_TOKEN", "1"), ("DB_PASSWORD", "hunter2"), ("X", "hf_abcdefghijklmnop"), ("Y", "https://a:b@host/")],
)
def test_no_mark_is_left_of_a_secret(name: str, value: str) -> None:
    assert user_variables({name: value}) == {}


@pytest.mark.processes
def test_the_commit_of_the_program_has_a_mark_of_what_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "train.py"
    program.write_text("a\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(program), raising=False)
    assert program_commit() is None
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = program_commit()
    assert clean is not None
    assert len(clean) == 40
    program.write_text("b\n")
    first = program_commit()
    program.write_text("c\n")
    assert first is not None
    assert first.startswith(f"{clean}-dirty-")
    assert program_commit() != first
