"""DataParallel: the module's own results and training, from several devices."""

from __future__ import annotations

import copy
import dataclasses
import io
import threading
from collections import OrderedDict, defaultdict
from typing import NamedTuple

import pytest
import torch
from torch import nn

import devconv
from devconv.parallel import Whole
from tests.parallel.models import MODELS
from tests.zoo import Normed, fill, mlp

PAIR = ["cpu", "cpu"]


class Point(NamedTuple):
    x: object
    y: object


@dataclasses.dataclass
class Answer:
    logits: torch.Tensor
    note: str = "same"


class Echo(nn.Module):
    """Gives its inputs back, beside a parameter that has to be where they are."""

    def __init__(self, make=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.make = make
        self.seen = []

    def forward(self, *args, **kwargs):
        self.seen.append((args, kwargs))
        return self.make(*args, **kwargs) if self.make is not None else (args, kwargs)


def close(left, right):
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def train(model, parameters, device, steps=4):
    """Losses of a few steps on batches of 6, and the parameters after them."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)
        optimizer.zero_grad()
        output = model(x.to(device))
        loss = nn.functional.mse_loss(output, y.to(output.device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("name", ["mlp", "ties", "rnn"])
def test_it_trains_to_the_losses_of_one_device(devices, name):
    single = fill(MODELS[name]())
    expected = train(single, single.parameters(), "cpu")
    module = fill(MODELS[name]())
    devconv.convert(module, devices[0])
    model = devconv.DataParallel(module, devices)

    losses = train(model, module.parameters(), devices[0])

    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)
    for parameter, other in zip(module.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), other.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_uneven_and_tiny_batches_give_the_modules_output(devices, size):
    module = fill(mlp())
    x = torch.randn(size, 4)
    expected = module(x).detach()
    model = devconv.DataParallel(module.to(devices[0]), devices)

    output = model(x)

    assert output.device == torch.device(devices[0])
    close(output.detach().cpu(), expected)


def test_an_empty_batch_runs_once_and_keeps_the_shape():
    model = devconv.DataParallel(mlp(), PAIR)

    assert model(torch.ones(0, 4)).shape == (0, 2)


@pytest.mark.parametrize(("size", "batches"), [(5, [3, 2]), (4, [2, 2]), (1, [1])])
def test_replicas_without_a_batch_are_not_run(size, batches):
    module = Echo(lambda x: x)

    devconv.DataParallel(module, PAIR)(torch.ones(size, 4))

    assert [args[0].shape[0] for args, _ in module.seen] == batches


def test_inputs_may_be_anywhere_and_arrive_with_their_replica(devices):
    module = Echo(lambda x, *, mask: torch.stack([x, mask]).sum(0) * (x.device == mask.device)).to(devices[0])
    model = devconv.DataParallel(module, devices)

    output = model(torch.ones(4, 2, device=devices[-1]), mask=torch.ones(4, 2))

    assert output.cpu().tolist() == [[2.0, 2.0]] * 4
    assert [str(args[0].device) for args, _ in module.seen] == devices


def test_nested_inputs_are_cut_and_everything_else_is_shared():
    module = Echo(lambda *args, **kwargs: args[0])
    token = object()
    inputs = {"list": [torch.arange(4), "text"], "point": Point(torch.arange(4) * 10, None), "token": token}

    devconv.DataParallel(module, PAIR)(torch.arange(4), inputs, answer=Answer(torch.arange(4)))

    for ((x, nested), kwargs), half in zip(module.seen, ([0, 1], [2, 3]), strict=True):
        assert x.tolist() == half
        assert nested["list"][0].tolist() == half
        assert nested["list"][1] == "text"
        assert type(nested["point"]) is Point
        assert nested["point"].x.tolist() == [10 * i for i in half]
        assert nested["token"] is token
        assert kwargs["answer"].logits.tolist() == half


def test_the_callers_containers_are_not_changed():
    batch = {"x": torch.arange(4)}
    tensor = batch["x"]

    devconv.DataParallel(Echo(lambda batch: batch["x"]), PAIR)(batch)

    assert batch == {"x": tensor}
    assert batch["x"] is tensor


def test_mappings_keep_their_kind():
    inputs = defaultdict(list, a=torch.arange(4))
    module = Echo(lambda d: OrderedDict(b=d["a"]))

    output = devconv.DataParallel(module, PAIR)(inputs)

    assert type(module.seen[0][0][0]) is defaultdict
    assert module.seen[0][0][0].default_factory is list
    assert type(output) is OrderedDict
    assert output["b"].tolist() == [0, 1, 2, 3]


def test_a_tensor_without_dimensions_goes_to_every_replica():
    module = Echo(lambda x, scale: x * scale)

    output = devconv.DataParallel(module, PAIR)(torch.ones(4), torch.tensor(3.0))

    assert output.tolist() == [3.0] * 4


def test_a_whole_argument_goes_to_every_replica_on_its_device(devices):
    module = Echo(lambda x, table: x + table["t"].sum()).to(devices[0])

    output = devconv.DataParallel(module, devices)(torch.ones(8), Whole({"t": torch.ones(5)}))

    assert output.cpu().tolist() == [6.0] * 8


def test_without_a_tensor_the_module_runs_once():
    module = Echo(lambda n=2: torch.ones(n))
    model = devconv.DataParallel(module, PAIR)

    assert model().shape == (2,)
    assert model(3).shape == (3,)
    assert len(module.seen) == 2


def test_tensors_of_different_batch_sizes_are_refused_by_name():
    model = devconv.DataParallel(Echo(), PAIR)

    with pytest.raises(
        devconv.BatchError, match=r"argument 'mask': it has size 1 in dimension 0, while argument 0 has 4"
    ):
        model(torch.ones(4, 2), mask=torch.ones(1, 2))


def test_a_tensor_without_the_batch_dimension_is_refused_by_name():
    model = devconv.DataParallel(Echo(), PAIR, dim=1)

    with pytest.raises(devconv.BatchError, match=r"argument 0\['x'\]: it has shape \(4,\), and no dimension 1"):
        model({"x": torch.ones(4)})


def test_a_packed_sequence_is_refused_with_the_cure():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])

    with pytest.raises(devconv.BatchError, match="pack inside the module's forward"):
        devconv.DataParallel(Echo(), PAIR)(packed)


def test_nested_outputs_are_put_together():
    def make(x):
        return {"x": x, "pair": (x + 1, [None, "fixed", 7]), "point": Point(x, x * 2), "answer": Answer(x.unsqueeze(1))}

    output = devconv.DataParallel(Echo(make), PAIR)(torch.arange(5))

    assert output["x"].tolist() == [0, 1, 2, 3, 4]
    assert output["pair"][0].tolist() == [1, 2, 3, 4, 5]
    assert output["pair"][1] == [None, "fixed", 7]
    assert output["point"].y.tolist() == [0, 2, 4, 6, 8]
    assert type(output["answer"]) is Answer
    assert output["answer"].logits.shape == (5, 1)


def test_scalars_become_a_vector_with_one_element_a_replica(devices):
    module = Echo(lambda x: x.sum()).to(devices[0])

    output = devconv.DataParallel(module, devices)(torch.ones(2 * len(devices)))

    assert output.cpu().tolist() == [2.0] * len(devices)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: {"n": x.shape[0]}, r"output\['n'\]: the replicas returned different values.*3, 2"),
        (lambda x: [x] * x.shape[0], r"output: one replica returned list with 3 parts.*another list with 2 parts"),
        (lambda x: x if x.shape[0] == 3 else None, "output: one replica returned a tensor, another NoneType"),
        (
            lambda x: (torch.ones(2, x.shape[0] * 2),),
            r"output\[0\]: tensors of shapes \(2, 6\), \(2, 4\) cannot be joined",
        ),
    ],
    ids=["values", "lengths", "kinds", "shapes"],
)
def test_outputs_that_do_not_fit_together_are_refused_by_name(make, message):
    with pytest.raises(devconv.GatherError, match=message):
        devconv.DataParallel(Echo(make), PAIR)(torch.ones(5))


class CustomError(Exception):
    """Takes two arguments, and shows neither as it is."""

    def __init__(self, code, detail):
        super().__init__(code, detail)

    def __str__(self):
        return f"custom {self.args}"


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    "error", [ValueError("broken"), KeyError("broken"), CustomError(1, "broken"), RuntimeError()], ids=repr
)
def test_an_error_keeps_its_type_and_says_which_replica_it_was(error, threads):
    def fail(x):
        if x[0] == 2:
            raise error
        return x

    with pytest.raises(type(error)) as caught:
        devconv.DataParallel(Echo(fail), PAIR, threads=threads)(torch.arange(4))

    text = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
    assert caught.value is error
    assert "[in replica 1 of 2, on cpu]" in text


def test_an_error_on_another_device_names_that_device(devices):
    def fail(x):
        if str(x.device) == devices[-1]:
            raise ValueError("broken")
        return x

    module = Echo(fail).to(devices[0])
    if len(set(devices)) == 1:
        pytest.skip("the list names one device twice")

    with pytest.raises(
        ValueError, match=rf"broken \[in replica {len(devices) - 1} of {len(devices)}, on {devices[-1]}\]"
    ):
        devconv.DataParallel(module, devices)(torch.ones(len(devices)))


def test_it_works_after_an_error():
    module = Echo(lambda x: x if x.sum() else 1 / 0)
    model = devconv.DataParallel(module, PAIR)
    with pytest.raises(ZeroDivisionError):
        model(torch.zeros(4))

    assert model(torch.ones(4)).tolist() == [1.0] * 4


def test_gradients_reach_inputs_that_require_them(devices):
    module = fill(mlp())
    x = torch.randn(5, 4)
    expected = x.clone().requires_grad_()
    module(expected).square().sum().backward()
    model = devconv.DataParallel(module.to(devices[0]), devices)
    given = x.clone().requires_grad_()

    model(given).square().sum().backward()

    close(given.grad, expected.grad)


def test_a_gradient_penalty_trains_through_it():
    def penalised(make):
        module = fill(mlp()).double()
        x = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
        (slope,) = torch.autograd.grad(make(module)(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    close(penalised(lambda module: devconv.DataParallel(module, PAIR)), penalised(lambda module: module))


def test_without_gradients_nothing_is_recorded(devices):
    model = devconv.DataParallel(fill(mlp()).to(devices[0]), devices)

    with torch.no_grad():
        assert not model(torch.ones(4, 4)).requires_grad
    with torch.inference_mode():
        assert model(torch.ones(4, 4)).is_inference()


def test_autocast_reaches_the_replicas():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = devconv.DataParallel(mlp(), PAIR)(torch.ones(4, 4))

    assert output.dtype is torch.bfloat16


def test_outputs_arrive_on_the_output_device(devices):
    model = devconv.DataParallel(fill(mlp()).to(devices[0]), devices, output_device=devices[-1])

    assert model(torch.ones(5, 4)).device == torch.device(devices[-1])


def test_batches_are_cut_and_joined_along_the_given_dimension():
    module = Echo(lambda x: x * 2)

    output = devconv.DataParallel(module, PAIR, dim=1)(torch.ones(3, 5))

    assert [args[0].shape for args, _ in module.seen] == [(3, 3), (3, 2)]
    assert output.shape == (3, 5)


def test_on_one_device_the_module_itself_runs():
    module = Echo(lambda x: (x.sum(), x))
    model = devconv.DataParallel(module, ["cpu"])

    total, x = model(torch.ones(4))

    assert total.dim() == 0
    assert x.shape == (4,)


def test_without_devices_it_takes_all_of_the_modules_type():
    assert devconv.DataParallel(mlp()).devices == (torch.device("cpu"),)


@pytest.mark.needs("xla", 4)
def test_without_devices_an_xla_module_takes_every_xla_device():
    assert [str(device) for device in devconv.DataParallel(mlp().to("xla:0")).devices] == [f"xla:{i}" for i in range(4)]


def test_batch_norm_keeps_the_statistics_of_the_first_batch(devices):
    # On the same device: XLA's own BatchNorm does not correct the variance for the size of the batch.
    single = fill(Normed()).train().to(devices[0])
    x = torch.randn(4 * len(devices), 4)
    single(x[:4].to(devices[0]))
    module = fill(Normed()).train().to(devices[0])

    devconv.DataParallel(module, devices)(x)

    close(module.norm.running_var.cpu(), single.norm.running_var.cpu())


def test_train_and_eval_reach_the_replicas():
    class Mode(nn.Linear):
        def forward(self, x):
            return torch.full((len(x),), float(self.training))

    model = devconv.DataParallel(Mode(4, 4), PAIR)

    assert model.train()(torch.ones(4, 4)).tolist() == [1.0] * 4
    assert model.eval()(torch.ones(4, 4)).tolist() == [0.0] * 4


@pytest.mark.parametrize("keep_prefix", [True, False])
def test_the_state_dict_has_the_prefix_that_was_asked_for(keep_prefix):
    model = devconv.DataParallel(Normed(), PAIR, keep_prefix=keep_prefix)

    names = [f"module.{name}" if keep_prefix else name for name in model.module.state_dict()]

    assert list(model.state_dict()) == names
    assert list(nn.ModuleDict({"outer": model}).state_dict()) == [f"outer.{name}" for name in names]


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("keep_prefix", [True, False])
@pytest.mark.parametrize("outer", [False, True])
def test_checkpoints_with_and_without_the_prefix_are_loaded(saved, keep_prefix, outer):
    def wrap(model):
        return nn.ModuleDict({"outer": model}) if outer else model

    source = devconv.DataParallel(fill(Normed(), seed=1), PAIR, keep_prefix=saved)
    target = devconv.DataParallel(fill(Normed(), seed=2), PAIR, keep_prefix=keep_prefix)

    wrap(target).load_state_dict(wrap(source).state_dict())

    for name, tensor in source.module.state_dict().items():
        assert torch.equal(target.module.state_dict()[name], tensor), name


def test_a_checkpoint_of_torchs_own_data_parallel_is_loaded():
    stock = nn.DataParallel(fill(Normed(), seed=1))
    model = devconv.DataParallel(fill(Normed(), seed=2), PAIR)

    model.load_state_dict(stock.state_dict())
    stock.load_state_dict(model.state_dict())

    assert torch.equal(model.module.first.weight, stock.module.first.weight)


def test_a_missing_name_is_still_an_error():
    model = devconv.DataParallel(mlp(), PAIR)
    state = model.state_dict()
    del state["module.0.weight"]

    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        model.load_state_dict(state)


def test_a_module_with_a_child_named_module_keeps_its_names():
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(4, 4)

    for keep_prefix in (True, False):
        source = devconv.DataParallel(fill(Inner(), seed=1), PAIR, keep_prefix=keep_prefix)
        target = devconv.DataParallel(fill(Inner(), seed=2), PAIR)
        target.load_state_dict(source.state_dict())
        assert torch.equal(target.module.module.weight, source.module.module.weight)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda m: torch.load(saved(m), weights_only=False)], ids=["deepcopy", "pickle"]
)
def test_a_copy_has_replicas_of_its_own(clone):
    model = devconv.DataParallel(fill(mlp()), PAIR)
    before = model(torch.ones(4, 4))

    twin = clone(model)
    with torch.no_grad():
        twin.module[2].bias.add_(1)

    close(twin(torch.ones(4, 4)), before + 1)
    close(model(torch.ones(4, 4)), before)
    twin.load_state_dict(model.state_dict())


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_another_module_can_be_put_in():
    model = devconv.DataParallel(fill(mlp(), seed=1), PAIR)
    model(torch.ones(4, 4))

    model.module = other = fill(mlp(), seed=2)

    close(model(torch.ones(4, 4)), other(torch.ones(4, 4)))


def test_replicas_are_used_again_from_step_to_step():
    class Recording(nn.Linear):
        def forward(self, x):
            seen.add(id(self))
            return super().forward(x)

    seen = set()
    model = devconv.DataParallel(Recording(4, 4), PAIR)

    for _ in range(5):
        model(torch.ones(4, 4)).sum().backward()

    assert len(seen) == 2


def test_no_replica_holds_a_tensor_after_the_forward():
    module = fill(mlp())
    model = devconv.DataParallel(module, PAIR)

    output = model(torch.ones(4, 4))
    del output

    assert module[0].weight._use_count() == 1


def test_a_device_without_index_means_the_replicas_device_inside_forward(devices):
    class Making(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.ones(2, device=x.device.type)

    model = devconv.DataParallel(fill(Making(4, 2)).to(devices[0]), devices)

    assert model(torch.ones(len(devices), 4)).cpu().shape == (len(devices), 2)


def test_threads_run_at_the_same_time_with_the_callers_modes():
    barrier = threading.Barrier(2, timeout=60)

    def meet(x):
        barrier.wait()
        return torch.full((len(x),), float(torch.is_grad_enabled())), (x @ x.T).float() * (
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        )

    model = devconv.DataParallel(Echo(meet), PAIR, threads=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        modes, product = model(torch.ones(4, 2))

    assert modes.tolist() == [0.0] * 4
    assert product.sum() > 0


def test_threads_train_to_the_losses_of_one_device():
    single = fill(mlp())
    expected = train(single, single.parameters(), "cpu")
    module = fill(mlp())

    losses = train(devconv.DataParallel(module, PAIR, threads=True), module.parameters(), "cpu")

    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.needs("xla", 2)
def test_threads_are_refused_where_a_device_cannot_take_them():
    model = devconv.DataParallel(mlp().to("xla:0"), ["xla:0", "xla:1"], threads=True)

    with pytest.raises(devconv.ReplicationRefused, match=r"xla:0.*threads=False"):
        model(torch.ones(4, 4))


def test_two_threads_may_use_one_model():
    module = fill(mlp()).eval()
    model = devconv.DataParallel(module, PAIR)
    x = torch.randn(6, 4)
    expected, results = module(x), []

    def work():
        results.extend(model(x) for _ in range(20))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)

    assert len(results) == 60
    for result in results:
        close(result, expected)


def test_it_says_its_devices_when_printed():
    assert "devices=['cpu', 'cpu'], output_device='cpu'" in repr(devconv.DataParallel(mlp(), PAIR))


@pytest.mark.lane("xla")
def test_a_hugging_face_output_is_put_together():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    model = devconv.DataParallel(
        Echo(lambda x: outputs.MaskedLMOutput(logits=x.unsqueeze(1), hidden_states=(x, x))), PAIR
    )
    output = model(torch.arange(5))

    assert type(output) is outputs.MaskedLMOutput
    assert output.logits.shape == (5, 1)
    assert output.hidden_states[1].tolist() == [0, 1, 2, 3, 4]
