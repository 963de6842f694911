"""Which backend serves which device: registration, entry points of installed distributions, and what goes wrong."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import devconv
from devconv import Backend, registry

pytestmark = pytest.mark.lane("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A registry that has seen nothing yet; the process's own comes back afterwards."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_discovered", None)
    monkeypatch.setattr(registry, "_defaults", {})


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Install a distribution as pip would leave it: its module, and metadata with an entry point."""

    def put(name, source, device_type="acme", attribute="Acme"):
        folder = tmp_path / name
        module = f"{name}_module"
        info = folder / f"{name}-1.5.dist-info"
        info.mkdir(parents=True)
        (folder / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        (info / "entry_points.txt").write_text(f"[devconv.backends]\n{device_type} = {module}:{attribute}\n")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, module, raising=False)
        return module

    return put


GOOD = """
import devconv
class Acme(devconv.Backend):
    device_type = "acme"
"""


class Acme(Backend):
    device_type = "acme"


class Other(Backend):
    device_type = "acme"


def test_registered_backend_serves_its_type():
    devconv.register(Acme)
    assert type(devconv.backend_for("acme")) is Acme


def test_registered_instance_is_used_as_it_is():
    backend = Acme()
    devconv.register(backend)
    assert devconv.backend_for("acme") is backend


def test_backend_is_made_once():
    devconv.register(Acme)
    assert devconv.backend_for("acme") is devconv.backend_for("acme")


def test_registering_loads_nothing():
    class Loud(Acme):
        def load(self):
            raise AssertionError

    devconv.register(Loud)
    assert [entry.backend for entry in devconv.registrations() if entry.device_type == "acme"] == [None]


def test_second_registration_of_a_type_is_an_error_and_changes_nothing():
    devconv.register(Acme)
    with pytest.raises(devconv.DuplicateBackendError, match=r"Acme.*Other") as caught:
        devconv.register(Other)
    assert caught.value.device_type == "acme"
    assert type(devconv.backend_for("acme")) is Acme


def test_replace_takes_the_place_of_an_earlier_registration():
    devconv.register(Acme)
    devconv.backend_for("acme")
    devconv.register(Other, replace=True)
    assert type(devconv.backend_for("acme")) is Other


def test_unregistered_type_is_unknown_again():
    devconv.register(Acme)
    devconv.unregister("acme")
    with pytest.raises(devconv.UnknownDeviceError):
        devconv.backend_for("acme")


def test_unregistering_what_was_not_registered_is_an_error():
    with pytest.raises(devconv.UnknownDeviceError, match="cpu"):
        devconv.unregister("cpu")


@pytest.mark.parametrize(
    "value", [object, object(), "acme", None, 3], ids=["class", "object", "name", "none", "number"]
)
def test_only_backends_can_be_registered(value):
    with pytest.raises(TypeError, match=r"devconv\.Backend"):
        devconv.register(value)


def test_backend_without_a_device_type_cannot_be_registered():
    class Nameless(Backend):
        pass

    with pytest.raises(TypeError, match="device_type"):
        devconv.register(Nameless)


def test_installed_backend_is_found_by_its_entry_point(install):
    module = install("vendor", GOOD)
    assert "acme" in devconv.known()
    assert type(devconv.backend_for("acme")).__module__ == module


def test_listing_imports_no_backend(install):
    module = install("vendor", GOOD)
    (entry,) = [entry for entry in devconv.registrations() if entry.device_type == "acme"]
    assert entry.origin == "vendor 1.5"
    assert module not in sys.modules


def test_registration_beats_an_installed_backend(install):
    module = install("vendor", GOOD)
    devconv.register(Acme)
    assert type(devconv.backend_for("acme")) is Acme
    assert module not in sys.modules


def test_installed_backend_counts_again_after_unregister(install):
    module = install("vendor", GOOD)
    devconv.register(Acme)
    devconv.unregister("acme")
    assert type(devconv.backend_for("acme")).__module__ == module


def test_two_distributions_that_claim_a_type_are_both_named(install):
    install("first_vendor", GOOD)
    install("second_vendor", GOOD)
    with pytest.raises(devconv.DuplicateBackendError) as caught:
        devconv.backend_for("acme")
    assert {caught.value.first, caught.value.second} == {"first_vendor 1.5", "second_vendor 1.5"}


def test_registration_settles_a_claim_of_two_distributions(install):
    install("first_vendor", GOOD)
    install("second_vendor", GOOD)
    devconv.register(Acme)
    assert type(devconv.backend_for("acme")) is Acme


def test_a_distribution_seen_twice_claims_once(install, monkeypatch, tmp_path):
    install("vendor", GOOD)
    copy = tmp_path / "again" / "vendor-1.5.dist-info"
    copy.mkdir(parents=True)
    for file in (tmp_path / "vendor" / "vendor-1.5.dist-info").iterdir():
        (copy / file.name).write_text(file.read_text())
    monkeypatch.syspath_prepend(str(copy.parent))
    assert devconv.backend_for("acme").device_type == "acme"


BROKEN = {
    "import fails": ("import nothing_of_that_name", "ModuleNotFoundError"),
    "module raises": ("1 / 0", "ZeroDivisionError"),
    "no such attribute": ("Else = 1", "Acme"),
    "no Backend": ("class Acme: device_type = 'acme'", "not a devconv.Backend"),
    "other device type": (GOOD.replace('"acme"', '"emca"'), "it serves 'emca', its entry point says 'acme'"),
    "newer contract": (GOOD + "    api_version = 99\n", "version 99"),
    "contract too old": (GOOD + "    api_version = 0\n", "version 0"),
    "load raises": (GOOD + "    def load(self): raise ImportError('driver 7 is missing')\n", "driver 7 is missing"),
    "load ends the program": (GOOD + "    def load(self): raise SystemExit(3)\n", "SystemExit"),
    "prepare raises": (GOOD + "    def prepare(self): raise OSError('no runtime')\n", "no runtime"),
}


@pytest.mark.parametrize(("source", "cause"), BROKEN.values(), ids=BROKEN)
def test_broken_backend_is_an_error_with_distribution_cause_and_cure(install, source, cause):
    install("vendor", source)
    with pytest.raises(devconv.BackendLoadError) as caught:
        devconv.backend_for("acme")
    assert caught.value.distribution == "vendor 1.5"
    assert cause in caught.value.cause
    assert caught.value.cure in str(caught.value)


@pytest.mark.parametrize(("source", "cause"), BROKEN.values(), ids=BROKEN)
def test_broken_backend_breaks_its_own_device_only(install, source, cause):
    install("vendor", source)
    with pytest.raises(devconv.BackendLoadError, match="acme"):
        devconv.resolve("acme")
    assert devconv.resolve("cpu")[0] == torch.device("cpu")
    assert devconv.resolve("meta")[0] == torch.device("meta")


def test_broken_backend_fails_alike_each_time_with_a_traceback_of_one_call(install):
    install("vendor", "import nothing_of_that_name")
    depths = []
    for _ in range(3):
        with pytest.raises(devconv.BackendLoadError) as caught:
            devconv.backend_for("acme")
        depths.append(len(caught.traceback))
    assert depths[1] == depths[2]


def test_missing_hardware_is_looked_for_again():
    class Plugged(Acme):
        there = False

        def load(self):
            if not self.there:
                raise devconv.UnavailableDeviceError("acme", "it is not plugged in", "Plug it in.")

    devconv.register(Plugged)
    with pytest.raises(devconv.UnavailableDeviceError, match="Plug it in"):
        devconv.backend_for("acme")
    Plugged.there = True
    assert devconv.backend_for("acme").there


def test_failed_backend_says_so_in_the_listing(install):
    install("vendor", "1 / 0")
    with pytest.raises(devconv.BackendLoadError):
        devconv.backend_for("acme")
    (entry,) = [entry for entry in devconv.registrations() if entry.device_type == "acme"]
    assert isinstance(entry.error, devconv.BackendLoadError)
    assert entry.backend is None


def test_interrupt_while_loading_is_not_remembered():
    class Slow(Acme):
        interrupted = False

        def load(self):
            if not Slow.interrupted:
                Slow.interrupted = True
                raise KeyboardInterrupt

    devconv.register(Slow)
    with pytest.raises(KeyboardInterrupt):
        devconv.backend_for("acme")
    assert type(devconv.backend_for("acme")) is Slow


def test_threads_that_ask_at_once_get_one_backend():
    made, start = [], threading.Barrier(8)

    class Slow(Acme):
        def load(self):
            made.append(self)
            time.sleep(0.05)

    devconv.register(Slow)

    def ask(_):
        start.wait(timeout=30)
        return devconv.backend_for("acme")

    with ThreadPoolExecutor(8) as pool:
        backends = list(pool.map(ask, range(8)))
    assert len(made) == 1
    assert {id(backend) for backend in backends} == {id(made[0])}


def test_threads_that_discover_at_once_see_one_registration(install):
    install("vendor", GOOD)
    start = threading.Barrier(8)

    def ask(_):
        start.wait(timeout=30)
        return next(entry for entry in devconv.registrations() if entry.device_type == "acme")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len({id(entry) for entry in found}) == 1


def test_threads_that_load_two_backends_do_not_wait_for_each_other():
    class Waiting(Backend):
        device_type = "acme"
        other = threading.Event()

        def load(self):
            assert self.other.wait(timeout=30)

    class Second(Backend):
        device_type = "emca"

        def load(self):
            Waiting.other.set()

    devconv.register(Waiting)
    devconv.register(Second)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(devconv.backend_for, "acme")
        second = pool.submit(devconv.backend_for, "emca")
        assert (first.result(timeout=60).device_type, second.result(timeout=60).device_type) == ("acme", "emca")


@pytest.mark.parametrize("device_type", ["vulkan", "lazy", "hpu"])
def test_type_that_torch_knows_gets_the_defaults_and_a_log_line(device_type, caplog):
    with caplog.at_level(logging.INFO, logger="devconv"):
        backend = devconv.backend_for(device_type)
    assert backend.device_type == device_type
    assert [record.name for record in caplog.records] == ["devconv"]
    assert device_type in caplog.text


def test_defaults_are_announced_once(caplog):
    with caplog.at_level(logging.INFO, logger="devconv"):
        first, second = devconv.backend_for("vulkan"), devconv.backend_for("vulkan")
    assert first is second
    assert len(caplog.records) == 1


def test_defaults_give_way_to_a_registration():
    devconv.backend_for("vulkan")

    class Vulkan(Backend):
        device_type = "vulkan"

    devconv.register(Vulkan)
    assert type(devconv.backend_for("vulkan")) is Vulkan


DEVICES = [
    ("cpu", torch.device("cpu")),
    ("cpu:0", torch.device("cpu")),
    ("meta", torch.device("meta")),
    ("meta:0", torch.device("meta")),
    (torch.device("cpu"), torch.device("cpu")),
    (torch.device("cpu", 0), torch.device("cpu")),
]


@pytest.mark.parametrize(("device", "expected"), DEVICES, ids=repr)
def test_resolved_device_is_the_one_that_tensors_report(device, expected):
    resolved, backend = devconv.resolve(device)
    assert resolved == expected == torch.empty(0, device=resolved).device
    assert backend.device_type == expected.type


@pytest.mark.parametrize("device", ["banana", "banana:1", "CPU", "cuda0"])
def test_name_that_nobody_serves_is_unknown_and_lists_what_is(device):
    with pytest.raises(devconv.UnknownDeviceError, match="cpu, cuda"):
        devconv.resolve(device)


@pytest.mark.parametrize("device", ["", "cpu:banana", "cpu:-1", "cpu:1", "meta:2", "3.5", " cpu", "cpu:0:0"])
def test_string_that_is_no_device_is_invalid(device):
    with pytest.raises(devconv.InvalidDeviceError) as caught:
        devconv.resolve(device)
    assert repr(device) in str(caught.value)


@pytest.mark.parametrize("device", [3.5, None, True, False, [], b"cpu", torch.float32, object], ids=repr)
def test_value_of_another_type_is_invalid_and_named(device):
    with pytest.raises(devconv.InvalidDeviceError, match=type(device).__name__):
        devconv.resolve(device)


def test_string_loads_its_backend_before_torch_reads_it():
    class Renamer(Backend):
        device_type = "acme"
        loaded = False

        def load(self):
            Renamer.loaded = True

    devconv.register(Renamer)
    # This torch does not know the name; a vendor's library would have taught it the name in load().
    with pytest.raises(devconv.InvalidDeviceError):
        devconv.resolve("acme:0")
    assert Renamer.loaded


def test_type_with_an_index_is_no_type():
    with pytest.raises(devconv.UnknownDeviceError, match="cpu:0"):
        devconv.backend_for("cpu:0")


def test_known_types_of_the_installed_distribution_are_listed():
    assert {"cpu", "cuda", "meta", "xla"} <= set(devconv.known())


def test_listing_in_a_new_process_imports_no_backend_and_no_vendor():
    code = (
        "import sys, devconv; names = devconv.known(); "
        "print([m for m in sys.modules if m.startswith(('devconv_', 'torch_xla'))], len(names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["[]", str(len(devconv.known()))]
