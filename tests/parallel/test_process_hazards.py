"""What used to end the process on XLA, in processes of their own: it ends with an error, or works."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = [pytest.mark.needs("xla", 4), pytest.mark.timeout(300)]

PRELUDE = """
import torch
from torch import nn
import devconv

DEVICES = [f"xla:{i}" for i in range(4)]

def say(name, *facts):
    print(name, *facts, flush=True)
"""


def run(code):
    """Exit status of a fresh interpreter (negative: the signal that ended it), what it said, and its errors."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4"},
        check=False,
    )
    said = dict(line.partition(" ")[::2] for line in done.stdout.splitlines())
    return done.returncode, said, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.fixture(scope="module")
def hazards():
    """One process that goes through four of them: starting torch_xla takes longer than all that it does then."""
    return run(
        """
        devconv.prepare("xla:0")
        model = devconv.DataParallel(nn.Linear(4, 2).to("xla:0"), DEVICES)
        outputs = [model(torch.ones(6, 4, device=device)) for device in ("cpu", "xla:2")]
        say("wrong-inputs", [str(y.device) for y in outputs], [tuple(y.shape) for y in outputs],
            torch.equal(outputs[0].cpu(), outputs[1].cpu()))

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to("xla:0")
        model[1].weight = nn.Parameter(model[1].weight.detach().cpu().to("xla:1"))
        try:
            devconv.DataParallel(model, DEVICES)(torch.ones(8, 4))
        except devconv.ReplicationRefused as error:
            say("half-moved", error.reasons[0].name, error.reasons[0].device)

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
        say("plain-list", y.shape[0], model.first.bias.grad.tolist())

        model = nn.Linear(4, 2).to("xla:0")
        parallel = devconv.DataParallel(model, DEVICES)
        parallel(torch.ones(8, 4)).sum().item()
        devconv.convert(model, "xla:1")
        try:
            parallel(torch.ones(8, 4))
        except devconv.ReplicationRefused as error:
            say("moved", error.reasons[0].cure)
        say("alive")
        """
    )


def test_the_process_that_went_through_them_ends_well(hazards):
    status, said, output = hazards

    assert "alive" in said, output
    assert status == 0, output


def test_inputs_on_the_wrong_devices_are_moved(hazards):
    _, said, output = hazards

    assert said.get("wrong-inputs") == "['xla:0', 'xla:0'] [(6, 2), (6, 2)] True", output


def test_a_half_moved_module_is_an_error(hazards):
    _, said, output = hazards

    assert said.get("half-moved") == "1.weight xla:1", output


def test_a_plain_list_and_a_bare_device_name_inside_forward_work(hazards):
    _, said, output = hazards

    assert said.get("plain-list") == "8 [16.0, 16.0, 16.0, 16.0]", output


def test_a_model_that_moves_to_another_device_between_steps_is_an_error(hazards):
    _, said, output = hazards

    assert "name xla:1 first in devices" in said.get("moved", ""), output


def test_it_trains_after_a_backward_that_came_before_the_runtime():
    status, said, output = run(
        """
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        model = nn.Linear(4, 2)
        devconv.convert(model, "xla:0")
        devconv.DataParallel(model, DEVICES)(torch.ones(8, 4)).sum().backward()
        say("grad", model.bias.grad.tolist())
        """
    )

    assert (status, said.get("grad")) == (0, "[8.0, 8.0]"), output


def test_replicas_made_before_any_xla_tensor_train():
    status, said, output = run(
        """
        model = nn.Linear(4, 2)
        nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()
        replicas = devconv.replicate(model, ["cpu", *DEVICES[:2]])
        outputs = [replica(torch.ones(3, 4, device=p.device)).sum().cpu() for replica, p in
                   zip(replicas, [next(r.parameters()) for r in replicas])]
        sum(outputs).backward()
        say("grad", model.bias.grad.tolist())
        """
    )

    assert (status, said.get("grad")) == (0, "[9.0, 9.0]"), output
