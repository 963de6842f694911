"""Switches off one mechanism at a time and shows which tests notice.

Each mutation replaces a piece of the source that keeps a promise, in a copy of the repository, and runs the tests that
the promise is held by; without a mutation they must pass. A mutation that no test notices has survived, and fails the run:
either the test is missing, or the mechanism is not needed. ``python ci/mutants.py [LANE] [WORD...]`` runs those of a
lane whose mechanism contains one of the words.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("devconv", "backends", "tests", "ci", "docs", "pyproject.toml", "README.md", "noxfile.py")


@dataclass(frozen=True)
class Mutation:
    """One mechanism, and how to switch it off.

    Attributes:
        mechanism: what is switched off.
        file: where it is, from the root of the repository.
        old: a piece of the source that stands there exactly once.
        new: what takes its place.
        tests: arguments for pytest: the tests that must notice.
        lane: the lane that runs them.
    """

    mechanism: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    lane: str = "cpu"


def _in(*names: str, k: str = "") -> tuple[str, ...]:
    """Test files of tests/invariants, narrowed by an expression."""
    files = tuple(f"tests/invariants/test_{name}.py" for name in names)
    return (*files, "-k", k) if k else files


_FAULTS = "tests/test_all_or_nothing.py"

MUTATIONS = (
    # -- the walk
    Mutation(
        "ties: a parameter met again is the one met before",
        "devconv/survey.py",
        "                    _again(entry, Slot(home, table, key), is_parameter, inside)\n",
        "                    pass\n",
        _in("ties", k="flag"),
    ),
    Mutation(
        "gradients are found",
        "devconv/survey.py",
        "    if is_parameter:\n        if entry.kind is not Kind.LAZY and tensor.grad is not None:",
        "    if is_parameter:\n        if False:",
        _in("grads", k="flag"),
    ),
    Mutation(
        "a buffer that requires a gradient is treated as a parameter",
        "devconv/survey.py",
        "        _learned(inventory, entry)\n    else:",
        "        entry.parameter = False\n    else:",
        _in("requires_grad", k="flag"),
    ),
    Mutation(
        "view groups are found",
        "devconv/survey.py",
        "    if len(set(storages)) == len(storages):\n        return",
        "    return",
        _in("views", k="flag"),
    ),
    Mutation(
        "classes that convert themselves are asked",
        "devconv/survey.py",
        "return Kind.CUSTOM if internals.converts_itself(cls) else Kind.PLAIN",
        "return Kind.PLAIN",
        _in("own_conversions", k="flag"),
    ),
    Mutation(
        "wrapper subclasses are swapped whole",
        "devconv/survey.py",
        "return Kind.PLAIN if own else Kind.WRAPPER",
        "return Kind.PLAIN",
        _in("wrapper_subclasses", k="flag"),
    ),
    Mutation(
        "lazy tensors are recognised",
        "devconv/survey.py",
        "        return Kind.LAZY\n",
        "        return Kind.PLAIN\n",
        _in("lazy", k="flag"),
    ),
    Mutation(
        "modules with their own _apply are left to it",
        "devconv/survey.py",
        "                inner.append(home)\n                inventory.overriding.append(module)\n                continue",
        "                pass",
        _in("overriding_modules", "rnn", k="flag"),
    ),
    # -- the crowd
    Mutation(
        "view groups are no part of the crowd",
        "devconv/survey.py",
        "    if len(set(storages)) < len(storages) or not taken.isdisjoint(storages):",
        "    if False:",
        _in("views", k="flag"),
    ),
    Mutation(
        "a parameter with a gradient is no part of the crowd",
        "devconv/crowd.py",
        "            if grad is not None:\n                special.add(id(tensor))",
        "            if grad is not None:\n                pass",
        _in("grads", k="flag"),
    ),
    Mutation(
        "a parameter that a graph holds is no part of the crowd",
        "devconv/crowd.py",
        "(use_count(tensor) != 1 or chose_grad_dtype(tensor))",
        "(chose_grad_dtype(tensor))",
        _in("older_graphs", "refusals", k="flag"),
    ),
    Mutation(
        "a buffer that requires a gradient is no part of the crowd",
        "devconv/crowd.py",
        "if parameter else tensor.requires_grad",
        "if parameter else False",
        _in("requires_grad", k="flag"),
    ),
    Mutation(
        "a crowd is of one device and dtype",
        "devconv/planning.py",
        "            for alike in _parted(crowd, crowd.places)\n",
        "            for alike in [crowd]\n",
        _in("values", "identity", k="flag"),
    ),
    Mutation(
        "a crowd's parameters that were made under inference mode are swapped",
        "devconv/planning.py",
        "        parts = _parted(crowd, list(map(Tensor.is_inference, crowd.tensors)))\n",
        "        parts = [crowd]\n",
        ("tests/test_crowd.py", "-k", "inference"),
    ),
    Mutation(
        "a crowd's requires_grad goes along in a swap",
        "devconv/commit.py",
        "            learning.requires_grad_()",
        "            pass",
        _in("requires_grad", k="swap-flag"),
    ),
    Mutation(
        "a crowd's hooks are linked again after a swap",
        "devconv/commit.py",
        "        for tensor in internals.with_hooks(tensors):",
        "        for tensor in ():",
        _in("hooks", k="swap-flag"),
    ),
    Mutation(
        "attributes of a crowd's overwritten buffers are carried",
        "devconv/commit.py",
        "            if vars(tensor):\n                carry_attributes(tensor, staged)",
        "            pass",
        _in("attributes", k="flag"),
    ),
    Mutation(
        "undo: a crowd's swaps",
        "devconv/commit.py",
        "        if internals.impl_of(tensor) != impl:\n            internals.swap_impl(tensor, staged)",
        "        pass",
        (_FAULTS, "-k", "crowd and swap"),
    ),
    Mutation(
        "undo: a crowd's set-data",
        "devconv/commit.py",
        "        tensor.data = data\n",
        "        pass\n",
        (_FAULTS, "-k", "crowd"),
    ),
    Mutation(
        "undo: a crowd's overwritten buffers",
        "devconv/commit.py",
        "    crowd.put(before)",
        "    return",
        (_FAULTS, "-k", "crowd"),
    ),
    Mutation(
        "optimizers learn of a crowd's move",
        "devconv/commit.py",
        "            if crowd.parameter\n",
        "            if False\n",
        ("tests/test_crowd.py", "-k", "optimizer"),
    ),
    # -- the plan
    Mutation(
        "a no-op is decided first",
        "devconv/conversion.py",
        "if transfer is not None and settled(",
        "if False and settled(",
        ("tests/test_crowd.py", "-k", "there_already"),
    ),
    Mutation(
        "a tree that holds an override is never settled",
        "devconv/planning.py",
        "if inventory.overriding or transfer.empty or transfer.memory_format is not None:",
        "if transfer.empty or transfer.memory_format is not None:",
        _in("overriding_modules", k="nothing_moves"),
    ),
    Mutation(
        "a parameter held by a live graph is swapped, not set",
        "devconv/planning.py",
        "            live_graph=entry.live,",
        "            live_graph=False,",
        _in("older_graphs", k="float64-flag"),
    ),
    Mutation(
        "torch's swap flag decides",
        "devconv/planning.py",
        "            swap_flag=self.flags.swap,",
        "            swap_flag=False,",
        _in("identity", k="float64-swap-flag"),
    ),
    Mutation(
        "torch's overwrite flag decides",
        "devconv/planning.py",
        "            overwrite_flag=self.flags.overwrite and entry.owner is None,",
        "            overwrite_flag=False,",
        _in("identity", k="float64-overwrite-flag"),
    ),
    Mutation(
        "a parameter made under inference mode is swapped",
        "devconv/planning.py",
        "            and not tensor.is_inference()\n",
        "",
        _in("unusual_memory", k="still_runs and flag"),
    ),
    Mutation(
        "a view that only a graph holds is nobody's",
        "devconv/torch_internals.py",
        "    held = _held_by_python(views)\n",
        "    held = set(map(id, views))\n",
        _in("older_graphs", k="only_the_graph_holds and flag"),
    ),
    Mutation(
        "the running functions are asked for views",
        "devconv/torch_internals.py",
        "                held.update(single.intersection(map(id, variables.values())))\n",
        "",
        _in("refusals", k="wherever"),
    ),
    Mutation(
        "the ghost of a frozen parameter is thawed",
        "devconv/commit.py",
        "(tensor.requires_grad or ghost.thaw(staged))",
        "tensor.requires_grad",
        _in("older_graphs", k="frozen and flag"),
    ),
    Mutation(
        "undo: a thawed ghost is frozen again",
        "devconv/commit.py",
        "            tensor.requires_grad_(False)\n",
        "            pass\n",
        _in("older_graphs", k="move_that_fails"),
    ),
    Mutation(
        "a frozen parameter is given no gradient",
        "devconv/ghost.py",
        " or not target.requires_grad:",
        ":",
        _in("older_graphs", k="frozen and flag"),
    ),
    Mutation(
        "hooks that a ghost does not share are called by it",
        "devconv/ghost.py",
        "            if not shares_hooks:\n",
        "            if False:\n",
        _in("older_graphs", k="registered_after and flag"),
    ),
    Mutation(
        "a dense gradient is added to a sparse one in torch's order",
        "devconv/ghost.py",
        "            elif target.grad.layout is not torch.strided and arrived.layout is torch.strided:\n",
        "            elif False:\n",
        _in("older_graphs", k="to_a_sparse_one and flag"),
    ),
    Mutation(
        "state follows outside inference mode",
        "devconv/following.py",
        "with torch.inference_mode(mode=False), torch.no_grad():\n                _bring",
        "with torch.no_grad():\n                _bring",
        ("tests/test_following.py", "-k", "inference"),
    ),
    Mutation(
        "a function's view of its argument does not count as a holder",
        "devconv/conversion.py",
        "                result = result.data\n",
        "                pass\n",
        _in("refusals", k="returns_a_view"),
    ),
    Mutation(
        "set-data is tried before it is used",
        "devconv/planning.py",
        "                known = False\n            else:",
        "                known = True\n            else:",
        _in("identity", k="meta-flag"),
    ),
    Mutation(
        "refused: a view held outside",
        "devconv/planning.py",
        "    for key, shape in held.items():",
        "    for key, shape in ():",
        _in("refusals", k="float64-flag"),
    ),
    Mutation(
        "refused: what only C++ holds",
        "devconv/planning.py",
        "        if key in held or key in reduced or key in inside or entry.live or not tensor.requires_grad:\n            continue",
        "        continue",
        _in("refusals", k="only_cpp_holds and flag"),
    ),
    Mutation(
        "refused: a DistributedDataParallel model",
        "devconv/planning.py",
        "    if plan.inventory.reducers and plan.changes:",
        "    if False:",
        _in("refusals", k="ddp and float64-flag"),
    ),
    Mutation(
        "refused: the module inside a DistributedDataParallel",
        "devconv/planning.py",
        "    for key in reduced:\n",
        "    for key in ():\n",
        _in("refusals", k="inside_ddp and float64-flag"),
    ),
    Mutation(
        "refused: complex to real",
        "devconv/planning.py",
        "if decision.dtype.is_complex and not decision.to_dtype.is_complex:",
        "if False:",
        _in("kinds_of_tensors", k="complex"),
    ),
    Mutation(
        "refused: a dtype that the device lacks",
        "devconv/planning.py",
        "if not registry.backend_for(decision.target.type).capabilities.holds(decision.to_dtype):",
        "if False:",
        _in("refusals", k="lacks"),
    ),
    Mutation(
        "refused: meta without to_empty",
        "devconv/planning.py",
        'decision.device.type == "meta" and decision.target.type != "meta" and not transfer.empty and not opaque',
        "False",
        _in("kinds_of_tensors", k="to_empty"),
    ),
    Mutation(
        "refused: what does not fit in memory",
        "devconv/planning.py",
        "if free is not None and needed > free:",
        "if False:",
        _in("refusals", k="fit"),
    ),
    Mutation(
        "refused: a scripted module that would come apart",
        "devconv/planning.py",
        "            if entry.script and entry.parameter:",
        "            if False:",
        _in("refusals", k="script"),
    ),
    Mutation(
        "refused: a wrapper subclass that is held",
        "devconv/planning.py",
        "held=wrapper and (entry.live or internals.has_weak_references(tensor)),",
        "held=False,",
        _in("wrapper_subclasses", k="refused"),
    ),
    Mutation(
        "passed through: FSDP2",
        "devconv/planning.py",
        "    if inventory.stock:\n",
        "    if False:\n",
        _in("passed_through", k="fsdp2"),
    ),
    # -- the transfer
    Mutation(
        "an opaque function is asked once for each tensor",
        "devconv/conversion.py",
        "            if result is not entry.tensor:\n                entry.staged = result",
        "            if result is not entry.tensor:\n                entry.staged = ask(result, fn)",
        _in("ties", k="users and flag"),
    ),
    Mutation(
        "the autocast cache is cleared",
        "devconv/conversion.py",
        "            torch.clear_autocast_cache()\n",
        "",
        _in("autocast", k="meta or swap"),
    ),
    Mutation(
        "new tensors are made outside inference mode",
        "devconv/conversion.py",
        "ordinary = torch.inference_mode(mode=False) if torch.is_inference_mode_enabled() else nullcontext()",
        "ordinary = nullcontext()",
        _in("unusual_memory", "contexts", k="inference and flag"),
    ),
    Mutation(
        "derived weights are set aside with their graph",
        "devconv/conversion.py",
        "            if isinstance(value, Tensor):\n                derived",
        "            if False:\n                derived",
        _in("parametrizations", k="old and flag"),
    ),
    Mutation(
        "derived weights are derived afresh",
        "devconv/conversion.py",
        "        commit.set_attribute(self.module, self.name, value)",
        "        pass",
        _in("parametrizations", k="up_to_date and flag"),
    ),
    # -- the commit
    Mutation(
        "requires_grad is carried by a swap",
        "devconv/commit.py",
        "            if tensor.requires_grad:\n                staged.requires_grad_()",
        "",
        _in("requires_grad", k="swap-flag"),
    ),
    Mutation(
        "gradient hooks are linked again after a swap",
        "devconv/commit.py",
        "    if hooks is not None:\n        internals.set_backward_hooks(tensor, hooks)\n    hooks = internals.accumulate_hooks(tensor)",
        "    hooks = internals.accumulate_hooks(tensor)",
        _in("hooks", k="swap-flag"),
    ),
    Mutation(
        "accumulation hooks are linked again after a swap",
        "devconv/commit.py",
        "    if hooks is not None:\n        internals.set_accumulate_hooks(tensor, hooks)\n\n\ndef carry_attributes",
        "\n\ndef carry_attributes",
        _in("hooks", k="swap-flag"),
    ),
    Mutation(
        "a ghost delivers its gradient after a swap",
        "devconv/commit.py",
        "                ghost.attach(staged, tensor)",
        "                pass",
        _in("older_graphs", k="float64-flag"),
    ),
    Mutation(
        "a spent ghost gives up its storage",
        "devconv/commit.py",
        "                    ghost.release(entry.staged)",
        "                    pass",
        _in("held_loss", k="swap-flag"),
    ),
    Mutation(
        "a gradient stays the object that it was",
        "devconv/commit.py",
        "            holder.grad = grad\n",
        "            pass\n",
        _in("grads", k="swap-flag or meta-flag"),
    ),
    Mutation(
        "a class's own result wins over what the tensor carried",
        "devconv/commit.py",
        "                self._carry_result(entry, staged)",
        "                pass",
        _in("own_conversions", k="meta-flag or swap-flag"),
    ),
    Mutation(
        "attributes of a wrapper subclass are carried",
        "devconv/commit.py",
        "            for name, value in attributes.items():\n                vars(tensor).setdefault(name, value)",
        "",
        _in("wrapper_subclasses", k="flag"),
    ),
    Mutation(
        "attributes of buffers are carried",
        "devconv/commit.py",
        "                    carry_attributes(tensor, new)\n            entry.staged",
        "                    pass\n            entry.staged",
        _in("attributes", k="flag"),
    ),
    Mutation(
        "the class of a buffer is kept",
        "devconv/commit.py",
        "staged if type(staged) is not Tensor or type(tensor) is Tensor else staged.as_subclass(type(tensor))",
        "staged",
        _in("attributes", k="class_of_a_buffer and flag"),
        "xla",
    ),
    Mutation(
        "attributes and slots of an overwritten parameter are carried",
        "devconv/commit.py",
        "        carry_attributes(tensor, new)\n        if tensor.requires_grad and internals.chose",
        "        if tensor.requires_grad and internals.chose",
        _in("attributes", k="overwrite-flag"),
    ),
    Mutation(
        "hooks of an overwritten parameter are carried",
        "devconv/commit.py",
        "        internals.set_backward_hooks(new, internals.backward_hooks(tensor))\n",
        "",
        _in("hooks", k="overwrite-flag"),
    ),
    Mutation(
        "every name of an overwritten tensor is written",
        "devconv/commit.py",
        "                for slot in entry.slots:\n                    slots.append",
        "                for slot in entry.slots[:1]:\n                    slots.append",
        _in("ties", k="overwrite-flag"),
    ),
    Mutation(
        "overriding modules get a look-up in place of the function",
        "devconv/commit.py",
        "return getattr(module, internals.APPLY)(self.lookup)",
        "return getattr(module, internals.APPLY)(self.fn)",
        _in("overriding_modules", "rnn", "ties", k="flag"),
    ),
    Mutation(
        "the look-up carries the function's name",
        "devconv/commit.py",
        "            @functools.wraps(fn)\n",
        "",
        _in("overriding_modules", k="tells_the_doors"),
    ),
    # -- ghosts
    Mutation(
        "a ghost asks for dtype and device when it fires",
        "devconv/ghost.py",
        "arrived = gradient.to(target.device, target.dtype)",
        "arrived = gradient",
        _in("older_graphs", k="float64-flag"),
    ),
    Mutation(
        "a ghost calls the parameter's accumulation hooks",
        "devconv/ghost.py",
        "        for hook in list((internals.accumulate_hooks(target) or {}).values()):\n            hook(target)",
        "",
        _in("older_graphs", "optimizer_in_backward", k="float64-flag"),
    ),
    Mutation(
        "a ghost starts without the gradient that went to the parameter",
        "devconv/ghost.py",
        "    ghost.grad = None\n",
        "",
        _in("older_graphs", k="float64-flag"),
    ),
    Mutation(
        "a ghost does not keep the model alive",
        "devconv/ghost.py",
        "    current = weakref.ref(parameter)",
        "    current = lambda: parameter",
        _in("older_graphs", k="float64-flag"),
    ),
    Mutation(
        "a ghost that has run gives up its storage",
        "devconv/ghost.py",
        "            release(source)",
        "            pass",
        _in("older_graphs", k="float64-flag"),
    ),
    # -- the undo
    Mutation(
        "undo: at all",
        "devconv/conversion.py",
        "        while not commit.undone:",
        "        while False:",
        (_FAULTS, "-k", "in_follow"),
    ),
    Mutation(
        "undo: of an interrupt too",
        "devconv/conversion.py",
        "    except BaseException as error:\n        # Here",
        "    except Exception as error:\n        # Here",
        (_FAULTS, "-k", "in_follow"),
    ),
    Mutation(
        "undo: swaps",
        "devconv/commit.py",
        "    if internals.impl_of(tensor) != before:\n        internals.swap_impl(tensor, staged)",
        "",
        (_FAULTS, "-k", "in_follow and swap"),
    ),
    Mutation(
        "undo: autograd lets go of a ghost's delivery",
        "devconv/torch_internals.py",
        "    tensor._post_accumulate_grad_hooks = {} if hooks is None else hooks\n",
        "    tensor._post_accumulate_grad_hooks = hooks\n",
        (_FAULTS, "-k", "in_follow and swap"),
    ),
    Mutation(
        "undo: hooks of a swap",
        "devconv/commit.py",
        "    internals.set_accumulate_hooks(tensor, internals.accumulate_hooks(tensor))\n\n\ndef _undo_swap_crowd",
        "\n\ndef _undo_swap_crowd",
        (_FAULTS, "-k", "in_follow and meta"),
    ),
    Mutation(
        "undo: set-data",
        "devconv/commit.py",
        "        entry.tensor.data = before",
        "        pass",
        (_FAULTS, "-k", "in_follow and float64"),
    ),
    Mutation(
        "undo: slots",
        "devconv/commit.py",
        "            table[key] = tensor\n",
        "            pass\n",
        (_FAULTS, "-k", "in_follow and float64"),
    ),
    Mutation(
        "undo: gradients",
        "devconv/commit.py",
        "                entry.tensor.grad = grad.tensor\n",
        "                pass\n",
        (_FAULTS, "-k", "in_follow"),
    ),
    Mutation(
        "undo: attributes of the modules that were entered",
        "devconv/commit.py",
        "            _restore_dict(vars(module), attributes)\n",
        "",
        (_FAULTS, "-k", "in_follow or overridden"),
    ),
    Mutation(
        "undo: lists of the modules that were entered",
        "devconv/commit.py",
        "                _restore_content(container, content)\n",
        "                pass\n",
        (_FAULTS, "-k", "in_follow or overridden"),
    ),
    Mutation(
        "undo: derived weights",
        "devconv/commit.py",
        "        for module, name, value in reversed(self._attributes):",
        "        for module, name, value in ():",
        (_FAULTS, "-k", "in_follow"),
    ),
    Mutation(
        "undo: optimizers that have followed",
        "devconv/conversion.py",
        "        following.reconcile(optimizer, made.notes, commit.then)",
        "        following.reconcile(optimizer, made.notes)",
        (_FAULTS, "-k", "in_follow"),
    ),
    Mutation(
        "undo: goes on after an interrupt",
        "devconv/conversion.py",
        "            except KeyboardInterrupt:\n                _log",
        "            except KeyboardInterrupt:\n                break\n                _log",
        (_FAULTS, "-k", "during_the_undo and float64-swap"),
    ),
    # -- optimizers
    Mutation(
        "optimizers catch up with a model that is there already",
        "devconv/conversion.py",
        "        following.reconcile_all(request.optimizers, notes)\n",
        "",
        ("tests/test_following.py", "-k", "there_already"),
    ),
    Mutation(
        "an optimizer made after a move is left alone",
        "devconv/following.py",
        "            _seen.setdefault(self, _number)",
        "            pass",
        ("tests/test_following.py", "-k", "made_after"),
    ),
    Mutation(
        "the flat state of LBFGS is everybody's",
        "devconv/following.py",
        "        if isinstance(optimizer, torch.optim.LBFGS):",
        "        if False:",
        ("tests/test_following.py", "-k", "lbfgs"),
    ),
    Mutation(
        "a gradient that is registered too is linked as the object it is",
        "devconv/survey.py",
        "        entry.parameter = True\n    else:",
        "        pass\n    else:",
        ("tests/test_crowd.py", "-k", "further_up"),
    ),
    Mutation(
        "state follows",
        "devconv/following.py",
        "                state[key] = _carry(value, parameter, places, group, key)",
        "                pass",
        _in("optimizers", k="float64-flag"),
    ),
    Mutation(
        "state follows at the next step, with the flag",
        "devconv/following.py",
        "            _hook = register_optimizer_step_pre_hook(_before_step)",
        "            pass",
        _in("optimizers", k="float64-flag"),
    ),
    Mutation(
        "the step hook outlives the flag's scope",
        "devconv/following.py",
        "    if _seen.get(optimizer) != _number:",
        "    from . import flag\n\n    if flag.active() and _seen.get(optimizer) != _number:",
        _in("optimizers", k="float64-flag"),
    ),
    Mutation(
        "state inside lists follows (LBFGS)",
        "devconv/following.py",
        "        return items if isinstance(value, list) else type(value)(items)",
        "        return value",
        _in("optimizers", k="float64-flag and lbfgs"),
    ),
    Mutation(
        "groups are pointed at the new parameters after an overwrite",
        "devconv/following.py",
        '                group["params"][position] = current\n',
        "                pass\n",
        _in("optimizers", k="overwrite-convert"),
    ),
    Mutation(
        "state goes to the new parameters after an overwrite",
        "devconv/following.py",
        "                    optimizer.state[current] = optimizer.state.pop(parameter)",
        "                    pass",
        _in("optimizers", k="overwrite-convert"),
    ),
    Mutation(
        "the step count stays where torch keeps it",
        "devconv/following.py",
        '    if key == "step":',
        "    if False:",
        _in("optimizers", k="float64-flag"),
    ),
    Mutation(
        "state that is elsewhere stays there",
        "devconv/following.py",
        "device = parameter.device if value.device in {device for device, _ in places} else value.device",
        "device = parameter.device",
        _in("optimizer_companions", k="offloaded"),
        "xla",
    ),
    Mutation(
        "state of another dtype keeps it",
        "devconv/following.py",
        "value.dtype in {dtype for _, dtype in places} and _is_cast(value)",
        "_is_cast(value)",
        _in("optimizer_companions", k="master"),
    ),
    # -- the flag
    Mutation(
        "off is stock torch's own function again",
        "devconv/patches.py",
        "                setattr(self.target, self.name, self._original)\n            else:",
        "                pass\n            else:",
        _in("flag", k="scope_ends_with_its_block"),
    ),
    Mutation(
        "a patch on top is left alone",
        "devconv/patches.py",
        "            if self._replacement is None or vars(self.target).get(self.name) is not self._replacement:\n",
        "            if self._replacement is None:\n",
        _in("flag", k="on_top"),
    ),
    Mutation(
        "an interrupt while a patch is installed takes it out",
        "devconv/patches.py",
        "        try:\n            self.hold(holder)\n            yield",
        "        self.hold(holder)\n        try:\n            yield",
        ("tests/test_patches.py",),
    ),
    Mutation(
        "a second holder installs what the first was interrupted at",
        "devconv/patches.py",
        "            if self._installed:\n",
        "            if len(self._holders) > 1:\n",
        ("tests/test_patches.py",),
    ),
    Mutation(
        "that a conversion runs is forgotten with its context",
        "devconv/contexts.py",
        "    return copy_context().run(run)",
        "    return run()",
        (_FAULTS, "-k", "crowd and follow"),
    ),
    Mutation(
        "a scope belongs to its context",
        "devconv/flag.py",
        "        _override.set(value)\n        yield\n    finally:\n        _override.set(before)",
        "        before = set_process_wide(value)\n        yield\n    finally:\n        set_process_wide(bool(before))",
        _in("flag", k="scope"),
    ),
    Mutation(
        "doors look at the flag",
        "devconv/hook.py",
        "            if not flag.active() or conversion.running():",
        "            if conversion.running():",
        _in("flag", "threads", k="scope"),
    ),
    # -- XLA
    Mutation(
        "geometry is recorded on the way to a device without strides",
        "devconv/staging.py",
        "            record(tensors, [",
        "            (lambda *_: None)(tensors, [",
        _in("views", k="xla"),
        "xla",
    ),
    Mutation(
        "lost strides are a line of the report",
        "devconv/planning.py",
        "        if strided and not registry",
        "        if False and not registry",
        _in("kinds_of_tensors", k="channels_last"),
        "xla",
    ),
    Mutation(
        "refused: what the device silently leaves behind",
        "backends/devconv_xla/__init__.py",
        "unsupported_dtypes=UNSUPPORTED,",
        "",
        _in("kinds_of_tensors", k="quantised"),
        "xla",
    ),
    Mutation(
        "a fused optimizer goes on without fused kernels",
        "devconv/following.py",
        "        _choose_kernels(optimizer, index, group, notes)\n",
        "",
        _in("optimizers", k="adamw-fused and xla"),
        "xla",
    ),
    Mutation(
        "a fused optimizer is fused again where there are kernels",
        "devconv/following.py",
        '            group["fused"], group["foreach"] = True, unfused[index]\n',
        "            pass\n",
        _in("optimizers", k="adamw-fused and xla"),
        "xla",
    ),
    Mutation(
        "lazy tensors are retargeted",
        "devconv/staging.py",
        "            if route is Route.RETARGET:",
        "            if False:",
        _in("lazy", k="xla"),
        "xla",
    ),
)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit status."""
    sys.path.insert(0, str(ROOT))
    from ci.lanes import LANES

    lane = arguments[0] if arguments and arguments[0] in LANES else "cpu"
    words = [word for word in arguments if word not in LANES]
    chosen = [
        mutation
        for mutation in MUTATIONS
        if mutation.lane == lane and (not words or any(word in mutation.mechanism for word in words))
    ]
    if not chosen:
        raise SystemExit(f"no mutation of the lane {lane} has one of {words} in its mechanism")
    environment = os.environ | dict(LANES[lane].variables) | {"DEVCONV_LANE": lane, "DEVCONV_EVERY_OPTIMIZER": "1"}
    survivors = []
    workers = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(workers):
            copy = Path(folder) / str(number)
            copy.mkdir()
            for name in COPIED:
                _copy(ROOT / name, copy / name)
            copies.put(copy)

        def in_a_copy(run: Run) -> Callable[[Mutation], tuple[list[str], str]]:
            def run_there(mutation: Mutation) -> tuple[list[str], str]:
                copy = copies.get()
                try:
                    return run(mutation, copy, environment)
                finally:
                    copies.put(copy)

            return run_there

        distinct = list({mutation.tests: mutation for mutation in chosen}.values())
        for mutation, (failed, outcome) in zip(distinct, pool.map(in_a_copy(_run), distinct), strict=True):
            if failed:
                raise SystemExit(f"{mutation.tests} fail without a mutation: {outcome}\n  " + "\n  ".join(failed))
        for mutation, (failed, outcome) in zip(chosen, pool.map(in_a_copy(_try), chosen), strict=True):
            print(f"{'caught' if failed else 'SURVIVED'}  {mutation.mechanism}: {outcome}", flush=True)
            for name in failed[:3]:
                print(f"          {name}", flush=True)
            if not failed:
                survivors.append(mutation.mechanism)
    print(f"{lane}: {len(chosen) - len(survivors)} of {len(chosen)} mutations caught")
    return 1 if survivors else 0


Run = Callable[["Mutation", Path, dict[str, str]], tuple[list[str], str]]


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "build"))
    elif source.exists():
        shutil.copy(source, target)


def _try(mutation: Mutation, copy: Path, environment: dict[str, str]) -> tuple[list[str], str]:
    """`_run` with the mechanism switched off."""
    path = copy / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise SystemExit(
            f"{mutation.mechanism!r} no longer applies: {mutation.file} has {source.count(mutation.old)} of it"
        )
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        return _run(mutation, copy, environment)
    finally:
        path.write_text(source)


def _run(mutation: Mutation, copy: Path, environment: dict[str, str]) -> tuple[list[str], str]:
    """Run a mutation's tests in the copy as it is; the tests that failed, and pytest's last line."""
    # The copy comes before the installed package, and before anything cached of it.
    variables = {
        **environment,
        "PYTHONPATH": f"{copy}{os.pathsep}{copy / 'backends'}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider", "--maxfail=5", "--timeout=0"]
    try:
        done = subprocess.run(
            [*command, "-o", "faulthandler_timeout=0", *mutation.tests],
            cwd=copy,
            env=variables,
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ["(hung)"], "it hung"
    failed = list(dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)))
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]])[-1]
    if done.returncode < 0:
        failed.append(f"(the process ended by signal {-done.returncode})")
    elif done.returncode not in (0, 1):
        raise SystemExit(f"{mutation.mechanism!r}: pytest could not run ({done.returncode}):\n{done.stdout[-2000:]}")
    return failed, last


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
