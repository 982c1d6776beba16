"""Every call of `generate` uses the weights that the model has when the call starts."""

import copy
import gc
import itertools
import pickle
import random
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils.stateless import _reparametrize_module
from torch.optim.swa_utils import AveragedModel
from transformers import LogitsProcessorList
from vaswani.generation import incremental_vaswani, linear_vaswani, products_vaswani
from ways_to_change_weights import (
    FLOAT_WAYS,
    FORMS,
    INT8_WAYS,
    SOURCE,
    TOLERANCES,
    WAYS,
    answer,
    build,
    equal,
    in_all_forms,
    layer_of,
    layers_of,
    load_from_file,
    load_in_place,
    packs,
    parameter,
)


@packs
@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_call_after_a_change_answers_from_the_new_weights(way, dtype):
    if dtype == torch.int8 and way in FLOAT_WAYS:
        pytest.skip("int8 weights are not changed in this way")
    if dtype != torch.int8 and way in INT8_WAYS:
        pytest.skip("only int8 weights have scales")
    model = build(dtype)
    before = answer(model)
    for _ in range(3):  # the kernels watch memory from the third call on
        assert equal(answer(model), before)
    WAYS[way](model)
    after = answer(model)
    assert not equal(after, before)
    assert equal(after, answer(copy.deepcopy(model)))


@pytest.mark.parametrize("dtype", FORMS)
def test_a_bias_of_one_value_counts_for_all_outputs(dtype):
    model = build(dtype)
    for layer in layers_of(model):
        layer.bias = parameter(torch.full((layer.out_features,), 0.5, dtype=model.dtype))
    expected = answer(model)[1]
    for layer in layers_of(model):
        layer.bias = parameter(layer.bias.data[:1].clone())
    torch.testing.assert_close(answer(model)[1], expected, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("name", "part"), [("fc1", "bias"), ("fc1", "weight_scale"), ("final_layer_norm", "weight")]
)
def test_a_parameter_of_another_length_is_an_error_of_torch(name, part):
    model = build(torch.int8)
    answer(model)
    layer = getattr(layer_of(model), name)
    setattr(layer, part, parameter(getattr(layer, part).data[:100].clone()))
    with pytest.raises(RuntimeError, match="100"):
        answer(model)


@packs
def test_old_copies_of_weights_are_freed_before_new_ones_are_made(monkeypatch):
    if products_vaswani.library() is None:
        pytest.skip("this machine compiles no kernels")
    model, alive = build(), []
    answer(model)
    layer = layer_of(model).fc1
    (packed,) = linear_vaswani._packed_of[layer].values()
    old = weakref.ref(packed.panels)
    del packed
    fingerprint = products_vaswani.fingerprint
    monkeypatch.setattr(
        products_vaswani,
        "fingerprint",
        lambda weight: alive.append(old() is not None) or fingerprint(weight),
    )
    layer.weight.data.neg_()
    answer(model)
    assert alive == [False]


@pytest.mark.parametrize("dtype", FORMS)
def test_a_call_after_loading_a_file_answers_from_the_file(dtype, tmp_path):
    model = build(dtype)
    for _ in range(3):
        answer(model)
    load_from_file(model, tmp_path)
    assert equal(answer(model), answer(build(dtype, seed=3)))


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("call", [{"num_beams": 1}, {"do_sample": True, "num_beams": 1}])
def test_greedy_search_and_sampling_see_a_change(call, dtype):
    model = build(dtype)

    def tokens(of):
        torch.manual_seed(0)
        return of.generate(SOURCE, max_new_tokens=6, eos_token_id=None, **call)

    before = tokens(model)
    for _ in range(2):
        tokens(model)
    layer_of(model).fc2.weight.data[:, 128:] *= -8
    assert not torch.equal(tokens(model), before)
    assert torch.equal(tokens(model), tokens(copy.deepcopy(model)))


@pytest.mark.parametrize("num_beams", [1, 4])
def test_a_global_hook_sees_the_modules_of_the_model(num_beams):
    model, seen = build(), set()
    with register_module_forward_pre_hook(lambda module, _: seen.add(module)):
        model.generate(SOURCE, num_beams=num_beams, max_new_tokens=3)
    assert layer_of(model).fc1 in seen
    assert seen <= set(model.modules())


@in_all_forms
def test_parameters_that_are_replaced_for_a_while_are_used_for_that_while(dtype):
    # Afterwards torch restores another weight for a module with two names, such as a
    # shared embedding.
    model = build(dtype, share_encoder_decoder_embeddings=False)
    before = answer(model)
    others = {
        name: value * 0.5 if value.is_floating_point() else value
        for name, value in model.named_parameters()
    }
    with _reparametrize_module(model, others, tie_weights=True):
        meanwhile = answer(model)
    assert not equal(meanwhile, before)
    assert equal(answer(model), before)


@packs
@in_all_forms
@pytest.mark.parametrize("norm_position", ["post", "pre"])
def test_layers_that_change_during_a_call_leave_its_answer(dtype, norm_position, monkeypatch):
    model = build(dtype, norm_position=norm_position)
    before = answer(model)
    steps, step = [], incremental_vaswani.IncrementalDecoder.step

    def step_and_write(*args):
        steps.append(step(*args))
        if len(steps) == 2:
            for name, parameter in model.model.decoder.named_parameters():
                if "embed" not in name:
                    parameter.data.copy_(parameter.data.flip(0))
        return steps[-1]

    monkeypatch.setattr(incremental_vaswani.IncrementalDecoder, "step", step_and_write)
    assert equal(answer(model), before)
    assert not equal(answer(model), before)


class OpenCall:
    """A call of `generate` that waits in its second step until it is released."""

    def __init__(self, model):
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(model,))

    def _run(self, model):
        steps = itertools.count()

        def wait(input_ids, scores):
            if next(steps) == 1:
                self.reached.set()
                assert self.go_on.wait(30)
            return scores

        model.generate(SOURCE, max_new_tokens=4, logits_processor=LogitsProcessorList([wait]))

    def __enter__(self):
        self.thread.start()
        assert self.reached.wait(30)

    def __exit__(self, *exception):
        self.go_on.set()
        self.thread.join()


@in_all_forms
def test_calls_beside_an_open_one_see_a_change(dtype):
    model = build(dtype)
    before = answer(model)
    with OpenCall(model):
        load_in_place(model)
        answers = [answer(model) for _ in range(5)]
    expected = answer(build(dtype, seed=3))
    assert not equal(before, expected)
    assert all(equal(found, expected) for found in answers)


def copied_by_pickle(model):
    return pickle.loads(pickle.dumps(model))


@in_all_forms
@pytest.mark.parametrize("make", [copy.deepcopy, AveragedModel, copied_by_pickle, copy.copy])
def test_a_copy_made_during_a_call_is_a_model_of_its_own(make, dtype):
    model = build(dtype)
    expected = answer(model)
    with OpenCall(model):
        copied = make(model)
    # int8 weights are not trained, and a shallow copy shares the parameters.
    if dtype != torch.int8 and make is not copy.copy:
        copied.train()(input_ids=SOURCE, labels=SOURCE).loss.backward()
        assert all(parameter.grad is not None for parameter in copied.parameters())
        assert all(parameter.grad is None for parameter in model.parameters())
    copied.eval()
    assert equal(answer(copied.module if make is AveragedModel else copied), expected)


def attributes(model):
    """Return the identities of all attributes of a model and its parts."""
    return {
        (name, key): id(value)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
    } | {
        (name, key, part): id(content)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, dict)
        for part, content in value.items()
    }


@in_all_forms
@pytest.mark.parametrize("call", [{"num_beams": 4}, {}, {"do_sample": True}])
def test_an_open_call_has_replaced_no_attribute(call, dtype, monkeypatch):
    model = build(dtype)
    model.generate(SOURCE, max_new_tokens=2, **call)
    before, seen = attributes(model), []
    for name in ("read", "step"):
        method = getattr(incremental_vaswani.IncrementalDecoder, name)

        def watched(*arguments, method=method, **options):
            seen.append(attributes(model) == before)
            return method(*arguments, **options)

        monkeypatch.setattr(incremental_vaswani.IncrementalDecoder, name, watched)
    model.generate(SOURCE, max_new_tokens=40, **call)
    assert len(seen) > 1
    assert all(seen)
    assert attributes(model) == before


@in_all_forms
def test_500_interrupts_leave_the_model_as_it_was(dtype):
    model = build(dtype, decoder_layers=1)
    expected = answer(model)
    before = attributes(model)
    durations = []
    for _ in range(3):
        started = time.perf_counter()
        answer(model)
        durations.append(time.perf_counter() - started)
    shortest = min(durations)  # later interrupts would come after the call
    rng, interrupted = random.Random(0), 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while interrupted < 500:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, shortest))
                answer(model)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
                assert attributes(model) == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        torch.set_grad_enabled(True)  # an interrupt inside torch.no_grad itself leaves it off
    assert equal(answer(model), expected)


@in_all_forms
def test_eight_threads_answer_while_another_writes(dtype):
    model, changed = build(dtype), build(dtype, seed=3)
    old, new = answer(model), answer(changed)
    stop, failures = threading.Event(), []

    def write():
        weights = [copy.deepcopy(source.state_dict()) for source in (model, changed)]
        for state in itertools.cycle(weights):
            model.load_state_dict(state)
            if stop.is_set():
                return

    def ask():
        try:
            for _ in range(6):
                answer(model)
        except Exception as error:  # errors in threads would be lost
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(ask)
    stop.set()
    writer.join()
    assert not failures
    model.load_state_dict(changed.state_dict())
    with ThreadPoolExecutor(8) as pool:
        answers = [job.result() for job in [pool.submit(answer, model) for _ in range(16)]]
    assert all(equal(found, new) for found in answers)
    assert not equal(old, new)


@in_all_forms
def test_eight_threads_answer_while_another_moves_the_weights(dtype):
    # The allocator returns large weights to the system as soon as they are moved.
    model = build(dtype, decoder_ffn_dim=8192)
    expected, stop = answer(model), threading.Event()

    def move():
        while not stop.is_set():
            for weight in itertools.chain(model.parameters(), model.buffers()):
                weight.data = weight.data.clone()

    mover = threading.Thread(target=move)
    mover.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            answers = [job.result() for job in [pool.submit(answer, model) for _ in range(24)]]
    finally:
        stop.set()
        mover.join()
    assert all(equal(found, expected) for found in answers)


FORK = """
import os, sys, threading
sys.path[:0] = [{tests!r}, {root!r}]
import torch
torch.set_num_threads(1)
from test_weights_of_a_call import OpenCall
from ways_to_change_weights import FORMS, answer, build, equal, load_in_place
for dtype in FORMS:
    model = build(dtype)
    for _ in range(3):
        answer(model)
    with OpenCall(model):
        child = os.fork()
        if child == 0:
            load_in_place(model)
            os._exit(0 if equal(answer(model), answer(build(dtype, seed=3))) else 3)
        status = os.waitpid(child, 0)[1]
    assert equal(answer(model), answer(build(dtype)))
    if status:
        sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="this system has no fork")
def test_a_process_forked_during_a_call_answers_from_its_own_weights():
    folder = Path(__file__).resolve().parent
    script = FORK.format(tests=str(folder), root=str(folder.parent))
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("dtype", "models"), [(torch.float32, 60), (torch.bfloat16, 30), (torch.int8, 30)]
)
def test_many_models_and_calls_leave_no_memory_behind(dtype, models):
    def used():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    if not Path("/proc/self/statm").exists():
        pytest.skip("this system does not tell the memory of a process")
    sizes = {"decoder_ffn_dim": 1024, "decoder_layers": 1}
    kept = build(dtype, **sizes)
    for _ in range(5):
        answer(kept, max_new_tokens=3)
    gc.collect()
    before, known, gone = used(), len(linear_vaswani._packed_of), []
    for _ in range(models):
        model = build(dtype, **sizes)
        for _ in range(2):
            answer(model, max_new_tokens=3)
        gone.append(weakref.ref(model))
        del model
    for _ in range(3 * models):
        answer(kept, max_new_tokens=3)
    gc.collect()
    assert not any(reference() for reference in gone)
    assert len(linear_vaswani._packed_of) == known
    one = sum(parameter.nbytes for parameter in kept.parameters())
    assert used() - before < 20 * one


def test_training_between_two_calls_is_seen():
    model, source = build(decoder_layers=1), torch.tensor([[5, 6, 2]])
    model.generate(source, max_new_tokens=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        model.train()(input_ids=source, labels=torch.tensor([[9, 8, 7, 2]])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model.eval().generate(source).tolist() == [[2, 9, 8, 7, 2]]
