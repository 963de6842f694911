"""What used to end the process on XLA, each in a process of its own: it ends with an error, or works."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.needs("xla", 4), pytest.mark.timeout(900)]

PRELUDE = """
import torch
from torch import nn
import devconv

DEVICES = [f"xla:{i}" for i in range(4)]
"""


def run(code, timeout=600):
    """Exit status and output of a fresh interpreter; a negative status is the signal that ended it."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_inputs_on_the_wrong_devices_are_moved_and_nothing_aborts():
    status, output = run(
        """
        model = devconv.DataParallel(nn.Linear(4, 2).to("xla:0"), DEVICES)
        for device in ("cpu", "xla:2"):
            y = model(torch.ones(6, 4, device=device))
            assert y.device == torch.device("xla:0") and y.shape == (6, 2), y
            print(y.sum().item())
        print("alive")
        """
    )

    assert (status, output.strip().splitlines()[-1]) == (0, "alive"), output


def test_a_half_moved_module_is_an_error_and_not_an_abort():
    status, output = run(
        """
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to("xla:0")
        model[1].weight = nn.Parameter(model[1].weight.detach().cpu().to("xla:1"))
        try:
            devconv.DataParallel(model, DEVICES)(torch.ones(8, 4))
        except devconv.ReplicationRefused as error:
            print(error.reasons[0].name, error.reasons[0].device)
        """
    )

    assert (status, output.strip().splitlines()[-1]) == (0, "1.weight xla:1"), output


def test_a_plain_list_and_a_bare_device_name_inside_forward_do_not_abort():
    status, output = run(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first = nn.Linear(4, 4)
                self.steps = [self.first]
                self.scale = torch.full((4,), 2.0)

            def forward(self, x):
                return self.steps[0](x) * self.scale + torch.ones(4, device="xla")

        model = Model().to("xla:0")
        model.scale = model.scale.to("xla:0")
        y = devconv.DataParallel(model, DEVICES)(torch.ones(8, 4))
        y.sum().backward()
        print(y.shape[0], model.first.weight.grad.sum().item() != 0)
        """
    )

    assert (status, output.strip().splitlines()[-1]) == (0, "8 True"), output


def test_a_model_that_moves_to_another_device_between_steps_does_not_abort():
    status, output = run(
        """
        model = nn.Linear(4, 2).to("xla:0")
        parallel = devconv.DataParallel(model, DEVICES)
        parallel(torch.ones(8, 4)).sum().item()
        devconv.convert(model, "xla:1")
        try:
            parallel(torch.ones(8, 4))
        except devconv.ReplicationRefused as error:
            print(error.reasons[0].cure)
        """
    )

    assert status == 0, output
    assert "name xla:1 first in devices" in output


def test_it_trains_after_a_backward_that_came_before_the_runtime():
    status, output = run(
        """
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        model = nn.Linear(4, 2)
        devconv.convert(model, "xla:0")
        devconv.DataParallel(model, DEVICES)(torch.ones(8, 4)).sum().backward()
        print(model.bias.grad.tolist())
        """
    )

    assert (status, output.strip().splitlines()[-1]) == (0, "[8.0, 8.0]"), output


def test_replicas_made_before_any_xla_tensor_train():
    status, output = run(
        """
        model = nn.Linear(4, 2)
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        replicas = devconv.replicate(model, ["cpu", *DEVICES[:2]])
        outputs = [replica(torch.ones(3, 4, device=p.device)).sum().cpu() for replica, p in
                   zip(replicas, [next(r.parameters()) for r in replicas])]
        sum(outputs).backward()
        print(model.bias.grad.tolist())
        """
    )

    assert (status, output.strip().splitlines()[-1]) == (0, "[9.0, 9.0]"), output
